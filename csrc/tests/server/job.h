/* job.h: a job of some ranks that train in step at one server. */
#ifndef PERSIA_TESTS_SERVER_JOB_H
#define PERSIA_TESTS_SERVER_JOB_H

#include "tests/server/help.h"

#include <stdlib.h>
#include <string.h>

enum { RANKS = 3, N = 50 };
static const uint64_t LONG = 60 * (uint64_t)SECOND;

/* A table whose rows count the gradients that they got. */
typedef struct job {
    server v;
    uint64_t ids[N];
    float grads[N];
    optim_hyper hyper;
    wire_push_table table;
} job;

static inline job *job_start(void)
{
    job *j = calloc(1, sizeof *j);
    table_spec spec = spec_of("a", 1, OPTIM_SGD);
    spec.init = INIT_CONSTANT;
    spec.init_a = 0;
    j->v = server_start(0, 1, NULL);
    declare(&j->v, &spec);
    for (uint64_t i = 0; i < N; i++) {
        j->ids[i] = i;
        j->grads[i] = -1;
    }
    j->hyper = sgd(1);
    j->table = push_table(0, 1, N, j->ids, j->grads, &j->hyper);
    return j;
}

static inline void job_stop(job *j)
{
    server_stop(&j->v);
    free(j);
}

/* Part `rank` of a step; the number of the update is the step's. */
static inline wire_push part_of(job *j, uint32_t rank, uint64_t step)
{
    wire_push m = push_of(&j->v, STREAM + rank, step, &j->table, 1);
    m.step = m.t = step;
    m.part = rank;
    m.parts = RANKS;
    return m;
}

static inline pending *send_part(job *j, uint32_t rank, uint64_t step,
                          uint64_t timeout)
{
    wire_push m = part_of(j, rank, step);
    return push_start(&j->v, &m, timeout);
}

static inline void expect_error(pending *c, int code, const char *text)
{
    result r = call_wait(c);
    if (r.code != code || !strstr(r.text, text))
        fail_msg("%s: %s", persia_err_name(r.code), r.text);
    result_free(&r);
}

static inline float value(job *j)
{
    float out[N];
    pull(&j->v, 0, N, j->ids, out);
    for (int i = 1; i < N; i++)
        assert_true(out[i] == out[0]);
    return out[0];
}

#endif
