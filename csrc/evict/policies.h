/* policies.h: what the policies share (private). */
#ifndef PERSIA_EVICT_POLICIES_H
#define PERSIA_EVICT_POLICIES_H

#include "evict/evict.h"

/* policy_evict_lru and so on, each in a file of its own. */
#define DECLARE(name) extern const evict_policy policy_##name;
TABLE_FULL_EACH(DECLARE)
#undef DECLARE

/* How many updates a row had. */
extern const evict_field *const evict_field_count;
/* When it had the last: seconds since 1970. */
extern const evict_field *const evict_field_seen;

#endif
