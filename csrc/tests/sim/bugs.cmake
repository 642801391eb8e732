# Planted bugs: bug(NAME FILE OLD NEW), where OLD occurs once in the file.  A
# copy of the file has all of its bugs, each of which the simulator switches
# on by name.

# ---- servers ----

bug(ledger_check_skipped shard/ledger.c
[==[    if (key->number <= watermark || window_has(&s->set.w, key->number))
        return LEDGER_DONE;
]==]
[==[    if (!sim_bug("ledger_check_skipped") &&
        (key->number <= watermark || window_has(&s->set.w, key->number)))
        return LEDGER_DONE;
]==])

bug(zombies_apply shard/ledger.c
[==[    int order = s ? owner_compare(&key->owner, &s->owner) : 1;
]==]
[==[    int order = s ? owner_compare(&key->owner, &s->owner) : 1;
    if (order < 0 && sim_bug("zombies_apply"))
        order = 0;
]==])

bug(staleness_off_by_one shard/waits.c
[==[    if (ledger_has(s->ledger, m->stream, m->after))
        return PERSIA_OK;
]==]
[==[    if (ledger_has(s->ledger, m->stream, m->after) ||
        (sim_bug("staleness_off_by_one") &&
         ledger_has(s->ledger, m->stream, m->after - 1)))
        return PERSIA_OK;
]==])

# ---- the log ----

# What is acknowledged was given to the disk, and not synced.
bug(answer_before_sync shard/logged.c
[==[    *out = NULL;
    if (!s->log || s->replaying || !persia_log_syncs(s->log))
]==]
[==[    *out = NULL;
    if (!s->log || s->replaying || !persia_log_syncs(s->log) ||
        sim_bug("answer_before_sync"))
]==])

# Of an update of several parts.
bug(one_part_is_logged shard/logged.c
[==[                               n + (refused != NULL), end);
]==]
[==[                               sim_bug("one_part_is_logged")
                                   ? 1
                                   : n + (refused != NULL),
                               end);
]==])

# Who has the stream is forgotten: updates of an owner that a cut has not.
bug(streams_are_not_replayed shard/replay.c
[==[    rc = ledger_open(p->s->ledger, key->stream, key->owner, &taken, &ledger);
    return rc == PERSIA_ECLOSED ? PERSIA_OK : rc;
}

/* A part as push_run()]==]
[==[    if (sim_bug("streams_are_not_replayed"))
        return PERSIA_OK;
    rc = ledger_open(p->s->ledger, key->stream, key->owner, &taken, &ledger);
    return rc == PERSIA_ECLOSED ? PERSIA_OK : rc;
}

/* A part as push_run()]==])

# A record behind others that are not there.
bug(synced_too_soon log/append.c
[==[    const uint64_t target = l->end;
    l->wanted_at = PERSIA_FOREVER;
]==]
[==[    const uint64_t target = l->end;
    if (sim_bug("synced_too_soon"))
        l->synced = target;
    l->wanted_at = PERSIA_FOREVER;
]==])

# ---- clients ----

# A push whose connection breaks counts as applied.
bug(lost_request_acknowledged client/fan.c
[==[    int rc = q->rc;
    if (!rc) {
        rc = f->accept(f->ctx, q);
]==]
[==[    int rc = q->rc;
    if (rc == PERSIA_EUNAVAILABLE && f->method == WIRE_PUSH &&
        sim_bug("lost_request_acknowledged")) {
        q->rc = PERSIA_OK;
        return REQUEST_END;
    }
    if (!rc) {
        rc = f->accept(f->ctx, q);
]==])

bug(lost_update_not_told client/servers.c
[==[    if (m->boot == to->boot)
        return 0;
]==]
[==[    if (m->boot == to->boot || sim_bug("lost_update_not_told"))
        return 0;
]==])

# What an earlier process of the rank left at some servers only.
bug(missing_not_told client/complete.c
[==[    return complete_count(r, NULL, last);
]==]
[==[    return sim_bug("missing_not_told") ? 0 : complete_count(r, NULL, last);
]==])

# DUPLICATE is an acknowledgement, too.
bug(duplicate_not_noted client/push.c
[==[    return m->status == PUSH_APPLIED || m->status == PUSH_DUPLICATE
]==]
[==[    return m->status == PUSH_APPLIED ||
                   (m->status == PUSH_DUPLICATE &&
                    !sim_bug("duplicate_not_noted"))
]==])

# Earlier updates are in flight.
bug(settled_too_far client/push.c
[==[    if (m->settled >= m->number) /* one that is sent again */
]==]
[==[    if (m->settled >= m->number || sim_bug("settled_too_far"))
]==])

