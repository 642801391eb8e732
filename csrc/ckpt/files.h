/* files.h: plain files of a folder: opened, read and written at an offset. */
#ifndef PERSIA_CKPT_FILES_H
#define PERSIA_CKPT_FILES_H

#include "base/base.h"

/* Reads exactly n bytes at `offset`; PERSIA_ECORRUPT where the file ends
 * before. */
int file_read(int fd, const char *name, void *out, size_t n, uint64_t offset);
/* Writes n bytes at `offset`. */
int file_write(int fd, const char *name, const void *data, size_t n,
               uint64_t offset);
/* Opens a plain file for reading; its size.  FIFOs and such are refused. */
int file_open(int folder, const char *name, int *fd, uint64_t *bytes);

#endif
