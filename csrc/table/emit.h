/* emit.h: rows as a cut and a watch give them out (private). */
#ifndef PERSIA_TABLE_EMIT_H
#define PERSIA_TABLE_EMIT_H

#include "table/stripe.h"

#include <string.h>

/* Where the next row goes; NULL: not wanted. */
typedef struct rows_emit {
    uint64_t *ids;
    char *vectors;
    float *state;
    uint32_t *clocks, *fields;
    float *floats; /* vectors as fp32 */
    size_t n;
} rows_emit;

static inline void row_emit(const table *t, const char *row, rows_emit *o)
{
    if (o->ids)
        o->ids[o->n] = row_id(row);
    if (o->vectors)
        memcpy(o->vectors + o->n * t->vector_bytes, row + ROW_VECTOR,
               t->vector_bytes);
    if (o->floats)
        row_load_vector(t, row, o->floats + o->n * t->config.dim);
    if (o->state)
        memcpy(o->state + o->n * t->state_floats, row + t->state_offset,
               t->state_floats * sizeof(float));
    if (o->clocks)
        o->clocks[o->n] = row_clock(row);
    if (o->fields && t->field)
        o->fields[o->n] = row_field(t, row);
    o->n++;
}

#endif
