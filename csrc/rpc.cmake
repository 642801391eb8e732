# Finds the gRPC core.  Included by CMakeLists.txt.
#
# PERSIA_GRPC_CORE: a folder that csrc/grpc built, whose core goes whole into
# libpersia.so.  Empty: the shared library of the system.
#
# Sets rpc_includes, rpc_libraries, rpc_definitions, and rpc_unused: the
# sources of room rpc that are not built.
include(CheckCSourceCompiles)

set(PERSIA_GRPC_CORE "" CACHE PATH "folder with libgrpc_core.a, or empty")
set(rpc_includes)
set(rpc_libraries)
set(rpc_definitions)
set(rpc_found OFF)
if(PERSIA_GRPC_CORE)
    set(rpc_includes "${PERSIA_GRPC_CORE}/include")
    # The archive's symbols stay inside: another core lives beside it.
    set(rpc_libraries "${PERSIA_GRPC_CORE}/libgrpc_core.a" stdc++ m
        -Wl,--exclude-libs,libgrpc_core.a -Wl,--gc-sections)
    set(rpc_found ON)
elseif(NOT PERSIA_RPC STREQUAL "OFF")
    find_path(PERSIA_GRPC_INCLUDE grpc/grpc.h)
    find_library(PERSIA_GRPC_LIBRARY grpc)
    find_library(PERSIA_GPR_LIBRARY gpr)
    mark_as_advanced(PERSIA_GRPC_INCLUDE PERSIA_GRPC_LIBRARY
        PERSIA_GPR_LIBRARY)
    if(PERSIA_GRPC_INCLUDE AND PERSIA_GRPC_LIBRARY AND PERSIA_GPR_LIBRARY)
        set(rpc_includes "${PERSIA_GRPC_INCLUDE}")
        set(rpc_libraries "${PERSIA_GRPC_LIBRARY}" "${PERSIA_GPR_LIBRARY}")
        # Older cores have other functions for the same.
        set(CMAKE_REQUIRED_INCLUDES "${rpc_includes}")
        set(CMAKE_REQUIRED_LIBRARIES "${rpc_libraries}")
        check_c_source_compiles("
            #include <grpc/grpc.h>
            #include <grpc/grpc_security.h>
            #if __has_include(<grpc/credentials.h>)
            #include <grpc/credentials.h>
            #endif
            int main(void)
            {
                grpc_channel_credentials *c =
                    grpc_insecure_credentials_create();
                return grpc_channel_create(\"dns:///a:1\", c, 0) == 0;
            }" PERSIA_GRPC_FITS)
        check_c_source_compiles("
            #include <grpc/support/log.h>
            int main(void)
            {
                gpr_set_log_function(0);
                return 0;
            }" PERSIA_GRPC_LOGS)
        unset(CMAKE_REQUIRED_INCLUDES)
        unset(CMAKE_REQUIRED_LIBRARIES)
        set(rpc_found ${PERSIA_GRPC_FITS})
    endif()
    if(NOT rpc_found)
        set(rpc_includes)
        set(rpc_libraries)
        set(missing "no gRPC core (1.47 or later) was found: install "
            "libgrpc-dev, build csrc/grpc and give -DPERSIA_GRPC_CORE")
        if(PERSIA_RPC STREQUAL "ON")
            message(FATAL_ERROR ${missing} ", or give -DPERSIA_RPC=OFF for "
                "embedded use only")
        endif()
        message(WARNING ${missing} "; persia is built for embedded use only")
    endif()
endif()

if(rpc_found)
    set(rpc_definitions PERSIA_TESTS_GRPC)
    if(PERSIA_GRPC_LOGS AND NOT PERSIA_GRPC_CORE)
        list(APPEND rpc_definitions PERSIA_GRPC_LOGS)
    endif()
    set(rpc_unused none)
else()
    set(rpc_unused client connections runtime security server slices stalls
        versions)
endif()
list(TRANSFORM rpc_unused PREPEND "${CMAKE_SOURCE_DIR}/rpc/")
list(TRANSFORM rpc_unused APPEND ".c")
