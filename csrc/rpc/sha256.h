/* sha256.h: digests of tokens (FIPS 180-4; private to rpc). */
#ifndef PERSIA_RPC_SHA256_H
#define PERSIA_RPC_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { SHA256_BYTES = 32 };

void sha256(const void *data, size_t n, uint8_t out[SHA256_BYTES]);

#endif
