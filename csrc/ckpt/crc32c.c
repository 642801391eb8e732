#include "ckpt/crc32c.h"

#include <pthread.h>
#include <string.h>

#define POLY 0x82F63B78u

/* Slicing by eight (Kounavis, Berry 2005): TABLES[k][b] is the CRC of byte b
 * followed by k zero bytes.  Filled once, then read only. */
static uint32_t tables[8][256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void crc32c_tables_fill(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? POLY : 0);
        tables[0][b] = crc;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 1; k < 8; k++)
            tables[k][b] = tables[0][tables[k - 1][b] & 255] ^
                           (tables[k - 1][b] >> 8);
}

static uint32_t crc32c_load32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
           (uint32_t)p[3] << 24;
}

uint32_t crc32c_tables(uint32_t crc, const void *data, size_t n)
{
    const unsigned char *p = data;
    pthread_once(&tables_once, crc32c_tables_fill);
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t lo = crc32c_load32(p) ^ crc, hi = crc32c_load32(p + 4);
        crc = tables[7][lo & 255] ^ tables[6][lo >> 8 & 255] ^
              tables[5][lo >> 16 & 255] ^ tables[4][lo >> 24] ^
              tables[3][hi & 255] ^ tables[2][hi >> 8 & 255] ^
              tables[1][hi >> 16 & 255] ^ tables[0][hi >> 24];
    }
    for (; n; n--, p++)
        crc = tables[0][(crc ^ *p) & 255] ^ (crc >> 8);
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t
crc32c_sse42(uint32_t crc, const void *data, size_t n)
{
    const unsigned char *p = data;
    uint64_t c = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; n; n--, p++)
        c = __builtin_ia32_crc32qi((uint32_t)c, *p);
    return ~(uint32_t)c;
}

uint32_t persia_crc32c(uint32_t crc, const void *data, size_t n)
{
    return __builtin_cpu_supports("sse4.2") ? crc32c_sse42(crc, data, n)
                                            : crc32c_tables(crc, data, n);
}
#else
uint32_t persia_crc32c(uint32_t crc, const void *data, size_t n)
{
    return crc32c_tables(crc, data, n);
}
#endif

/* a * b mod the polynomial, bits reflected: bit 31 is x^0. */
static uint32_t crc32c_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = (b >> 1) ^ (b & 1 ? POLY : 0);
    }
    return product;
}

uint32_t persia_crc32c_combine(uint32_t crc_a, uint32_t crc_b,
                               uint64_t bytes_b)
{
    /* crc_a * x^(8 * bytes_b), by squaring x^8. */
    uint32_t power = 1u << (31 - 8);
    for (; bytes_b; bytes_b >>= 1) {
        if (bytes_b & 1)
            crc_a = crc32c_multiply(power, crc_a);
        power = crc32c_multiply(power, power);
    }
    return crc_a ^ crc_b;
}
