#include "recovers.h"

#include "shard/private.h"

void service_recovers(struct ps_service *service, int recovers, uint64_t done)
{
    shard *s = persia_service_shard(service);
    __atomic_store_n(&s->replayed.done, done, __ATOMIC_RELAXED);
    atomic_store(&s->recovers, recovers);
}
