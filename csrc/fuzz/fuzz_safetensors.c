/* Row files made of arbitrary bytes: whatever they are, the reader refuses
 * them with an error or reads rows that are inside the file. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ckpt/rows.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_as(const uint8_t *data, size_t size,
                    const table_config *config)
{
    row_reader r;
    row_piece p;
    uint32_t crc;
    uint64_t here;
    int fd = memfd_create("fuzz", 0);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    if (row_reader_from(&r, fd, "fuzz.safetensors", size, config))
        return;
    if (row_piece_init(&p, &r.shape))
        abort();
    (void)row_reader_verify(&r, &crc, &here);
    for (uint64_t first = 0; first < r.rows; first += p.room) {
        uint64_t n = r.rows - first < p.room ? r.rows - first : p.room;
        if (row_reader_read(&r, first, (size_t)n, &p))
            break;
    }
    row_piece_free(&p);
    row_reader_close(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    table_config config;
    memset(&config, 0, sizeof config);
    strcpy(config.name, "fuzz");
    config.dim = 2;
    config.dtype = VECTOR_FP32;
    config.optimizer = OPTIM_ROWWISE_ADAGRAD;
    read_as(data, size, &config);
    config.dim = 3;
    config.dtype = VECTOR_BF16;
    config.optimizer = OPTIM_SGD;
    read_as(data, size, &config);
    return 0;
}
