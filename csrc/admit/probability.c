/* probability.c: an id without a row gets one with a probability, drawn from
 * table, id and push. */
#include "admit/admit.h"

static int probability_make(const table_spec *spec, admitter *a)
{
    a->probability = spec->admission;
    a->all = spec->admission >= 1;
    if (spec->admission >= 0 && spec->admission <= 1)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EARG,
                          "admission probability is %g, it must be within "
                          "[0, 1]",
                          (double)spec->admission);
}

static void probability_admit(const admitter *a, uint64_t draw, size_t n,
                              const uint64_t *hash, uint8_t *mask)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = id_hash(hash[i] ^ id_hash(a->key ^
                                                        id_hash(draw)));
        mask[i] = a->all ||
                  (double)(bits >> 11) * 0x1p-53 < (double)a->probability;
    }
}

const admit_policy policy_probability = { .make = probability_make,
                                          .admit = probability_admit };
