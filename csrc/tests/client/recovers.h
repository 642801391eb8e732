/* recovers.h: a shard that seems to apply its log. */
#ifndef PERSIA_TESTS_CLIENT_RECOVERS_H
#define PERSIA_TESTS_CLIENT_RECOVERS_H

#include "server/server.h"

void service_recovers(struct ps_service *service, int recovers, uint64_t done);

#endif
