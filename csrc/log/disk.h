/* disk.h: the files of a log: one folder, and what is done in it.
 *
 * A log makes, appends to, syncs, lists and removes files by these calls
 * alone, so that a test or a simulation may be the disk.  Each call is 0 or an
 * errno.
 */
#ifndef PERSIA_LOG_DISK_H
#define PERSIA_LOG_DISK_H

#include <stddef.h>
#include <stdint.h>

#include "base/base.h"
#include "mem/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct log_disk log_disk;
struct log_disk {
    /* An open file of the folder, to be closed.  makes: a new and empty one,
     * in the place of what had its name. */
    int (*open)(log_disk *d, const char *name, int makes, int *file);
    void (*close)(log_disk *d, int file);
    /* All bytes of the spans, at `at`; after an error some of them. */
    int (*write)(log_disk *d, int file, uint64_t at, const wire_span *spans,
                 size_t n);
    /* Up to n bytes: fewer at the end of the file. */
    int (*read)(log_disk *d, int file, uint64_t at, void *to, size_t n,
                size_t *got);
    int (*size)(log_disk *d, int file, uint64_t *bytes);
    int (*cut)(log_disk *d, int file, uint64_t bytes); /* truncates */
    int (*sync)(log_disk *d, int file);   /* its content lasts */
    int (*sync_folder)(log_disk *d);      /* the names last */
    int (*remove)(log_disk *d, const char *name);
    int (*rename)(log_disk *d, const char *from, const char *to);
    /* fn(ctx, name) for each file, in any order. */
    int (*list)(log_disk *d, int (*fn)(void *ctx, const char *name),
                void *ctx);
    void (*free)(log_disk *d);
};

/* The folder of this path, which is made where it is not there.  claims: no
 * other log has it until it is freed; PERSIA_EUNAVAILABLE where one has. */
PERSIA_API int persia_log_disk_open(const char *path, int claims,
                                    log_disk **out);

#ifdef __cplusplus
}
#endif
#endif
