#include "admit/admit.h"

#include <string.h>

/* policy_probability and so on, each in a file of its own. */
#define DECLARE(name) extern const admit_policy policy_##name;
TABLE_ADMIT_EACH(DECLARE)

#define ENTRY(name) &policy_##name,
static const admit_policy *const policies[ADMIT_KINDS] = {
    TABLE_ADMIT_EACH(ENTRY)
};

int persia_admit_make(const table_spec *spec, uint32_t first, uint32_t slots,
                      admitter *out)
{
    memset(out, 0, sizeof *out);
    if (spec->admit >= ADMIT_KINDS)
        return persia_err_set(PERSIA_EARG, "admission: unknown policy %u",
                              spec->admit);
    out->policy = policies[spec->admit];
    out->first = first;
    out->slots = slots;
    return out->policy->make(spec, out);
}
