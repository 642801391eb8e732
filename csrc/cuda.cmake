# libpersia_cuda.so: the kernels of room cuda, by nvcc.  Included by
# CMakeLists.txt.  It knows no other library of Persia: libpersia.so opens it
# at run time.  CUDA's runtime is linked in, its driver is opened when used.
set(cuda_found OFF)
if(NOT PERSIA_CUDA STREQUAL "OFF" AND NOT PERSIA_SANITIZE AND NOT PERSIA_FUZZ)
    find_program(PERSIA_NVCC nvcc HINTS /usr/local/cuda/bin ENV CUDA_HOME
        PATH_SUFFIXES bin)
    mark_as_advanced(PERSIA_NVCC)
    if(PERSIA_NVCC)
        set(cuda_found ON)
    elseif(PERSIA_CUDA STREQUAL "ON")
        message(FATAL_ERROR "no nvcc was found: install CUDA's toolkit, give "
            "-DPERSIA_NVCC, or -DPERSIA_CUDA=OFF for hosts without a GPU")
    endif()
endif()

if(cuda_found)
    # Ampere, Hopper, and PTX for what comes later.  -fmad=false: the bits are
    # those of the host, which does not contract to FMA either.
    set(cuda_library "${output}/libpersia_cuda.so")
    set(cuda_source "${CMAKE_SOURCE_DIR}/cuda/library.cu")
    set(cuda_headers)
    foreach(room IN ITEMS base simd mem pool cuda)
        file(GLOB headers CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/${room}/*.h")
        list(APPEND cuda_headers ${headers})
    endforeach()
    add_custom_command(OUTPUT "${cuda_library}"
        COMMAND "${PERSIA_NVCC}" -std=c++17 -O3 -fmad=false
            "-I${CMAKE_SOURCE_DIR}"
            -gencode arch=compute_80,code=sm_80
            -gencode "arch=compute_90,code=[sm_90,compute_90]"
            -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra
            $<$<BOOL:${PERSIA_WERROR}>:-Werror=all-warnings>
            -cudart static -shared -o "${cuda_library}" "${cuda_source}"
        DEPENDS "${cuda_source}" ${cuda_headers}
        COMMENT "Compiling libpersia_cuda.so"
        COMMAND_EXPAND_LISTS VERBATIM)
    add_custom_target(persia_cuda DEPENDS "${cuda_library}")
    add_dependencies(libraries persia_cuda)
endif()
