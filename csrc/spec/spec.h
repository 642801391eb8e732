/* spec.h: the lists that several rooms share: options of a table,
 * hyper-parameters of an update, counters of a table, and their enums.
 *
 * All of them are in lists.h, generated from persia.proto: a field is one
 * line there.  What handles every field of a struct does so by its list.
 */
#ifndef PERSIA_SPEC_H
#define PERSIA_SPEC_H

#include "spec/list.h"
#include "spec/lists.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds what updates count, from one struct that carries it to another: a
 * job of a table, a reply of a server or worker, or a batcher_counts. */
#define UPDATE_COUNTS_ADD(to, more)                                           \
    (UPDATE_COUNTS_ADD_ONE(to, more, created),                                \
     UPDATE_COUNTS_ADD_ONE(to, more, refused),                                \
     UPDATE_COUNTS_ADD_ONE(to, more, evicted),                                \
     UPDATE_COUNTS_ADD_ONE(to, more, nonfinite),                              \
     UPDATE_COUNTS_ADD_ONE(to, more, touched))
#define UPDATE_COUNTS_ADD_ONE(to, more, field)                                \
    ((void)((to)->field += (more)->field))

/* The first field in which two structs of the list differ, or NULL. */
PERSIA_API const spec_field *persia_spec_difference(const spec_list *list,
                                                    const void *a,
                                                    const void *b);
/* A field's value as text, at most `room` bytes with its 0. */
PERSIA_API void persia_spec_text(const spec_field *f, const void *m, char *out,
                                 size_t room);
/* The first field that is out of its range, or NULL. */
PERSIA_API const spec_field *persia_spec_out_of_range(const spec_list *list,
                                                      const void *m);
/* Adds the counters of another server: of fields that say so the largest
 * counts. */
PERSIA_API void persia_spec_add(const spec_list *list, void *sum,
                                const void *more);

#ifdef __cplusplus
}
#endif
#endif
