# The simulator (tests/sim/sim.h): the objects of the library, linked so that
# locks, signals and sleeps are the simulator's, and room rpc is its network.
# Included by tests.cmake.
set(sim_folder "${CMAKE_SOURCE_DIR}/tests/sim")
set(sim_sources sched.c net.c counts.c roles.c storage.c saves.c moves.c scale.c
    four.c history.c main.c)
list(TRANSFORM sim_sources PREPEND "${sim_folder}/")
list(APPEND sim_sources "${CMAKE_SOURCE_DIR}/tests/log/disk.c")
set(sim_wraps huge_can nanosleep pthread_join
    pthread_mutex_lock pthread_mutex_unlock
    pthread_rwlock_rdlock pthread_rwlock_wrlock pthread_rwlock_unlock
    pthread_cond_signal pthread_cond_broadcast pthread_cond_wait)

function(add_sim name)
    add_executable(${name} ${sim_sources} ${ARGN})
    target_compile_options(${name} PRIVATE
        $<$<BOOL:${PERSIA_WERROR}>:-Werror>)
    target_link_libraries(${name} PRIVATE persia_static)
    foreach(call IN LISTS sim_wraps)
        target_link_options(${name} PRIVATE -Wl,--wrap=${call})
    endforeach()
endfunction()

add_sim(sim)
set(histories 200)
if(PERSIA_SANITIZE)
    set(histories 100)
endif()
add_test(NAME sim COMMAND sim --histories ${histories})
set_tests_properties(sim PROPERTIES TIMEOUT 900 LABELS "sim;slow")

# ---- planted bugs ----
set(sim_bugs)
set(sim_files)
function(bug name file old new)
    list(APPEND sim_bugs ${name})
    list(APPEND sim_files ${file})
    set(sim_bugs ${sim_bugs} PARENT_SCOPE)
    set(sim_files ${sim_files} PARENT_SCOPE)
endfunction()
# One that the simulator's own sources have.
function(model_bug name)
    list(APPEND sim_bugs ${name})
    set(sim_bugs ${sim_bugs} PARENT_SCOPE)
endfunction()
include("${sim_folder}/bugs.cmake")
list(REMOVE_DUPLICATES sim_files)
list(REMOVE_DUPLICATES sim_bugs)

set(planted)
foreach(file IN LISTS sim_files)
    set(out "${CMAKE_BINARY_DIR}/planted/${file}")
    add_custom_command(OUTPUT "${out}"
        COMMAND "${CMAKE_COMMAND}" "-DBUGS=${sim_folder}/bugs.cmake"
            "-DROOMS=${CMAKE_SOURCE_DIR}" "-DFILE=${file}" "-DOUT=${out}"
            -P "${sim_folder}/plant.cmake"
        DEPENDS "${CMAKE_SOURCE_DIR}/${file}" "${sim_folder}/bugs.cmake"
            "${sim_folder}/plant.cmake"
        VERBATIM)
    list(APPEND planted "${out}")
endforeach()

# One test a build: each bug is found within 600 histories; all but one are
# within 200.
if(NOT PERSIA_SANITIZE)
    add_sim(sim_bugs ${planted})
    list(JOIN sim_bugs "," names)
    add_test(NAME sim_bugs COMMAND sim_bugs --bugs ${names} --histories 600)
    set_tests_properties(sim_bugs PROPERTIES TIMEOUT 900 LABELS "sim;slow")
endif()
