/* folders.c: folders of checkpoints; they are opened by a job. */
#include "server/private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/ckpt.h"

enum { PROOF = sizeof ((wire_snapshot *)0)->proof };

/* A plain name, or one of a checkpoint that is being written. */
static int check_folder(const char *name)
{
    static const char temporary[] = ".tmp-";
    enum { PREFIX = sizeof temporary - 1 };
    return persia_ckpt_name_check(
        strncmp(name, temporary, PREFIX) ? name : name + PREFIX);
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

static int check_proof(int folder, const char *name, const char *proof)
{
    char found[PROOF + 1];
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
typedef struct place {
    int checkpoints;
    char root[WIRE_NAME], folder[WIRE_NAME], proof[PROOF];
} place;

static int place_open(void *ctx, int *out)
{
    const place *p = ctx;
    int above = -1;
    int rc = open_below(p->checkpoints, p->root, &above);
    *out = -1;
    if (rc)
        return rc;
    rc = open_below(above, p->folder, out);
    close(above);
    if (!rc && *p->proof)
        rc = check_proof(*out, p->folder, p->proof);
    if (rc && *out >= 0) {
        close(*out);
        *out = -1;
    }
    return rc;
}

static void place_free(void *ctx)
{
    place *p = ctx;
    if (p->checkpoints >= 0)
        close(p->checkpoints);
    free(p);
}

static int checkpoints_of(ps_service *s, int *out)
{
    pthread_mutex_lock(&s->admin_lock);
    const int there = s->checkpoints >= 0;
    *out = there ? fcntl(s->checkpoints, F_DUPFD_CLOEXEC, 0) : -1;
    pthread_mutex_unlock(&s->admin_lock);
    if (!there)
        return persia_err_set(PERSIA_EARG,
                              "the server has no folder of "
                              "checkpoints: start it with --checkpoints");
    return *out >= 0
               ? PERSIA_OK
               : persia_err_set(PERSIA_EIO, "the folder of checkpoints: %s",
                                strerror(errno));
}

int folder_files(void *service, const char *root, const char *folder,
                 const char *proof, int writes, ckpt_io **out)
{
    ps_service *s = service;
    int rc = persia_ckpt_name_check(root);
    if (!rc && writes && !*proof)
        rc = persia_err_set(PERSIA_EARG,
                            "a snapshot needs a proof: the content of "
                            "a file .proof in its folder");
    if (!rc)
        rc = check_folder(folder);
    if (rc)
        return rc;
    place *p = calloc(1, sizeof *p);
    if (!p)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a folder");
    memcpy(p->root, root, strlen(root) + 1);
    memcpy(p->folder, folder, strlen(folder) + 1);
    memcpy(p->proof, proof, strlen(proof) + 1);
    rc = checkpoints_of(s, &p->checkpoints);
    if (!rc)
        rc = persia_ckpt_folder(&(ckpt_opener){place_open, place_free, p},
                                CKPT_CHUNK, out);
    if (rc)
        place_free(p);
    return rc;
}
