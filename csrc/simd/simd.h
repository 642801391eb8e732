/* simd.h: functions compiled for several instruction sets, and arithmetic of
 * vectors of floats. */
#ifndef PERSIA_SIMD_H
#define PERSIA_SIMD_H

#include "base/base.h"
#include "simd/half.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Functions with hot loops are compiled for several instruction sets and
 * chosen at load time.  Together with -ffp-contract=off every clone gives
 * the same bits.  Empty where clones do not work (TSan crashes on ifuncs)
 * and when PERSIA_NO_CLONES is set, as the test that compares bits does. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) &&        \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) &&        \
    !defined(PERSIA_NO_CLONES)
#define HOT_CLONES
#define HOT                                                                   \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3",         \
                                 "default")))
#else
#define HOT
#endif

/* What HOT functions call must be inlined into each clone, or it would run
 * as compiled for the oldest machine. */
#define INLINE_HOT static inline __attribute__((always_inline))

/* Named by hand: GCC unrolls loops over 16 floats and handles the rest in
 * pieces, or one by one. */
typedef float floats16 __attribute__((vector_size(64)));

/* to = scale * g, or to += scale * g. */
INLINE_HOT void floats_add(float *to, const float *g, float scale, int first,
                           uint32_t dim)
{
    uint32_t j = 0;

    for (; j + 16 <= dim; j += 16) {
        floats16 sum, more;
        __builtin_memcpy(&more, g + j, sizeof more);
        more = more * scale;
        if (!first) {
            __builtin_memcpy(&sum, to + j, sizeof sum);
            more = sum + more;
        }
        __builtin_memcpy(to + j, &more, sizeof more);
    }
    for (; j < dim; j++)
        to[j] = first ? scale * g[j] : to[j] + scale * g[j];
}

/* Whether x[n] holds no NaN and no Inf; for n rows of dim, `stride` floats
 * apart. */
int persia_floats_finite(const float *x, size_t n);
int persia_rows_finite(const float *x, size_t n, size_t dim, size_t stride);

#ifdef __cplusplus
}
#endif
#endif
