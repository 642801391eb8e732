/* library.cu: libpersia_cuda.so: the device of mem/device.h and the kernels,
 * by CUDA's runtime, which is linked in.  It knows no torch: callers allocate
 * and hand over pointers and streams (cudaStream_t). */
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include "cuda/kernels.h"

namespace {

/* A block: 32 columns of 8 bags or rows. */
const unsigned COLUMNS = 32, ROWS = 8, FLAT = 256;
const size_t BLOCKS_MAX = 1u << 20;

cudaStream_t stream_of(void *stream)
{
    return static_cast<cudaStream_t>(stream);
}

unsigned blocks_of(size_t n, size_t a_block)
{
    const size_t blocks = (n + a_block - 1) / a_block;
    return static_cast<unsigned>(blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX);
}

__global__ void pool_all(cuda_pool a)
{
    const size_t bags = a.of.features_n * a.of.bags;
    const size_t step = static_cast<size_t>(gridDim.x) * ROWS;
    for (size_t x = blockIdx.x * static_cast<size_t>(ROWS) + threadIdx.y;
         x < bags; x += step)
        for (uint32_t j = threadIdx.x; j < a.width; j += COLUMNS)
            kernel_pool(&a, x, j);
}

__global__ void sum_all(cuda_sum a)
{
    const size_t step = static_cast<size_t>(gridDim.x) * ROWS;
    for (size_t r = blockIdx.x * static_cast<size_t>(ROWS) + threadIdx.y;
         r < a.rows; r += step)
        for (uint32_t j = threadIdx.x; j < a.width; j += COLUMNS)
            kernel_sum(&a, r, j);
}

__global__ void convert_all(cuda_convert a)
{
    const size_t step = static_cast<size_t>(gridDim.x) * FLAT;
    for (size_t i = blockIdx.x * static_cast<size_t>(FLAT) + threadIdx.x;
         i < a.n; i += step)
        kernel_convert(&a, i);
}

/* The launch that follows reports its own error. */
void forget_errors()
{
    (void)cudaGetLastError();
}

int pool(void *stream, const cuda_pool *a)
{
    const size_t bags = a->of.features_n * a->of.bags;
    if (bags == 0 || a->width == 0)
        return 0;
    forget_errors();
    pool_all<<<blocks_of(bags, ROWS), dim3(COLUMNS, ROWS), 0,
               stream_of(stream)>>>(*a);
    return cudaGetLastError();
}

int sum(void *stream, const cuda_sum *a)
{
    if (a->rows == 0 || a->width == 0)
        return 0;
    forget_errors();
    sum_all<<<blocks_of(a->rows, ROWS), dim3(COLUMNS, ROWS), 0,
              stream_of(stream)>>>(*a);
    return cudaGetLastError();
}

int convert(void *stream, const cuda_convert *a)
{
    if (a->n == 0)
        return 0;
    forget_errors();
    convert_all<<<blocks_of(a->n, FLAT), FLAT, 0, stream_of(stream)>>>(*a);
    return cudaGetLastError();
}

/* ---- the device ---- */

const char *text(int code)
{
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

int count(int *out)
{
    return cudaGetDeviceCount(out);
}

/* Contexts are pushed and popped by the driver, which the runtime has opened:
 * cudaSetDevice() starts the device that it puts back, so on a thread that
 * used none device 0.  The driver's numbers of errors are the runtime's. */
struct Driver {
    decltype(&cuDeviceGet) get;
    decltype(&cuDevicePrimaryCtxRetain) retain;
    decltype(&cuCtxPushCurrent) push;
    decltype(&cuCtxPopCurrent) pop;

    Driver()
    {
        void *from = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        find(from, "cuDeviceGet", &get);
        find(from, "cuDevicePrimaryCtxRetain", &retain);
        find(from, "cuCtxPushCurrent_v2", &push);
        find(from, "cuCtxPopCurrent_v2", &pop);
    }
    bool found() const { return get && retain && push && pop; }

  private:
    template <typename F> static void find(void *from, const char *name, F *f)
    {
        *f = from ? reinterpret_cast<F>(dlsym(from, name)) : nullptr;
    }
};

const Driver &driver()
{
    static const Driver found;
    return found;
}

int context(int index, void **out)
{
    CUdevice device = 0;
    CUcontext primary = nullptr;
    int code = cudaErrorSharedObjectSymbolNotFound;
    if (driver().found())
        code = driver().get(&device, index);
    if (!code)
        code = driver().retain(&primary, device);
    *out = primary;
    return code;
}

int enter(void *context)
{
    return driver().push(static_cast<CUcontext>(context));
}

void leave(int code)
{
    CUcontext left;
    if (!code)
        driver().pop(&left);
}

/* What may wait for the device ends the capture of a graph by any thread, but
 * not in this mode: nothing here is captured.  Only in a context: else it
 * starts device 0. */
class Relaxed {
  public:
    Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    Relaxed(const Relaxed &) = delete;
    Relaxed &operator=(const Relaxed &) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

int pin(size_t bytes, void **out)
{
    const Relaxed mode;
    return cudaHostAlloc(out, bytes, cudaHostAllocPortable);
}

void unpin(void *memory)
{
    const Relaxed mode;
    if (memory)
        cudaFreeHost(memory);
}

int stream_make(void **out)
{
    const Relaxed mode;
    cudaStream_t stream = nullptr;
    const int code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    *out = stream;
    return code;
}

void stream_free(void *stream)
{
    const Relaxed mode;
    cudaStreamSynchronize(stream_of(stream));
    cudaStreamDestroy(stream_of(stream));
}

int copy(void *stream, void *to, const void *from, size_t bytes)
{
    if (bytes == 0)
        return 0;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault,
                           stream_of(stream));
}

int event_make(void **out)
{
    const Relaxed mode;
    cudaEvent_t event = nullptr;
    /* A thread that waits sleeps: the cores belong to lookups. */
    const int code = cudaEventCreateWithFlags(
        &event, cudaEventDisableTiming | cudaEventBlockingSync);
    *out = event;
    return code;
}

void event_free(void *event)
{
    const Relaxed mode;
    if (event)
        cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

int event_record(void *event, void *stream)
{
    return cudaEventRecord(static_cast<cudaEvent_t>(event),
                           stream_of(stream));
}

int event_await(void *event, void *stream)
{
    return cudaStreamWaitEvent(stream_of(stream),
                               static_cast<cudaEvent_t>(event), 0);
}

int event_done(void *event, int *done)
{
    const Relaxed mode;
    const cudaError_t code = cudaEventQuery(static_cast<cudaEvent_t>(event));
    *done = code == cudaSuccess;
    if (code != cudaErrorNotReady)
        return code;
    forget_errors(); /* it is none */
    return 0;
}

int event_wait(void *event)
{
    const Relaxed mode;
    return cudaEventSynchronize(static_cast<cudaEvent_t>(event));
}

const cuda_device device = {
    {"cuda", text, count, context, enter, leave, pin, unpin, stream_make,
     stream_free, copy, event_make, event_free, event_record, event_await,
     event_done, event_wait},
    pool,
    sum,
    convert,
};

} // namespace

extern "C" __attribute__((visibility("default"))) const cuda_device *
persia_cuda_library(int version)
{
    return version == CUDA_LIBRARY_VERSION ? &device : nullptr;
}
