# Finds the gRPC core.  Included by CMakeLists.txt.
#
# Sets rpc_includes, rpc_libraries, rpc_definitions (for tests that speak gRPC
# themselves), and rpc_unused: the sources of room rpc that are not built.
include(CheckCSourceCompiles)

set(rpc_includes)
set(rpc_libraries)
set(rpc_definitions)
set(rpc_found OFF)
if(NOT PERSIA_RPC STREQUAL "OFF")
    find_path(PERSIA_GRPC_INCLUDE grpc/grpc.h)
    find_library(PERSIA_GRPC_LIBRARY grpc)
    find_library(PERSIA_GPR_LIBRARY gpr)
    mark_as_advanced(PERSIA_GRPC_INCLUDE PERSIA_GRPC_LIBRARY
        PERSIA_GPR_LIBRARY)
    if(PERSIA_GRPC_INCLUDE AND PERSIA_GRPC_LIBRARY AND PERSIA_GPR_LIBRARY)
        # Older cores have other functions for the same.
        set(CMAKE_REQUIRED_INCLUDES "${PERSIA_GRPC_INCLUDE}")
        set(CMAKE_REQUIRED_LIBRARIES "${PERSIA_GRPC_LIBRARY}"
            "${PERSIA_GPR_LIBRARY}")
        check_c_source_compiles("
            #include <grpc/grpc.h>
            #include <grpc/grpc_security.h>
            #include <grpc/support/log.h>
            int main(void)
            {
                gpr_set_log_function(0);
                grpc_channel_credentials *c =
                    grpc_insecure_credentials_create();
                return grpc_channel_create(\"dns:///a:1\", c, 0) == 0;
            }" PERSIA_GRPC_FITS)
        unset(CMAKE_REQUIRED_INCLUDES)
        unset(CMAKE_REQUIRED_LIBRARIES)
        set(rpc_found ${PERSIA_GRPC_FITS})
    endif()
    if(rpc_found)
        set(rpc_includes "${PERSIA_GRPC_INCLUDE}")
        set(rpc_libraries "${PERSIA_GRPC_LIBRARY}" "${PERSIA_GPR_LIBRARY}")
    elseif(PERSIA_RPC STREQUAL "ON")
        message(FATAL_ERROR "no gRPC core (1.47 to 1.65) was found: install "
            "libgrpc-dev, or give -DPERSIA_RPC=OFF for embedded use only")
    else()
        message(WARNING "no gRPC core (1.47 to 1.65) was found: persia is "
            "built for embedded use only; install libgrpc-dev for servers")
    endif()
endif()

if(rpc_found)
    set(rpc_definitions PERSIA_TESTS_GRPC)
    set(rpc_unused none)
else()
    set(rpc_unused client connections runtime security server slices stalls)
endif()
list(TRANSFORM rpc_unused PREPEND "${CMAKE_SOURCE_DIR}/rpc/")
list(TRANSFORM rpc_unused APPEND ".c")
