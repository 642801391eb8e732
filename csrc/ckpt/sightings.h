/* sightings.h: what a table's admission has seen, in a file of its own beside
 * the row files: a safetensors file of no rows,
 *
 *   slots      U32 [slots]         their numbers
 *   sightings  U32 [slots, words]  see admit.h
 */
#ifndef PERSIA_CKPT_SIGHTINGS_H
#define PERSIA_CKPT_SIGHTINGS_H

#include "ckpt/ckpt.h"

/* Writes those of a cut, and appends the file; none if there are none. */
int sightings_write(table_cut *cut, const table_config *config, int folder,
                    const char *stem, ckpt_files *out);
/* Row files have rows. */
static inline int is_sightings(const ckpt_file *file)
{
    return file->rows == 0;
}
/* Reads a file into `t`, all of its bytes; NULL: only checks it.  Those of
 * another number of words than the table's are left out. */
int sightings_read(int folder, const ckpt_file *file,
                   const table_config *config, table *t);

#endif
