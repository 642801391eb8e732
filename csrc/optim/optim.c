/* optim.c: what all optimizers share; each has a file of its own. */
#include "optim/kernel.h"

#include <assert.h>
#include <float.h>

#define DECLARE(name) extern const optim_algorithm algorithm_##name;
OPTIM_KIND_EACH(DECLARE)

static const optim_algorithm *algorithm_of(uint32_t kind, int momentum)
{
#define ENTRY(name) &algorithm_##name,
    static const optim_algorithm *const all[OPTIM_KINDS] = {
        OPTIM_KIND_EACH(ENTRY)
    };
    assert(kind < OPTIM_KINDS);
    const optim_algorithm *a = all[kind];

    return momentum && a->traits->with_momentum ? a->traits->with_momentum : a;
}

const char *persia_optim_name(uint32_t kind)
{
    return kind < OPTIM_KINDS ? persia_optim_kind_names[kind] : NULL;
}

static uint32_t field_floats(const optim_field *f, uint32_t dim)
{
    return !f->name ? 0 : f->width == PER_ROW ? 1 : dim;
}

uint32_t persia_optim_state_floats(uint32_t kind, uint32_t dim, int momentum)
{
    const optim_field *fields = algorithm_of(kind, momentum)->traits->fields;
    uint32_t floats = 0;

    for (int i = 0; i < FIELDS_MAX; i++)
        floats += field_floats(&fields[i], dim);
    return floats;
}

void persia_optim_state_init(uint32_t kind, uint32_t dim, int momentum,
                             float option, float *state)
{
    const optim_field *fields = algorithm_of(kind, momentum)->traits->fields;

    for (int i = 0; i < FIELDS_MAX; i++) {
        const uint32_t n = field_floats(&fields[i], dim);
        const float value = fields[i].from_option ? option : 0;
        for (uint32_t j = 0; j < n; j++)
            *state++ = value;
    }
}

const char *persia_optim_state_misfit(uint32_t kind, uint32_t dim,
                                      int momentum, const float *state)
{
    const optim_field *fields = algorithm_of(kind, momentum)->traits->fields;

    for (int i = 0; i < FIELDS_MAX; i++) {
        const uint32_t n = field_floats(&fields[i], dim);
        if (!persia_floats_finite(state, n))
            return fields[i].name;
        for (uint32_t j = 0; j < n && fields[i].not_negative; j++)
            if (state[j] < 0)
                return fields[i].name;
        state += n;
    }
    return NULL;
}

/* ---- hyper-parameters --------------------------------------------------- */

int optim_range(const char *what, float value, float low, float high)
{
    if (isfinite(value) && value >= low && value <= high)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EARG,
                          "optimizer: %s is %g, it must be within [%g, %g]",
                          what, (double)value, (double)low, (double)high);
}

int optim_eps_check(const optim_args *a)
{
    return optim_range("eps", a->eps, FLT_MIN, OPTIM_MOST);
}

int optim_moments_check(const optim_args *a)
{
    const float below_1 = 0.9999999f;
    int rc = optim_eps_check(a);

    if (rc || (rc = optim_range("beta1", a->beta1, 0, below_1)) ||
        (rc = optim_range("beta2", a->beta2, 0, below_1)))
        return rc;
    if (a->step == 0)
        return persia_err_set(PERSIA_EARG,
                              "optimizer: step is 0, Adam counts from 1");
    return PERSIA_OK;
}

void optim_moments_prepare(optim_plan *plan)
{
    const optim_args *a = &plan->args;
    const double t = (double)a->step;

    plan->step_size =
        (float)((double)a->lr / (1 - pow((double)a->beta1, t)));
    plan->bias2_sqrt = (float)sqrt(1 - pow((double)a->beta2, t));
}

int persia_optim_check(const optim_args *a)
{
    const float most = OPTIM_MOST;
    int rc;

    if (a->kind >= OPTIM_KINDS)
        return persia_err_set(PERSIA_EARG, "optimizer: unknown algorithm %u",
                              a->kind);
    if ((rc = optim_range("lr", a->lr, 0, most)) ||
        (rc = optim_range("eps", a->eps, 0, most)) ||
        (rc = optim_range("weight_decay", a->weight_decay, 0, most)) ||
        (rc = optim_range("momentum", a->momentum, 0, most)) ||
        (rc = optim_range("max_grad_norm", a->max_grad_norm, 0, most)) ||
        (rc = optim_range("max_norm", a->max_norm, 0, most)) ||
        (rc = optim_range("weight_bound", a->weight_bound, 0, most)) ||
        (rc = optim_range("grad_scale", a->grad_scale, -most, most)))
        return rc;
    const optim_traits *traits = algorithm_of(a->kind, 0)->traits;
    return traits->check ? traits->check(a) : PERSIA_OK;
}

void persia_optim_prepare(optim_plan *plan, const optim_args *args,
                          uint32_t dtype, int momentum)
{
    const optim_algorithm *a = algorithm_of(args->kind, momentum);
    const int extras = args->weight_decay != 0 || args->max_norm != 0 ||
                       args->max_grad_norm != 0 || args->weight_bound != 0 ||
                       args->grad_scale != 1;
    const uint32_t dim = plan->dim;

    plan->args = *args;
    if (a->traits->prepare)
        a->traits->prepare(plan);
    plan->kernel = a->kernels[dtype][extras      ? EXTRAS
                                     : dim == 16 ? DIM_16
                                     : dim == 64 ? DIM_64
                                                 : DIM_ANY];
}
