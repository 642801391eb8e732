/* root.c: where a shard finds the folders of its checkpoints. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- folders below a root ----------------------------------------------- */

struct ckpt_root {
    pthread_mutex_t lock; /* guards: */
    int fd;               /* the open folder, or -1 */
    int log;              /* that of the server's log, or -1 */
    ckpt_far far;         /* without `open`: there is a folder */
};

static const char temporary[] = ".tmp-";
enum { TEMPORARY = sizeof temporary - 1 };

/* A plain name, or one of a checkpoint that is being written. */
static int root_check_folder(const char *name)
{
    return persia_ckpt_name_check(
        strncmp(name, temporary, TEMPORARY) ? name : name + TEMPORARY);
}

static int open_below(int at, const char *name, int *out)
{
    *out = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*out >= 0)
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_EIO,
        "the folder %s cannot be opened below the "
        "server's folder of checkpoints: %s.  Server and client "
        "must see the same folder, on shared storage",
        name, strerror(errno));
}

static int root_check_proof(int folder, const char *name, const char *proof)
{
    char found[CKPT_PROOF + 1];
    struct stat st;
    int fd = openat(folder, ".proof",
                    O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return persia_err_set(PERSIA_EIO, "%s/.proof cannot be opened: %s",
                              name, strerror(errno));
    ssize_t n = fstat(fd, &st) || !S_ISREG(st.st_mode)
                    ? -1
                    : read(fd, found, sizeof found);
    close(fd);
    if (n < 0)
        return persia_err_set(PERSIA_EIO, "%s/.proof cannot be read", name);
    if ((size_t)n == strlen(proof) && !memcmp(found, proof, (size_t)n))
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_EIO,
        "the folder %s that the server sees is not "
        "the client's: its .proof differs.  Both must name the "
        "same folder, on shared storage",
        name);
}

/* Where a job's files are; its own copy of all that it takes to open them. */
typedef struct below {
    int root;
    char name[CKPT_NAME], folder[CKPT_NAME + TEMPORARY], proof[CKPT_PROOF];
} below;

static int below_open(void *ctx, int *out)
{
    const below *b = ctx;
    int above = -1;
    int rc = open_below(b->root, b->name, &above);
    *out = -1;
    if (rc)
        return rc;
    rc = open_below(above, b->folder, out);
    close(above);
    if (!rc && *b->proof)
        rc = root_check_proof(*out, b->folder, b->proof);
    if (rc && *out >= 0) {
        close(*out);
        *out = -1;
    }
    return rc;
}

static void below_free(void *ctx)
{
    below *b = ctx;
    if (b->root >= 0)
        close(b->root);
    free(b);
}

/* ---- storage that is no folder ------------------------------------------ */

/* As `below`. */
typedef struct beyond {
    const ckpt_far *far;
    void *job; /* NULL until it is opened */
    int writes;
    char name[CKPT_NAME], folder[CKPT_NAME + TEMPORARY], proof[CKPT_PROOF];
} beyond;

static int beyond_open(void *ctx, int *out)
{
    beyond *b = ctx;
    return b->far->open(b->far->ctx, b->name, b->folder, b->proof, b->writes,
                        out, &b->job);
}

static int beyond_put(void *ctx, const char *name)
{
    const beyond *b = ctx;
    return b->far->put(b->job, name);
}

static int beyond_get(void *ctx, const ckpt_file *files, size_t n)
{
    const beyond *b = ctx;
    return b->far->get(b->job, files, n);
}

static void beyond_free(void *ctx)
{
    beyond *b = ctx;
    if (b->job)
        b->far->close(b->job);
    free(b);
}

/* The names have been checked. */
static int root_find_beyond(const ckpt_root *r, const char *name,
                            const char *folder, const char *proof, int writes,
                            ckpt_io **out)
{
    beyond *b = calloc(1, sizeof *b);
    if (!b)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a folder");
    b->far = &r->far;
    b->writes = writes;
    memcpy(b->name, name, strlen(name) + 1);
    memcpy(b->folder, folder, strlen(folder) + 1);
    memcpy(b->proof, proof, strlen(proof) + 1);
    int rc = persia_ckpt_folder(
        &(ckpt_opener){beyond_open, beyond_free, b, beyond_put, beyond_get},
        CKPT_FAR_CHUNK, out);
    if (rc)
        beyond_free(b);
    return rc;
}

void persia_ckpt_root_set_far(ckpt_root *r, const ckpt_far *far)
{
    r->far = *far;
}

/* ---- finding ------------------------------------------------------------ */

