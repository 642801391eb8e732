/* sim.h: processes, threads, locks and time of a simulation.
 *
 * The real objects of the library run in one process of the machine.  A
 * simulated process is a `sim_node`.  Its threads are threads of the machine,
 * but only one of all of them runs at a time: it has the *baton*.  It gives
 * the baton away where the library takes a lock, waits, starts a thread or
 * ends one; the seed chooses the next thread.  So a seed has one history.
 *
 *   sched.c    the baton, time, locks, signals
 *   net.c      room rpc: messages between nodes, and what happens to them
 *   roles.c    servers and ranks as nodes: what a user's processes do
 *   four.c     the same with embedding workers and a loader
 *   history.c  what a seed plans, faults, the verdict
 *   main.c     seeds, one process of the machine each
 *
 * Nothing here locks: the thread that runs has the baton.
 */
#ifndef PERSIA_TESTS_SIM_H
#define PERSIA_TESTS_SIM_H

#include <stddef.h>
#include <stdint.h>

#define SIM_US ((uint64_t)1000)
#define SIM_MS ((uint64_t)1000000)
#define SIM_S ((uint64_t)1000000000)

typedef struct sim_node sim_node;

/* ---- the history ---- */

/* Makes the calling thread the first one, of the node "director". */
void sim_begin(uint64_t seed, int show);
uint64_t sim_now(void);
/* Below n; of the seed. */
uint32_t sim_random(uint32_t n);
/* True in `of` of 1,000 cases. */
int sim_chance(uint32_t of);
/* Between both, small numbers as often as large ones. */
uint64_t sim_between(uint64_t least, uint64_t most);

/* One line of the trace, which is hashed, and shown if `show` was given. */
void sim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The history has a fault: ends the process with status 1. */
_Noreturn void sim_fail(const char *format, ...)
    __attribute__((format(printf, 1, 2)));
uint64_t sim_hash(void);
/* So many times the baton changed hands. */
uint64_t sim_steps(void);

/* ---- nodes ---- */

/* slot: a place that outlives the process, see net_cut(). */
sim_node *sim_node_make(const char *name, int slot);
const char *sim_node_name(const sim_node *n);
int sim_node_slot(const sim_node *n);
int sim_node_alive(const sim_node *n);
/* Of the calling thread. */
sim_node *sim_node_self(void);
void sim_spawn(sim_node *n, void *(*run)(void *arg), void *arg,
               const char *name);
/* Its threads never run again. */
void sim_kill(sim_node *n);
/* Its threads do not run until then. */
void sim_pause(sim_node *n, uint64_t until);
/* For how long it has been paused in all. */
uint64_t sim_paused(const sim_node *n);

/* Something for a thread of the node that takes what arrives: run(ctx). */
void sim_post(sim_node *n, void (*run)(void *ctx), void *ctx);

/* ---- time ---- */

/* run(ctx) at that time, on any thread; it must not wait. */
void sim_at(uint64_t at, void (*run)(void *ctx), void *ctx);
void sim_sleep(uint64_t ns);
/* Waits for sim_wake() of the same address; 1: until then there was none. */
int sim_wait(const void *on, uint64_t until);
void sim_wake(const void *on);

/* ---- planted bugs ---- */

/* Whether the build has the bug of this name, and the history is to have it.
 */
int sim_bug(const char *name);
void sim_bug_choose(const char *name);

#endif
