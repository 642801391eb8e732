/* folders.c: folders of checkpoints, and threads that work on them. */
#include "server/private.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/ckpt.h"

/* A plain name, or one of a checkpoint that is being written. */
static int check_folder(const char *name)
{
    static const char temporary[] = ".tmp-";
    enum { PREFIX = sizeof temporary - 1 };
    return ckpt_name_check(strncmp(name, temporary, PREFIX) ? name
                                                            : name + PREFIX);
}

static int open_below(int at, const char *name, int *out)
{
    *out = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*out >= 0)
        return PERSIA_OK;
    return err_set(PERSIA_EIO, "the folder %s cannot be opened below the "
                   "server's folder of checkpoints: %s.  Server and client "
                   "must see the same folder, on shared storage", name,
                   strerror(errno));
}

static int check_proof(int folder, const char *name, const char *proof)
{
    char found[PROOF + 1];
    struct stat st;
    int fd = openat(folder, ".proof",
                    O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return err_set(PERSIA_EIO, "%s/.proof cannot be opened: %s", name,
                       strerror(errno));
    ssize_t n = fstat(fd, &st) || !S_ISREG(st.st_mode)
                    ? -1
                    : read(fd, found, sizeof found);
    close(fd);
    if (n < 0)
        return err_set(PERSIA_EIO, "%s/.proof cannot be read", name);
    if ((size_t)n == strlen(proof) && !memcmp(found, proof, (size_t)n))
        return PERSIA_OK;
    return err_set(PERSIA_EIO, "the folder %s that the server sees is not "
                   "the client's: its .proof differs.  Both must name the "
                   "same folder, on shared storage", name);
}

int folder_open(const ps_service *s, const char *root, const char *folder,
                const char *proof, int *out)
{
    int above = -1, rc;
    *out = -1;
    if (s->checkpoints < 0)
        return err_set(PERSIA_EARG, "the server has no folder of "
                       "checkpoints: start it with --checkpoints");
    if ((rc = ckpt_name_check(root)) || (rc = check_folder(folder)) ||
        (rc = open_below(s->checkpoints, root, &above)))
        return rc;
    rc = open_below(above, folder, out);
    close(above);
    if (!rc && *proof)
        rc = check_proof(*out, folder, proof);
    if (rc && *out >= 0) {
        close(*out);
        *out = -1;
    }
    return rc;
}

void admin_end(ps_service *s)
{
    pthread_mutex_lock(&s->admin_lock);
    snapshot_drop_locked(s);
    restore_drop_locked(s);
    while (s->writers || s->readers)
        pthread_cond_wait(&s->ended, &s->admin_lock);
    pthread_mutex_unlock(&s->admin_lock);
}
