/* moves.h: shards that go from one process to another in a history: both
 * sides (moves.c), and the command (scale.c).
 *
 * Real here: holding a shard, taking it out of a host and into another one,
 * the calls of Move, clients that follow.  Modelled: what
 * persia/distributed/moves.py and scaling.py do around them, and of
 * shards.py with which shards a process begins.
 *
 * Without logs the one who starts processes again knows which shards each had,
 * and waits until a move whose source was killed has ended.  With logs their
 * disks say it.
 */
#ifndef PERSIA_TESTS_SIM_MOVES_H
#define PERSIA_TESTS_SIM_MOVES_H

#include "tests/sim/storage.h"

/* Takes calls of Move, in the process that calls it, and continues what an
 * earlier one has left. */
void moves_begin(uint32_t process);
/* The host of a process that begins learns where shards are. */
void moves_tell(uint32_t process);
/* Whether a process that is about to start has a shard. */
int moves_begins_with(uint32_t process, uint32_t shard);
int moves_may_start(uint32_t process);
/* A command asks for a move; w.moves is woken at each of its steps. */
void moves_ask(uint32_t *source, uint32_t *target);
/* kill -9 of the last one. */
void moves_kill_command(void);
/* Faults are over: a last command says where shards are. */
void moves_heal(void);
/* Each shard is at one process. */
void moves_check_end(void);

/* A call of Move, and the way to a process. */
wire_move moves_message(enum wire_move_verb verb, uint64_t id, uint32_t shard,
                        uint32_t to);
int moves_connect(uint32_t process, shard_ref **out);
int moves_call(shard_ref *ref, const wire_move *m, wire_move_reply *out);

#endif
