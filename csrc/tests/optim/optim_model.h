/* optim_model.h: one step of each optimizer on one row in double precision,
 * written from the formulas of torch.optim and fbgemm, column by column.
 * The oracle of the tests of `optim` and `table`. */
#ifndef PERSIA_TESTS_OPTIM_MODEL_H
#define PERSIA_TESTS_OPTIM_MODEL_H

#include "optim/optim.h"

#include <math.h>

static inline double model_norm(const double *x, uint32_t dim)
{
    double sum = 0;

    for (uint32_t j = 0; j < dim; j++)
        sum += x[j] * x[j];
    return sqrt(sum);
}

static inline void model_clip(double *x, uint32_t dim, double norm)
{
    double now = model_norm(x, dim);

    if (norm > 0 && now > norm)
        for (uint32_t j = 0; j < dim; j++)
            x[j] *= norm / now;
}

/* By the paper's own z, which s holds lr times. */
static inline void model_ftrl(const optim_args *a, double *w, double *z,
                              double *n, double g)
{
    const double lr = (double)a->lr, l1 = (double)a->l1;
    const double sigma = (sqrt(*n + g * g) - sqrt(*n)) / lr;
    const double to = *z / lr + g - sigma * *w;

    *n += g * g;
    *z = to * lr;
    *w = fabs(to) <= l1 ? 0
                        : -(to - copysign(l1, to)) /
                              (((double)a->beta + sqrt(*n)) / lr +
                               (double)a->l2);
}

/* g is changed, too. */
static inline void model_step(const optim_args *a, int momentum, uint32_t dim,
                              double *w, double *s, double *g)
{
    const double lr = (double)a->lr, eps = (double)a->eps;
    const double decay = (double)a->weight_decay;

    for (uint32_t j = 0; j < dim; j++)
        g[j] *= (double)a->grad_scale;
    model_clip(g, dim, (double)a->max_grad_norm);
    for (uint32_t j = 0; j < dim; j++)
        if (a->kind == OPTIM_ADAMW || a->kind == OPTIM_ROWWISE_ADAM)
            w[j] -= lr * decay * w[j];
        else
            g[j] += decay * w[j];
    if (a->kind == OPTIM_ROWWISE_ADAGRAD) {
        double norm = model_norm(g, dim);
        s[0] += norm * norm / dim;
    }
    if (a->kind == OPTIM_ROWWISE_ADAM) {
        double norm = model_norm(g, dim), b2 = (double)a->beta2;
        s[dim] = b2 * s[dim] + (1 - b2) * norm * norm / dim;
    }
    for (uint32_t j = 0; j < dim; j++) {
        const double b1 = (double)a->beta1, b2 = (double)a->beta2;
        const double t = (double)a->step;
        double m, v;
        switch (a->kind) {
        case OPTIM_SGD:
            if (momentum)
                g[j] = s[j] = (double)a->momentum * s[j] + g[j];
            w[j] -= lr * g[j];
            break;
        case OPTIM_ADAGRAD:
            s[j] += g[j] * g[j];
            w[j] -= lr * g[j] / (sqrt(s[j]) + eps);
            break;
        case OPTIM_ROWWISE_ADAGRAD:
            w[j] -= lr * g[j] / (sqrt(s[0]) + eps);
            break;
        case OPTIM_FTRL:
            model_ftrl(a, &w[j], &s[j], &s[dim + j], g[j]);
            break;
        case OPTIM_ROWWISE_ADAM:
            s[j] = b1 * s[j] + (1 - b1) * g[j];
            m = s[j] / (1 - pow(b1, t));
            v = s[dim] / (1 - pow(b2, t));
            w[j] -= lr * m / (sqrt(v) + eps);
            break;
        default:
            s[j] = b1 * s[j] + (1 - b1) * g[j];
            s[dim + j] = b2 * s[dim + j] + (1 - b2) * g[j] * g[j];
            m = s[j] / (1 - pow(b1, t));
            v = s[dim + j] / (1 - pow(b2, t));
            w[j] -= lr * m / (sqrt(v) + eps);
        }
    }
    model_clip(w, dim, (double)a->max_norm);
    if (a->weight_bound > 0)
        for (uint32_t j = 0; j < dim; j++)
            w[j] = fmin(fmax(w[j], -(double)a->weight_bound),
                        (double)a->weight_bound);
}

/* Whether `got` is `want` except for fp32 arithmetic on numbers of the size of
 * `scale`. */
static inline int model_close(double got, double want, double scale)
{
    return fabs(got - want) <= 3e-6 * (fabs(want) + fabs(scale)) + 1e-37;
}

#endif
