/* disk.h: a disk in memory that is full, fails, and loses what was not
 * synced. */
#ifndef PERSIA_TESTS_LOG_DISK_H
#define PERSIA_TESTS_LOG_DISK_H

#include "log/disk.h"

typedef struct memory_file {
    char name[64];
    char *data;       /* [bytes] */
    uint64_t bytes;
    char *synced;     /* [synced_n] the content at the last sync */
    uint64_t synced_n;
    int there;        /* its name */
} memory_file;

enum { MEMORY_FILES = 4096 };

typedef struct memory_disk {
    log_disk disk; /* first; free() does nothing */
    char busy; /* spins: one call at a time, as of a kernel */
    memory_file files[MEMORY_FILES];
    int files_n;
    uint64_t room;   /* bytes that it takes more; UINT64_MAX: any */
    int sync_fails;  /* an errno, or 0 */
    uint64_t syncs;
} memory_disk;

memory_disk *memory_disk_make(void);
void memory_disk_free(memory_disk *d);
/* Power is lost: of each sector of 512 bytes that was not synced either
 * content is there afterwards; lengths likewise.  seed: of the draws. */
void memory_disk_lose(memory_disk *d, uint64_t seed);
/* The file of that rank by name, among those that are there. */
memory_file *memory_disk_file(memory_disk *d, int rank);
int memory_disk_count(const memory_disk *d);

#endif