# The server has been started again since it answered.
bug(answer_of_a_former_life client/push.c
[==[    if (there) {
        push_note_number(from, number, settled);
]==]
[==[    there |= sim_bug("answer_of_a_former_life");
    if (there) {
        push_note_number(from, number, settled);
]==])

# A rank must not use numbers that any server has.
bug(numbers_of_the_last_server client/servers.c
[==[    if (top > r->last_number)
        r->last_number = top;
]==]
[==[    if (top > r->last_number || sim_bug("numbers_of_the_last_server"))
        r->last_number = top;
]==])

# The next thread that greets waits for ever.
bug(greeting_kept_after_error client/servers.c
[==[            r->counts.reconnects++;
    }
    greeting_end(to);
]==]
[==[            r->counts.reconnects++;
    }
    if (!rc || !sim_bug("greeting_kept_after_error"))
        greeting_end(to);
]==])

bug(tables_not_declared_again client/servers.c
[==[    pthread_mutex_lock(&r->lock);
    uint32_t n = r->tables_declared;
]==]
[==[    pthread_mutex_lock(&r->lock);
    uint32_t n = sim_bug("tables_not_declared_again") ? 0
                                                      : r->tables_declared;
]==])

# Lost updates count again when the server is killed once more.
bug(lost_twice client/servers.c
[==[        numbers_from_wire(&to->acked_late, &m->ledger);
]==]
[==[        if (!to->boot || !sim_bug("lost_twice"))
            numbers_from_wire(&to->acked_late, &m->ledger);
]==])

# ---- checkpoints ----

# Those of the model (storage.c).  Updates in part of a checkpoint's rows, for
# another number of servers; what the log had when a cut was written, not taken.
model_bug(union_of_ledgers)
model_bug(cut_of_a_later_moment)

# A client that was stopped during a load takes the server back.
bug(restore_is_taken_back client/servers.c
[==[    if (m->restore >= restore || atomic_load(&r->restores) != RESTORES_ONE)
]==]
[==[    if ((sim_bug("restore_is_taken_back") ? m->restore == restore
                                          : m->restore >= restore) ||
        atomic_load(&r->restores) != RESTORES_ONE)
]==])
bug(restore_is_taken_back shard/hello.c
[==[        t->m->restore <= had)
]==]
[==[        (t->m->restore <= had && !sim_bug("restore_is_taken_back")))
]==])

# An update is in the ledger of a checkpoint, and not in its rows.
bug(ledger_of_a_later_moment shard/job_snapshot.c
[==[#include <string.h>
]==]
[==[#include <string.h>
#include <time.h>
]==])
bug(ledger_of_a_later_moment shard/job_snapshot.c
[==[        rc = persia_tables_between(n->s->p, job_snapshot_take_cut, n);
]==]
[==[        rc = persia_tables_between(n->s->p, job_snapshot_take_cut, n);
    if (!rc && sim_bug("ledger_of_a_later_moment")) {
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        rc = ledger_copy(n->s->ledger, &n->moment.ledgers,
                         &n->moment.ledgers_room, &n->moment.ledgers_n);
    }
]==])

# What follows a checkpoint counts as applied when that is loaded.
bug(ledger_is_not_restored shard/job_restore.c
[==[    return rc ? rc : ledger_fill(n->ledger, m->ledgers, m->ledgers_n);
]==]
[==[    if (!rc && sim_bug("ledger_is_not_restored")) {
        wire_ledger *all = NULL;
        size_t room = 0, count = 0;
        rc = ledger_room(s->ledger, &all, &room);
        if (!rc)
            rc = ledger_copy(s->ledger, &all, &room, &count);
        if (!rc)
            rc = ledger_fill(n->ledger, all, count);
        free(all);
        return rc;
    }
    return rc ? rc : ledger_fill(n->ledger, m->ledgers, m->ledgers_n);
]==])

