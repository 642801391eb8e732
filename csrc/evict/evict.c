#include "evict/policies.h"

static const evict_policy *const policies[FULL_KINDS] = {
    [FULL_EVICT_LRU] = &evict_lru,
};

const evict_policy *persia_evict_policy(uint32_t full)
{
    return full < FULL_KINDS ? policies[full] : NULL;
}
