# The C tests (cmocka) and the fuzz targets (libFuzzer).  Included by
# CMakeLists.txt.  ctest runs the tests.
enable_testing()

# What ThreadSanitizer must be told of libraries that it cannot look into.
set(tsan)
if(PERSIA_SANITIZE MATCHES "thread")
    set(tsan "${CMAKE_SOURCE_DIR}/tests/tsan.c")
endif()

# Tests that take three seconds or more: make check leaves them out.
set(slow bits client_faults client_lost embedding_worker_epochs loop_oom
    loop_prefetch mem rpc_foreign server_hangs shard_oom table_full table_limit
    table_memory table_reserve table_same table_schedule)

# A file test_*.c has a main() and makes one binary; other files of the
# folder are helpers that each of its binaries gets.
function(add_room_tests room)
    file(GLOB mains CONFIGURE_DEPENDS
        "${CMAKE_SOURCE_DIR}/tests/${room}/test_*.c")
    file(GLOB helpers CONFIGURE_DEPENDS
        "${CMAKE_SOURCE_DIR}/tests/${room}/*.c")
    if(mains)
        list(REMOVE_ITEM helpers ${mains})
    endif()
    foreach(main IN LISTS mains)
        get_filename_component(name "${main}" NAME_WE)
        string(REGEX REPLACE "^test_" "" name "${name}")
        if(NOT name MATCHES "^${room}")
            set(name "${room}_${name}")
        endif()
        add_executable(test_${name} "${main}" ${helpers} ${tsan})
        target_compile_options(test_${name} PRIVATE
            $<$<BOOL:${PERSIA_WERROR}>:-Werror>)
        target_link_libraries(test_${name} PRIVATE persia_data_static cmocka)
        add_test(NAME ${name} COMMAND test_${name})
        set(labels ${room})
        if(name IN_LIST slow)
            list(APPEND labels slow)
        endif()
        set_tests_properties(${name} PROPERTIES TIMEOUT 900
            LABELS "${labels}")
    endforeach()
endfunction()

if(PERSIA_TESTS)
    foreach(room IN LISTS rooms ITEMS data)
        add_room_tests(${room})
    endforeach()
    target_sources(test_shard_copy PRIVATE
        "${CMAKE_SOURCE_DIR}/tests/table/help.c")
    target_sources(test_server_durable PRIVATE
        "${CMAKE_SOURCE_DIR}/tests/log/disk.c")
    target_link_options(test_embedding_worker_link PRIVATE -Wl,--wrap=persia_rpc_start)
    foreach(call persia_rpc_start persia_client_look persia_loop_batch_lookup)
        target_link_options(test_embedding_worker_again PRIVATE -Wl,--wrap=${call})
    endforeach()
    target_link_options(test_mem PRIVATE -Wl,--wrap=madvise)
    # Memory runs out: tests/fault.h.
    foreach(test shard_oom loop_oom embedding_worker_oom)
        foreach(call malloc calloc realloc aligned_alloc mmap mremap)
            target_link_options(test_${test} PRIVATE -Wl,--wrap=${call})
        endforeach()
    endforeach()
    # Calls that this one lets fail, and those that must not make them.
    foreach(call malloc calloc realloc aligned_alloc mmap mremap persia_thread_start
            push_change stripe_add_locked stripe_touch_slow)
        target_link_options(test_table_memory PRIVATE -Wl,--wrap=${call})
    endforeach()
endif()

# One thread at a time: TSan has nothing to say there.
if(PERSIA_TESTS AND NOT PERSIA_SANITIZE MATCHES "thread")
    include(sim.cmake)
endif()

# What tests/counted/gate.py counts, and a library that counts.
if(PERSIA_TESTS AND NOT PERSIA_SANITIZE)
    add_executable(counted "${CMAKE_SOURCE_DIR}/tests/counted/counted.c"
        "${CMAKE_SOURCE_DIR}/tests/counted/steps.c")
    target_compile_options(counted PRIVATE $<$<BOOL:${PERSIA_WERROR}>:-Werror>)
    target_link_libraries(counted PRIVATE persia_static)
    add_library(counted_calls MODULE
        "${CMAKE_SOURCE_DIR}/tests/counted/calls.c")
    target_link_libraries(counted_calls PRIVATE persia_strict)
endif()

# The same bits whatever the instruction set: the kernels' rooms compiled for
# each -march alone, against the clones of the plain build.
function(add_bits_test)
    set(programs "$<TARGET_FILE:bits_clones>")
    add_executable(bits_clones "${CMAKE_SOURCE_DIR}/tests/bits/bits.c")
    target_link_libraries(bits_clones PRIVATE persia_static)
    file(GLOB kernels CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/base/*.c"
        "${CMAKE_SOURCE_DIR}/simd/*.c" "${CMAKE_SOURCE_DIR}/spec/*.c"
        "${CMAKE_SOURCE_DIR}/mem/*.c" "${CMAKE_SOURCE_DIR}/sched/*.c"
        "${CMAKE_SOURCE_DIR}/ids/*.c" "${CMAKE_SOURCE_DIR}/pool/*.c"
        "${CMAKE_SOURCE_DIR}/optim/*.c" "${CMAKE_SOURCE_DIR}/evict/*.c"
        "${CMAKE_SOURCE_DIR}/admit/*.c"
        "${CMAKE_SOURCE_DIR}/table/*.c" "${CMAKE_SOURCE_DIR}/wire/*.c")
    foreach(march x86-64 x86-64-v2 x86-64-v3 x86-64-v4)
        add_library(rooms_${march} STATIC EXCLUDE_FROM_ALL ${kernels})
        target_link_libraries(rooms_${march} PUBLIC persia_flags)
        target_compile_options(rooms_${march} PRIVATE -march=${march})
        target_compile_definitions(rooms_${march} PRIVATE PERSIA_NO_CLONES)
        add_executable(bits_${march} "${CMAKE_SOURCE_DIR}/tests/bits/bits.c")
        target_link_libraries(bits_${march} PRIVATE rooms_${march})
        target_compile_definitions(bits_${march} PRIVATE
            BITS_MARCH="${march}")
        list(APPEND programs "$<TARGET_FILE:bits_${march}>")
    endforeach()
    list(JOIN programs "," programs)
    add_test(NAME bits COMMAND "${CMAKE_COMMAND}" "-DPROGRAMS=${programs}"
        -P "${CMAKE_SOURCE_DIR}/tests/bits/compare.cmake")
    set_tests_properties(bits PROPERTIES TIMEOUT 900 LABELS slow)
endfunction()

if(PERSIA_TESTS AND NOT PERSIA_SANITIZE
        AND CMAKE_C_COMPILER_ID STREQUAL "GNU"
        AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    add_bits_test()
endif()

if(PERSIA_FUZZ)
    file(GLOB targets CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/fuzz/*.c")
    foreach(target IN LISTS targets)
        get_filename_component(name "${target}" NAME_WE)
        add_executable(${name} "${target}")
        target_link_libraries(${name} PRIVATE persia_data_static)
        target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    endforeach()
    target_sources(fuzz_log PRIVATE "${CMAKE_SOURCE_DIR}/tests/log/disk.c")
endif()
