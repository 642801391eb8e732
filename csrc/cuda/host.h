/* host.h: the host's kernels (private). */
#ifndef PERSIA_CUDA_HOST_H
#define PERSIA_CUDA_HOST_H

#include "cuda/cuda.h"

void host_kernels(cuda_device *d);

#endif
