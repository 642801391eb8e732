# The C tests (cmocka) and the fuzz targets (libFuzzer).  Included by
# CMakeLists.txt.  ctest runs the tests.
enable_testing()

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
        add_executable(test_${name} "${main}" ${helpers})
        target_compile_options(test_${name} PRIVATE -Werror)
        target_link_libraries(test_${name} PRIVATE persia_static cmocka)
        add_test(NAME ${name} COMMAND test_${name})
        set_tests_properties(${name} PROPERTIES TIMEOUT 300 LABELS ${room})
    endforeach()
endfunction()

if(PERSIA_TESTS)
    foreach(room IN LISTS rooms)
        add_room_tests(${room})
    endforeach()
endif()

if(PERSIA_FUZZ)
    file(GLOB targets CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/fuzz/*.c")
    foreach(target IN LISTS targets)
        get_filename_component(name "${target}" NAME_WE)
        add_executable(${name} "${target}")
        target_link_libraries(${name} PRIVATE persia_static)
        target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    endforeach()
endif()