static int root_fd(ckpt_root *r, int log, int *out)
{
    pthread_mutex_lock(&r->lock);
    const int fd = log ? r->log : r->fd, there = fd >= 0;
    *out = there ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    pthread_mutex_unlock(&r->lock);
    if (!there)
        return persia_err_set(PERSIA_EARG,
                              "the server has no folder of "
                              "checkpoints: start it with --checkpoints");
    return *out >= 0
               ? PERSIA_OK
               : persia_err_set(PERSIA_EIO, "the folder of checkpoints: %s",
                                strerror(errno));
}

static int find_below(void *root, const char *name, const char *folder,
                      const char *proof, int writes, ckpt_io **out)
{
    const int log = !strcmp(name, CKPT_LOG_ROOT);
    int rc = log ? PERSIA_OK : persia_ckpt_name_check(name);
    if (log)
        name = "."; /* folders lie in it */
    if (!rc && writes && !*proof)
        rc = persia_err_set(PERSIA_EARG,
                            "a snapshot needs a proof: the content of "
                            "a file .proof in its folder");
    if (!rc && strlen(proof) >= CKPT_PROOF)
        rc = persia_err_set(PERSIA_EARG, "a proof of %zu bytes",
                            strlen(proof));
    if (!rc)
        rc = root_check_folder(folder);
    const ckpt_root *r = root;
    if (!rc && r->far.open && !log)
        return root_find_beyond(r, name, folder, proof, writes, out);
    if (rc)
        return rc;
    below *b = calloc(1, sizeof *b);
    if (!b)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a folder");
    memcpy(b->name, name, strlen(name) + 1);
    memcpy(b->folder, folder, strlen(folder) + 1);
    memcpy(b->proof, proof, strlen(proof) + 1);
    rc = root_fd(root, log, &b->root);
    if (!rc)
        rc = persia_ckpt_folder(
            &(ckpt_opener){below_open, below_free, b, NULL, NULL}, CKPT_CHUNK,
            out);
    if (rc)
        below_free(b);
    return rc;
}

int persia_ckpt_root_open(ckpt_root **out)
{
    ckpt_root *r = calloc(1, sizeof *r);
    *out = r;
    if (!r)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a folder");
    pthread_mutex_init(&r->lock, NULL);
    r->fd = r->log = -1;
    return PERSIA_OK;
}

/* `at` is a field of r. */
static int root_set_path(ckpt_root *r, int *at, const char *path,
                         const char *what)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), before;
    if (fd < 0)
        return persia_err_set(PERSIA_EIO,
                              "the folder of %s %s cannot be opened: %s", what,
                              path, strerror(errno));
    pthread_mutex_lock(&r->lock);
    before = *at;
    *at = fd;
    pthread_mutex_unlock(&r->lock);
    if (before >= 0)
        close(before);
    return PERSIA_OK;
}

int persia_ckpt_root_set(ckpt_root *r, const char *path)
{
    return root_set_path(r, &r->fd, path, "checkpoints");
}

int persia_ckpt_root_set_log(ckpt_root *r, const char *path)
{
    return root_set_path(r, &r->log, path, "the log");
}

ckpt_places persia_ckpt_root_places(ckpt_root *r)
{
    return (ckpt_places){find_below, r};
}

void persia_ckpt_root_close(ckpt_root *r)
{
    if (!r)
        return;
    if (r->fd >= 0)
        close(r->fd);
    if (r->log >= 0)
        close(r->log);
    if (r->far.release)
        r->far.release(r->far.ctx);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

/* ---- open folders of this process --------------------------------------- */

/* An opener of a descriptor, its own until it is opened. */
static int root_descriptor_open(void *ctx, int *out)
{
    int *fd = ctx;
    *out = *fd;
    *fd = -1;
    return PERSIA_OK;
}

static void root_descriptor_free(void *ctx)
{
    int *fd = ctx;
    if (*fd >= 0)
        close(*fd);
    free(fd);
}

static int root_find_descriptor(void *ctx, const char *root,
                                const char *folder, const char *proof,
                                int writes, ckpt_io **out)
{
    char *end;
    const unsigned long number = strtoul(proof, &end, 10);
    (void)ctx;
    (void)writes;
    int *fd = malloc(sizeof *fd);
    if (!fd)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a folder");
    *fd = end == proof || *end || number > INT32_MAX
              ? -1
              : fcntl((int)number, F_DUPFD_CLOEXEC, 0);
    int rc = *fd >= 0
                 ? persia_ckpt_folder(
                       &(ckpt_opener){root_descriptor_open,
                                      root_descriptor_free, fd, NULL, NULL},
                       CKPT_CHUNK, out)
                 : persia_err_set(PERSIA_EARG,
                                  "%s/%s: \"%s\" is no open "
                                  "folder",
                                  root, folder, proof);
    if (rc)
        root_descriptor_free(fd);
    return rc;
}

const ckpt_places persia_ckpt_descriptors = {root_find_descriptor, NULL};
