/* init.c: initial values of rows: a function of (seed, table name, id,
 * column) alone, by philox, so that no order of events changes them. */
#include "table/stripe.h"

#include "simd/simd.h"

#include <math.h>
#include <string.h>

/* In builds for one instruction set this file goes by that. */
#if defined(__x86_64__) && (defined(HOT_CLONES) || defined(__AVX2__))
#define PHILOX_AVX2
#include <immintrin.h>
#endif

static uint64_t init_name_hash(const char *name)
{
    uint64_t h = 0;

    for (const char *c = name; *c; c++)
        h = id_hash(h ^ (uint8_t)*c);
    return h;
}

void row_init_keys(table *t)
{
    uint64_t key = id_hash(t->config.seed ^ init_name_hash(t->config.name));
    uint64_t noise = id_hash(key);

    t->init_key[0] = (uint32_t)key;
    t->init_key[1] = (uint32_t)(key >> 32);
    t->noise_key[0] = (uint32_t)noise;
    t->noise_key[1] = (uint32_t)(noise >> 32);
}

/* [0, 1), 24 bits. */
INLINE_HOT float init_unit(uint32_t bits)
{
    return (float)(int32_t)(bits >> 8) * (1.0f / 16777216.0f);
}

/* Philox over four blocks of four columns at once: the rounds of
 * philox4x32() in pairs, 32 bits in the low half of each lane; the high
 * halves hold anything until the end. */
typedef uint64_t pair __attribute__((vector_size(16)));

/* The product of the lanes' low halves.  By name: for a whole product, which
 * is what GCC sees, AVX-512 has an instruction three times as slow. */
INLINE_HOT pair init_multiply(pair a, uint32_t by)
{
#ifdef __SSE2__
    return (pair)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(by));
#else
    return (a & UINT32_MAX) * by;
#endif
}

