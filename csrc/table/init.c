/* init.c: initial values of rows: a function of (seed, table name, id,
 * column) alone, by philox, so that no order of events changes them. */
#include "table/stripe.h"

#include <string.h>

static uint64_t name_hash(const char *name)
{
    uint64_t h = 0;

    for (const char *c = name; *c; c++)
        h = id_hash(h ^ (uint8_t)*c);
    return h;
}

void row_init_keys(table *t)
{
    uint64_t key = id_hash(t->config.seed ^ name_hash(t->config.name));
    uint64_t noise = id_hash(key);

    t->init_key[0] = (uint32_t)key;
    t->init_key[1] = (uint32_t)(key >> 32);
    t->noise_key[0] = (uint32_t)noise;
    t->noise_key[1] = (uint32_t)(noise >> 32);
}

/* [0, 1), 24 bits. */
INLINE_HOT float unit(uint32_t bits)
{
    return (float)(bits >> 8) * (1.0f / 16777216.0f);
}

/* Philox over LANES blocks of four columns at once: the rounds of
 * philox4x32() in the compiler's vector types, 32 bits in 64-bit lanes. */
enum { LANES = 8 };
typedef uint64_t lanes __attribute__((vector_size(8 * LANES)));

INLINE_HOT void philox_lanes(const uint32_t key[2], uint64_t id,
                             uint32_t block, lanes out[4])
{
    const lanes low = (lanes){ 0 } + UINT32_MAX;
    const lanes count = { 0, 1, 2, 3, 4, 5, 6, 7 };
    lanes c0 = (lanes){ 0 } + (uint32_t)id, c1 = (lanes){ 0 } + (id >> 32);
    lanes c2 = count + block, c3 = { 0 };
    uint32_t k0 = key[0], k1 = key[1];

    for (int round = 0; round < 10; round++) {
        lanes p0 = c0 * 0xD2511F53u, p1 = c2 * 0xCD9E8D57u;
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c1 = p1 & low;
        c3 = p0 & low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

HOT static void uniform_fill(const uint32_t key[2], uint64_t id, uint32_t dim,
                             float low, float width, float *out)
{
    for (uint32_t j = 0; j < dim; j += 4 * LANES) {
        lanes bits[4];
        uint32_t left = dim - j < 4 * LANES ? dim - j : 4 * LANES;
        philox_lanes(key, id, j / 4, bits);
        for (uint32_t k = 0; k < left; k++)
            out[j + k] = low + width * unit((uint32_t)bits[k % 4][k / 4]);
    }
}

/* A sum of twelve uniforms (Irwin-Hall): mean 0, variance 1, |x| <= 6, and
 * the same bits everywhere, which a logarithm of libm would not give. */
static float normal_value(const uint32_t key[2], uint64_t id, uint32_t j)
{
    float sum = -6;

    for (uint32_t block = 0; block < 3; block++) {
        const uint32_t counter[4] = { (uint32_t)id, (uint32_t)(id >> 32), j,
                                      1 + block };
        uint32_t bits[4];
        philox4x32(counter, key, bits);
        sum += unit(bits[0]) + unit(bits[1]) + unit(bits[2]) + unit(bits[3]);
    }
    return sum;
}

void row_init_vector(const table *t, uint64_t id, float *out)
{
    const table_config *c = &t->config;

    switch (c->init) {
    case INIT_UNIFORM:
        uniform_fill(t->init_key, id, c->dim, c->init_a,
                     c->init_b - c->init_a, out);
        break;
    case INIT_NORMAL:
        for (uint32_t j = 0; j < c->dim; j++)
            out[j] = c->init_a + c->init_b * normal_value(t->init_key, id, j);
        break;
    default:
        for (uint32_t j = 0; j < c->dim; j++)
            out[j] = c->init_a;
    }
    if (c->dtype == VECTOR_BF16)
        for (uint32_t j = 0; j < c->dim; j++)
            out[j] = bf16_widen(bf16_nearest(out[j]));
}

float row_init_state_value(const table *t)
{
    return t->config.optimizer == OPTIM_ADAGRAD ||
                   t->config.optimizer == OPTIM_ROWWISE_ADAGRAD
               ? t->config.state_init
               : 0;
}

void row_init_state(const table *t, char *row)
{
    float *state = (float *)(void *)(row + t->state_offset);
    const float value = row_init_state_value(t);

    for (uint32_t j = 0; j < t->state_floats; j++)
        state[j] = value;
}

void row_store_vector(const table *t, const float *values, char *row)
{
    char *to = row + ROW_VECTOR;

    if (t->config.dtype == VECTOR_FP32) {
        memcpy(to, values, t->vector_bytes);
        return;
    }
    for (uint32_t j = 0; j < t->config.dim; j++) {
        uint16_t bits = bf16_nearest(values[j]);
        memcpy(to + 2 * j, &bits, sizeof bits);
    }
}

void row_load_vector(const table *t, const char *row, float *out)
{
    const char *from = row + ROW_VECTOR;

    if (t->config.dtype == VECTOR_FP32) {
        memcpy(out, from, t->vector_bytes);
        return;
    }
    for (uint32_t j = 0; j < t->config.dim; j++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * j, sizeof bits);
        out[j] = bf16_widen(bits);
    }
}
