/* policies.h: the policies, each in a file of its name (private). */
#ifndef PERSIA_EVICT_POLICIES_H
#define PERSIA_EVICT_POLICIES_H

#include "evict/evict.h"

extern const evict_policy evict_lru;

#endif