/* Sixteen columns from block on, in their order. */
static void init_philox_columns_any(const uint32_t key[2], uint64_t id,
                                    uint32_t block, uint32_t out[16])
{
    const pair first = { block, block + 1 };
    pair k0 = (pair){ 0 } + key[0], k1 = (pair){ 0 } + key[1];
    pair c[2][4];

    for (uint32_t p = 0; p < 2; p++) {
        c[p][0] = (pair){ 0 } + id;
        c[p][1] = (pair){ 0 } + (id >> 32);
        c[p][2] = first + 2 * p;
        c[p][3] = (pair){ 0 };
    }
    for (int round = 0; round < 10; round++) {
        for (uint32_t p = 0; p < 2; p++) {
            pair p0 = init_multiply(c[p][0], 0xD2511F53u);
            pair p1 = init_multiply(c[p][2], 0xCD9E8D57u);
            c[p][0] = (p1 >> 32) ^ c[p][1] ^ k0;
            c[p][2] = (p0 >> 32) ^ c[p][3] ^ k1;
            c[p][1] = p1;
            c[p][3] = p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (uint32_t p = 0; p < 2; p++) {
        pair left = (c[p][0] & UINT32_MAX) | c[p][1] << 32;
        pair right = (c[p][2] & UINT32_MAX) | c[p][3] << 32;
        pair one = { left[0], right[0] }, two = { left[1], right[1] };
        memcpy(out + 8 * p, &one, sizeof one);
        memcpy(out + 8 * p + 4, &two, sizeof two);
    }
}

#ifdef PHILOX_AVX2
/* The same, four blocks in a vector. */
typedef uint64_t quad __attribute__((vector_size(32)));

__attribute__((target("avx2"))) static void
init_philox_columns_avx2(const uint32_t key[2], uint64_t id, uint32_t block,
                         uint32_t out[16])
{
    const __m256i by0 = _mm256_set1_epi64x(0xD2511F53u);
    const __m256i by1 = _mm256_set1_epi64x(0xCD9E8D57u);
    quad k0 = (quad){ 0 } + key[0], k1 = (quad){ 0 } + key[1];
    quad c0 = (quad){ 0 } + id, c1 = c0 >> 32, c3 = { 0 };
    quad c2 = { block, block + 1, block + 2, block + 3 };

    for (int round = 0; round < 10; round++) {
        quad p0 = (quad)_mm256_mul_epu32((__m256i)c0, by0);
        quad p1 = (quad)_mm256_mul_epu32((__m256i)c2, by1);
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c1 = p1;
        c3 = p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    quad left = (c0 & UINT32_MAX) | c1 << 32;
    quad right = (c2 & UINT32_MAX) | c3 << 32;
    quad one = { left[0], right[0], left[1], right[1] };
    quad two = { left[2], right[2], left[3], right[3] };
    memcpy(out, &one, sizeof one);
    memcpy(out + 8, &two, sizeof two);
}
#endif

INLINE_HOT void init_philox_columns(const uint32_t key[2], uint64_t id,
                                    uint32_t block, uint32_t out[16])
{
#ifdef PHILOX_AVX2
    if (__builtin_cpu_supports("avx2")) {
        init_philox_columns_avx2(key, id, block, out);
        return;
    }
#endif
    init_philox_columns_any(key, id, block, out);
}

HOT static void init_uniform_fill(const uint32_t key[2], uint64_t id,
                                  uint32_t dim, float low, float width,
                                  float *out)
{
    uint32_t bits[16];
    uint32_t j = 0;

    for (; j + 16 <= dim; j += 16) {
        init_philox_columns(key, id, j / 4, bits);
        for (uint32_t k = 0; k < 16; k++)
            out[j + k] = low + width * init_unit(bits[k]);
    }
    if (j < dim)
        init_philox_columns(key, id, j / 4, bits);
    for (uint32_t k = 0; j + k < dim; k++)
        out[j + k] = low + width * init_unit(bits[k]);
}

/* A sum of twelve uniforms (Irwin-Hall): mean 0, variance 1, |x| <= 6, and
 * the same bits everywhere, which a logarithm of libm would not give. */
static float init_normal_value(const uint32_t key[2], uint64_t id, uint32_t j)
{
    float sum = -6;

    for (uint32_t block = 0; block < 3; block++) {
        const uint32_t counter[4] = { (uint32_t)id, (uint32_t)(id >> 32), j,
                                      1 + block };
        uint32_t bits[4];
        philox4x32(counter, key, bits);
        sum += init_unit(bits[0]) + init_unit(bits[1]) + init_unit(bits[2]) +
               init_unit(bits[3]);
    }
    return sum;
}

void row_init_vector(const table *t, uint64_t id, float *out)
{
    const table_config *c = &t->config;

    switch (c->init) {
    case INIT_UNIFORM:
        init_uniform_fill(t->init_key, id, c->dim, c->init_a,
                          c->init_b - c->init_a, out);
        break;
    case INIT_NORMAL:
        for (uint32_t j = 0; j < c->dim; j++)
            out[j] =
                c->init_a + c->init_b * init_normal_value(t->init_key, id, j);
        break;
    default:
        for (uint32_t j = 0; j < c->dim; j++)
            out[j] = c->init_a;
    }
    if (c->dtype != VECTOR_FP32) { /* as it is once it is stored */
        char row[ROW_VECTOR + 4096 * sizeof(uint16_t)];
        row_store_vector(t, out, row);
        row_load_vector(t, row, out);
    }
}

static void store_bf16(const float *values, char *to, uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j++) {
        uint16_t bits = bf16_nearest(values[j]);
        memcpy(to + 2 * j, &bits, sizeof bits);
    }
}

static void store_int8(const float *values, char *to, uint32_t dim)
{
    const float to_nearest = 0x1.8p23f; /* beside it floats are integers */
    float most = 0;

    for (uint32_t j = 0; j < dim; j++)
        most = fabsf(values[j]) > most ? fabsf(values[j]) : most;
    const float scale = int8_scale(most), unit = scale > 0 ? scale : 1;
    memcpy(to, &scale, sizeof scale);
    for (uint32_t j = 0; j < dim; j++)
        to[4 + j] = (char)(int)(values[j] / unit + to_nearest - to_nearest);
}

void row_store_vector(const table *t, const float *values, char *row)
{
    char *to = row + ROW_VECTOR;

    switch (t->config.dtype) {
    case VECTOR_FP32:
        memcpy(to, values, t->vector_bytes);
        break;
    case VECTOR_BF16:
        store_bf16(values, to, t->config.dim);
        break;
    default:
        store_int8(values, to, t->config.dim);
    }
}

void row_load_vector(const table *t, const char *row, float *out)
{
    vector_read(row + ROW_VECTOR, out, t->config.dtype, t->config.dim);
}
