#include "evict/policies.h"

#include <string.h>

const evict_field persia_evict_fields[EVICT_FIELDS] = {
    { "count", 1 },
    { "seen", 0 },
};
const evict_field *const evict_field_count = &persia_evict_fields[0];
const evict_field *const evict_field_seen = &persia_evict_fields[1];

/* Rows stay, and new ones are refused. */
const evict_policy policy_raise = { 0 };

#define ENTRY(name) &policy_##name,
static const evict_policy *const policies[FULL_KINDS] = {
    TABLE_FULL_EACH(ENTRY)
};

int persia_evict_make(const table_spec *spec, evict_score_fn fn, void *fn_ctx,
                      evictor *out)
{
    memset(out, 0, sizeof *out);
    if (spec->full >= FULL_KINDS)
        return persia_err_set(PERSIA_EARG, "eviction: unknown policy %u",
                              spec->full);
    const evict_policy *p = policies[spec->full];
    if (!p->score)
        return PERSIA_OK;
    out->policy = p;
    out->fn = fn;
    out->fn_ctx = fn_ctx;
    return p->make ? p->make(spec, out) : PERSIA_OK;
}
