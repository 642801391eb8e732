/* open.c: the devices by name; libpersia_cuda.so is opened at run time. */
#include "cuda/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cuda/host.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* Written once. */
static cuda_device host;
static const cuda_device *cuda;
static char why_not[512]; /* cuda is NULL */

/* The path of a library in the folder of this one. */
static int cuda_open_beside(const char *name, char *out, size_t room)
{
    Dl_info here;
    if (!dladdr((const void *)&once, &here) || !here.dli_fname)
        return 0;
    const char *slash = strrchr(here.dli_fname, '/');
    int folder = slash ? (int)(slash - here.dli_fname) : 1;
    return (size_t)snprintf(out, room, "%.*s/%s", folder,
                            slash ? here.dli_fname : ".", name) < room;
}

static void open_library(void)
{
    char path[4096];
    void *library = NULL;
    cuda_library_fn get = NULL;
    if (cuda_open_beside("libpersia_cuda.so", path, sizeof path))
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why_not, sizeof why_not, "%s", dlerror());
        return;
    }
    *(void **)&get = dlsym(library, CUDA_LIBRARY_SYMBOL);
    const cuda_device *found = get ? get(CUDA_LIBRARY_VERSION) : NULL;
    int n = 0, code = found ? found->mem.count(&n) : 0;
    if (!found)
        snprintf(why_not, sizeof why_not,
                 "libpersia_cuda.so is of another version");
    else if (code || n == 0)
        snprintf(why_not, sizeof why_not, "no device: %s",
                 code ? found->mem.text(code) : "none is there");
    else
        cuda = found;
    if (!cuda)
        dlclose(library);
}

static void open_all(void)
{
    host.mem = *persia_mem_host_device();
    host_kernels(&host);
    open_library();
}

int persia_cuda_open(const char *name, const cuda_device **out)
{
    pthread_once(&once, open_all);
    *out = strcmp(name, "host") == 0   ? &host
           : strcmp(name, "cuda") == 0 ? cuda
                                       : NULL;
    if (*out)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "the device %s cannot be used: %s", name,
                          why_not[0] ? why_not : "it is not known");
}

int persia_cuda_rows_travel(uint64_t values, uint64_t rows, uint64_t ids,
                            uint64_t bags, uint32_t bytes)
{
    /* Values and rows travel there and back, places and offsets there. */
    const uint64_t pooled = 2 * bytes * values;
    const uint64_t places = 4 * ids + (bags ? 4 * (bags + 1) : 0);
    return 8 * rows + places < pooled;
}