bug(restore_is_not_logged shard/logged.c
[==[    int rc = persia_log_append(s->log, LOG_RESTORE, request, 1, &end);
]==]
[==[    if (sim_bug("restore_is_not_logged"))
        return PERSIA_OK;
    int rc = persia_log_append(s->log, LOG_RESTORE, request, 1, &end);
]==])

# What followed the checkpoint is in no rows.
bug(loader_sends_no_more_after_a_load loader/resume.c
[==[    if (m->lineage == s->lineage)
        return;
    s->lineage = m->lineage;
]==]
[==[    if (m->lineage == s->lineage ||
        sim_bug("loader_sends_no_more_after_a_load"))
        return;
    s->lineage = m->lineage;
]==])

# Batches of the rows before are offered, and done.
bug(worker_goes_on_after_a_load embedding_worker/lineage.c
[==[    if (lineage != s->lineage)
        lineage_begin_again(s, lineage, boot);
]==]
[==[    if (lineage != s->lineage && !sim_bug("worker_goes_on_after_a_load"))
        lineage_begin_again(s, lineage, boot);
]==])

# ---- moves ----

# Of the model (moves.c): a source that begins with the shard again.
model_bug(out_is_not_noted)

# Updates behind the last rows that are sent.
bug(rows_that_are_not_held shard/moving.c
[==[    return atomic_load(&s->hold) == SHARD_FREE ? PERSIA_OK : refuse_moving();
]==]
[==[    return atomic_load(&s->hold) == SHARD_FREE ||
                   sim_bug("rows_that_are_not_held")
               ? PERSIA_OK
               : refuse_moving();
]==])

# What changed since the round before.
bug(last_rows_are_not_sent shard/copy.c
[==[    int rc = copy_round(s, c);
]==]
[==[    int rc = PERSIA_OK;
    if (!last || !sim_bug("last_rows_are_not_sent"))
        rc = copy_round(s, c);
]==])

# A target whose disk has no rows.
bug(prepared_without_its_rows shard/logged.c
[==[    if (!s->log || s->replaying ||
        !(m->pieces_n]==]
[==[    if (!s->log || s->replaying ||
        (sim_bug("prepared_without_its_rows") && !m->handover_n) ||
        !(m->pieces_n]==])

# Two processes answer.
bug(moved_shard_answers server/host.c
[==[        h->moves = 1;
        h->n--;
        memmove]==]
[==[        if (sim_bug("moved_shard_answers")) {
            pthread_rwlock_unlock(&h->lock);
            return rc;
        }
        h->moves = 1;
        h->n--;
        memmove]==])

# What the target had applied, and lost, is not missed.
bug(taken_back_with_its_boot shard/moving.c
[==[    return persia_random_id(&s->boot);
]==]
[==[    return sim_bug("taken_back_with_its_boot") ? PERSIA_OK
                                               : persia_random_id(&s->boot);
]==])

# ---- four roles ----

# It was never trained.
bug(batch_of_a_dead_rank_is_done embedding_worker/offers.c
[==[    if (o->stream->state == STREAM_OLD) {
        offer_end(s, o);
        return;
]==]
[==[    if (o->stream->state == STREAM_OLD ||
        (!failed && sim_bug("batch_of_a_dead_rank_is_done"))) {
        offer_end(s, o);
        return;
]==])

# What a killed server lost is not found where its worker died, too.
bug(loader_does_not_compare loader/resume.c
[==[    if (asked)
        (void)resume_compare_with(s, &before, servers, &reply);
]==]
[==[    if (asked && !sim_bug("loader_does_not_compare"))
        (void)resume_compare_with(s, &before, servers, &reply);
]==])

# Ranks that die in the middle of a step: the batch of one that had returned
# its gradients was never trained.
bug(batch_of_a_broken_step_is_done embedding_worker/work.c
[==[    } else if (rc) {
        /* Another rank's end is not the batch's fault. */
]==]
[==[    } else if (rc == PERSIA_ECLOSED &&
               sim_bug("batch_of_a_broken_step_is_done")) {
        offer_end(s, o);
    } else if (rc) {
]==])

# Gradients of rows that arrive after the lease has ended.
bug(rows_of_a_late_batch_are_gone embedding_worker/offers.c
[==[    row_ids_free(&o->rows);
    o->planned = 0;
]==]
[==[    row_ids_free(&o->rows);
    if (!sim_bug("rows_of_a_late_batch_are_gone"))
        o->planned = 0;
]==])
