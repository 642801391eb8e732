# The simulator (tests/sim/sim.h): the objects of the library, linked so that
# locks, signals and sleeps are the simulator's, and room rpc is its network.
# Included by tests.cmake.
set(sim_sources sched.c net.c roles.c history.c main.c)
list(TRANSFORM sim_sources PREPEND "${CMAKE_SOURCE_DIR}/tests/sim/")
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
add_test(NAME sim COMMAND sim --histories 200)
set_tests_properties(sim PROPERTIES TIMEOUT 900 LABELS "sim;slow")
