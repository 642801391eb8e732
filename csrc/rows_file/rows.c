/* rows.c: vectors as rows, and back. */
#include "rows_file/private.h"

#include <math.h>
#include <string.h>

#include "simd/simd.h"

uint32_t persia_rows_stride(const rows_config *c)
{
    uint32_t bytes = ROWS_ID;

    if (c->dim < 1 || c->dim > ROWS_DIM_MAX)
        return 0;
    switch (c->type) {
    case ROWS_FP32:
        bytes += 4 * c->dim;
        break;
    case ROWS_FP16:
        bytes += 2 * c->dim;
        break;
    case ROWS_INT8:
        bytes += 4 + c->dim;
        break;
    case ROWS_INT4:
        bytes += 4 + (c->dim + 1) / 2;
        break;
    default:
        return 0;
    }
    return (bytes + 7) & ~7u;
}

/* The scale at which `most` is the largest integer; 0 where values are as
 * small as zero. */
static float rows_scale_of(float most, float largest)
{
    return most < 2e-36f ? 0 : most / largest;
}

static int rows_to_integer(float value, float scale, int largest)
{
    const float to_nearest = 0x1.8p23f; /* beside it floats are integers */
    if (!(scale > 0))
        return 0;
    const int q = (int)(value / scale + to_nearest - to_nearest);
    return q > largest ? largest : q < -largest ? -largest : q;
}

static void rows_narrow_integers(const rows_config *c, const float *vector,
                                 float most, char *to)
{
    const int eight = c->type == ROWS_INT8, largest = eight ? 127 : 7;
    const float scale = rows_scale_of(most, (float)largest);

    memcpy(to, &scale, sizeof scale);
    to += sizeof scale;
    for (uint32_t j = 0; j < c->dim; j++) {
        const int q = rows_to_integer(vector[j], scale, largest);
        if (eight)
            to[j] = (char)q;
        else
            to[j / 2] = (char)(to[j / 2] | (q & 15) << (j % 2 * 4));
    }
}

int rows_narrow(const rows_config *c, uint32_t stride, uint64_t id,
                const float *vector, char *row)
{
    float most = 0;

    memset(row, 0, stride);
    memcpy(row, &id, sizeof id);
    for (uint32_t j = 0; j < c->dim; j++) {
        if (!isfinite(vector[j]))
            return 0;
        most = fabsf(vector[j]) > most ? fabsf(vector[j]) : most;
    }
    char *to = row + ROWS_ID;
    if (c->type == ROWS_FP32) {
        memcpy(to, vector, 4 * (size_t)c->dim);
    } else if (c->type == ROWS_FP16) {
        if (most >= 65520.0f) /* Inf from here on */
            return 0;
        for (uint32_t j = 0; j < c->dim; j++) {
            const uint16_t half = fp16_narrow(vector[j]);
            memcpy(to + 2 * (size_t)j, &half, sizeof half);
        }
    } else {
        rows_narrow_integers(c, vector, most, to);
    }
    return 1;
}

/* Widths that are common are constants: no loop is left. */
INLINE_HOT void rows_widen_int8(const signed char *q, float scale,
                                uint32_t dim, float *restrict out)
{
    for (uint32_t j = 0; j < dim; j++)
        out[j] = scale * (float)q[j];
}

HOT void persia_rows_widen(const rows_config *c, const char *row,
                           float *restrict out)
{
    const char *from = row + ROWS_ID;
    float scale;

    if (c->type == ROWS_FP32) {
        memcpy(out, from, 4 * (size_t)c->dim);
        return;
    }
    if (c->type == ROWS_FP16) {
        for (uint32_t j = 0; j < c->dim; j++) {
            uint16_t half;
            memcpy(&half, from + 2 * (size_t)j, sizeof half);
            out[j] = fp16_widen(half);
        }
        return;
    }
    memcpy(&scale, from, sizeof scale);
    const signed char *q = (const signed char *)from + sizeof scale;
    if (c->type == ROWS_INT8) {
#define FIXED(d)                                                              \
    case d:                                                                   \
        rows_widen_int8(q, scale, d, out);                                    \
        return;
        switch (c->dim) {
            FIXED(8)
            FIXED(16)
            FIXED(32)
            FIXED(64)
        default:
            rows_widen_int8(q, scale, c->dim, out);
        }
#undef FIXED
        return;
    }
    for (uint32_t j = 0; j < c->dim; j++) {
        const int four = (q[j / 2] >> (j % 2 * 4)) & 15;
        out[j] = scale * (float)((four ^ 8) - 8);
    }
}

int persia_rows_narrow(const rows_config *c, size_t n, const uint64_t *ids,
                       const float *vectors, char *rows)
{
    const uint32_t stride = persia_rows_stride(c);

    for (size_t i = 0; i < n; i++)
        if (!rows_narrow(c, stride, ids[i], vectors + i * c->dim,
                         rows + i * stride))
            return persia_err_set(PERSIA_EARG,
                                  "the row of id %lld has values that this "
                                  "type of rows cannot have",
                                  (long long)ids[i]);
    return PERSIA_OK;
}
