/* crc32c.h: CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), as in
 * iSCSI, ext4 and RFC 3720: the checksum of every file of a checkpoint.
 * The CRC of the nine bytes "123456789" is 0xE3069283, that of none is 0.
 */
#ifndef PERSIA_CKPT_CRC32C_H
#define PERSIA_CKPT_CRC32C_H

#include "ckpt/ckpt.h" /* persia_crc32c() itself */

/* The CRC of A followed by B, from their own CRCs and the bytes of B. */
PERSIA_API uint32_t persia_crc32c_combine(uint32_t crc_a, uint32_t crc_b,
                                          uint64_t bytes_b);

/* The portable implementation that persia_crc32c() uses where the processor
 * has no instruction; here so that a test can compare the two. */
uint32_t crc32c_tables(uint32_t crc, const void *data, size_t n);

#endif
