#include "optim/optim.h"

#include "simd/simd.h"

#include <float.h>
#include <math.h>

const char *persia_optim_name(uint32_t kind)
{
    return kind < OPTIM_KINDS ? persia_optim_kind_names[kind] : NULL;
}

uint32_t persia_optim_state_floats(uint32_t kind, uint32_t dim, int momentum)
{
    switch (kind) {
    case OPTIM_SGD:
        return momentum ? dim : 0;
    case OPTIM_ADAGRAD:
        return dim;
    case OPTIM_ROWWISE_ADAGRAD:
        return 1;
    default:
        return 2 * dim;
    }
}

int persia_optim_state_fits(uint32_t kind, uint32_t dim, int momentum,
                            const float *state)
{
    const uint32_t n = persia_optim_state_floats(kind, dim, momentum);
    const int is_adam = kind == OPTIM_ADAM || kind == OPTIM_ADAMW;

    if (!persia_floats_finite(state, n))
        return 0;
    if (kind == OPTIM_SGD)
        return 1;
    for (uint32_t j = is_adam ? dim : 0; j < n; j++) /* m may be negative */
        if (state[j] < 0)
            return 0;
    return 1;
}

static int in_range(const char *what, float value, float low, float high)
{
    if (isfinite(value) && value >= low && value <= high)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EARG,
                          "optimizer: %s is %g, it must be within [%g, %g]",
                          what, (double)value, (double)low, (double)high);
}

int persia_optim_check(const optim_args *a)
{
    const float big = 1e30f;
    /* A column that never had a gradient divides by eps alone. */
    const float eps_min = a->kind == OPTIM_SGD ? 0 : FLT_MIN;
    int rc;

    if (a->kind >= OPTIM_KINDS)
        return persia_err_set(PERSIA_EARG, "optimizer: unknown algorithm %u",
                              a->kind);
    if ((rc = in_range("lr", a->lr, 0, big)) ||
        (rc = in_range("eps", a->eps, eps_min, big)) ||
        (rc = in_range("weight_decay", a->weight_decay, 0, big)) ||
        (rc = in_range("momentum", a->momentum, 0, big)) ||
        (rc = in_range("max_grad_norm", a->max_grad_norm, 0, big)) ||
        (rc = in_range("max_norm", a->max_norm, 0, big)) ||
        (rc = in_range("weight_bound", a->weight_bound, 0, big)) ||
        (rc = in_range("grad_scale", a->grad_scale, -big, big)))
        return rc;
    if (a->kind == OPTIM_ADAM || a->kind == OPTIM_ADAMW) {
        if ((rc = in_range("beta1", a->beta1, 0, 0.9999999f)) ||
            (rc = in_range("beta2", a->beta2, 0, 0.9999999f)))
            return rc;
        if (a->step == 0)
            return persia_err_set(PERSIA_EARG,
                                  "optimizer: step is 0, Adam counts from 1");
    }
    return PERSIA_OK;
}
