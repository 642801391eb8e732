/* host.c: the kernels on the host, for tests: one element after the other. */
#include "cuda/host.h"

#include "cuda/kernels.h"

static void host_run_pool(const void *args)
{
    const cuda_pool *a = args;
    for (size_t x = 0; x < a->of.features_n * a->of.bags; x++)
        for (uint32_t j = 0; j < a->width; j++)
            kernel_pool(a, x, j);
}

static void host_run_sum(const void *args)
{
    const cuda_sum *a = args;
    for (size_t r = 0; r < a->rows; r++)
        for (uint32_t j = 0; j < a->width; j++)
            kernel_sum(a, r, j);
}

static void host_run_convert(const void *args)
{
    const cuda_convert *a = args;
    for (size_t i = 0; i < a->n; i++)
        kernel_convert(a, i);
}

static int host_pool(void *stream, const cuda_pool *args)
{
    return persia_mem_host_run(stream, host_run_pool, args, sizeof *args);
}

static int host_sum(void *stream, const cuda_sum *args)
{
    return persia_mem_host_run(stream, host_run_sum, args, sizeof *args);
}

static int host_convert(void *stream, const cuda_convert *args)
{
    return persia_mem_host_run(stream, host_run_convert, args, sizeof *args);
}

void host_kernels(cuda_device *d)
{
    d->pool = host_pool;
    d->sum = host_sum;
    d->convert = host_convert;
}
