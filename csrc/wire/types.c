/* types.c: the messages of persia.proto, field by field, and their checks. */
#include "wire/types.h"

#include "table/table.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- errors and names --------------------------------------------------- */

const wire_field *type_field(const wire_type *t, uint64_t no)
{
    return no && no <= t->fields_n && t->fields[no].kind ? &t->fields[no]
                                                         : NULL;
}

/* "PushRequest.tables[3]"; returns its length, which may pass `room`. */
static size_t describe(const wire_at *at, char *out, size_t room)
{
    if (!at->up)
        return (size_t)snprintf(out, room, "%s", at->type->name);
    const wire_field *f = &at->up->type->fields[at->field];
    size_t n = describe(at->up, out, room);
    char index[32] = "";
    if (f->kind == KIND_MESSAGES)
        snprintf(index, sizeof index, "[%zu]", at->index);
    if (n < room)
        n += (size_t)snprintf(out + n, room - n, ".%s%s", f->name, index);
    return n;
}

int at_refuse(const wire_at *at, uint64_t no, const char *format, ...)
{
    char place[256], what[256];
    const wire_field *f = type_field(at->type, no);
    va_list args;

    size_t n = describe(at, place, sizeof place);
    if (no && n < sizeof place) {
        if (f)
            snprintf(place + n, sizeof place - n, ".%s", f->name);
        else
            snprintf(place + n, sizeof place - n, ", field %llu",
                     (unsigned long long)no);
    }
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return err_set(at->code, "message %s: %s", place, what);
}

/* Bytes of the UTF-8 character at s, which has n > 0 bytes; 0 if malformed. */
static size_t utf8_length(const unsigned char *s, size_t n)
{
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    size_t length = s[0] < 0x80   ? 1
                    : s[0] < 0xC0 ? 0
                    : s[0] < 0xE0 ? 2
                    : s[0] < 0xF0 ? 3
                    : s[0] < 0xF8 ? 4
                                  : 0;
    if (length < 2 || length > n)
        return length <= n ? length : 0;
    uint32_t c = s[0] & (0xFFu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3F);
    }
    return c < least[length] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)
               ? 0
               : length;
}

int at_check_name(const wire_at *at, uint32_t no, const char *text,
                  size_t bytes)
{
    const uint32_t room = at->type->fields[no].limit;
    if (bytes >= room)
        return at_refuse(at, no, "has %zu bytes, at most %u", bytes,
                         room - 1);
    for (size_t i = 0, n; i < bytes; i += n) {
        if (!text[i])
            return at_refuse(at, no, "has a 0 at byte %zu", i);
        n = utf8_length((const unsigned char *)text + i, bytes - i);
        if (!n)
            return at_refuse(at, no, "is not UTF-8 at byte %zu", i);
    }
    return PERSIA_OK;
}

size_t bulk_item(const wire_field *f, const void *m, uint32_t dtype)
{
    uint32_t width = 1;
    if (f->width)
        memcpy(&width, (const char *)m + f->width, sizeof width);
    return (size_t)width * (f->item ? f->item : wire_dtype_bytes(dtype));
}

/* ---- the macros of the lists below -------------------------------------- */

/* FIELDS(id) begins the list of struct wire_<id>; F(kind, name in
 * persia.proto, member, ...) is a field of it. */
#define F(K, text, member, ...)                                               \
    { .kind = KIND_##K, .name = text, .offset = offsetof(THIS, member),       \
      ##__VA_ARGS__ }
#define ANY .limit = UINT32_MAX
#define MOST(value) .limit = (value)
#define COUNT(member) .count = offsetof(THIS, member)
#define WIDTH(member) .width = offsetof(THIS, member)
#define OF(id) .type = &id##_type
#define CALLER F(MESSAGE, "caller", caller, OF(caller))

/* TYPE(id, name in persia.proto, ...) after its fields. */
#define TYPE(id, text, ...)                                                   \
    static const wire_type id##_type = {                                      \
        .name = text,                                                         \
        .size = sizeof(wire_##id),                                            \
        .fields = id##_fields,                                                \
        .fields_n = sizeof id##_fields / sizeof id##_fields[0] - 1,           \
        ##__VA_ARGS__                                                         \
    };                                                                        \
    _Static_assert(sizeof id##_fields / sizeof id##_fields[0] - 1 <=          \
                       FIELDS_MAX, "a number is too high")

/* ---- parts of messages -------------------------------------------------- */

#define THIS wire_caller
static const wire_field caller_fields[] = {
    [1] = F(FIXED64, "client", client),
    [2] = F(U64, "incarnation", incarnation),
    [3] = F(FIXED64, "boot", boot),
    [4] = F(FIXED64, "lineage", lineage),
};
#undef THIS
TYPE(caller, "Caller");

#define THIS wire_ledger
static const wire_field ledger_fields[] = {
    [1] = F(FIXED64, "stream", stream),
    [2] = F(U64, "watermark", watermark),
    [3] = F(WORDS, "window", window, MOST(WIRE_WINDOW_WORDS)),
    [4] = F(U64, "skipped", skipped),
};
#undef THIS
TYPE(ledger, "Ledger");

#define THIS wire_table_spec
static const wire_field table_spec_fields[] = {
    [1] = F(NAME, "name", name, MOST(WIRE_NAME)),
    [2] = F(U64, "seed", seed),
    [3] = F(U32, "dim", dim, MOST(DIM_MAX)),
    [4] = F(U32, "dtype", dtype, MOST(VECTOR_DTYPES - 1)),
    [5] = F(U32, "optimizer", optimizer, MOST(OPTIM_KINDS - 1)),
    [6] = F(U32, "momentum", momentum, MOST(1)),
    [7] = F(U32, "init", init, MOST(INIT_CONSTANT)),
    [8] = F(FLOAT, "init_a", init_a),
    [9] = F(FLOAT, "init_b", init_b),
    [10] = F(FLOAT, "state_init", state_init),
    [11] = F(U32, "missing", missing, MOST(MISSING_ZEROS)),
    [12] = F(U32, "nonfinite", nonfinite, MOST(NONFINITE_SKIP)),
    [13] = F(U64, "capacity", capacity),
    [14] = F(U32, "full", full, MOST(FULL_EVICT_LRU)),
    [15] = F(FLOAT, "admission", admission),
};
#undef THIS
static int check_table_spec(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_table_spec *spec = m;
    (void)dtype;
    if (!spec->name[0])
        return at_refuse(at, 1, "is empty");
    if (!spec->dim)
        return at_refuse(at, 3, "is 0, 1 to %u allowed", DIM_MAX);
    return PERSIA_OK;
}
TYPE(table_spec, "TableSpec", .check = check_table_spec);

#define THIS wire_pull_table
static const wire_field pull_table_fields[] = {
    [1] = F(U32, "no", no, MOST(WIRE_TABLES_MAX - 1)),
    [2] = F(BULK, "ids", ids, COUNT(n), .item = 8),
};
#undef THIS
TYPE(pull_table, "PullTable", .leader = 2);

/* FP16 has scales, the others have none. */
static int check_scales(const wire_at *at, uint32_t no, const wire_values *v,
                        uint32_t dtype)
{
    if (v->scales && dtype != WIRE_FP16)
        return at_refuse(at, no, "only fp16 has scales");
    if (!v->scales && dtype == WIRE_FP16 && v->n)
        return at_refuse(at, no, "fp16 needs a scale for each of %zu rows",
                         v->n);
    return PERSIA_OK;
}

#define THIS wire_values
static const wire_field values_fields[] = {
    [1] = F(U32, "no", no, MOST(WIRE_TABLES_MAX - 1)),
    [2] = F(U32, "dim", dim, MOST(DIM_MAX)),
    [3] = F(BULK, "values", values, COUNT(n), WIDTH(dim)),
    [4] = F(BULK, "scales", scales, COUNT(n), .item = 4),
    [5] = F(BULK, "rows", rows, COUNT(n), .item = 4),
};
#undef THIS
static int check_values(const wire_at *at, const void *m, uint32_t dtype)
{
    return check_scales(at, 4, m, dtype);
}
TYPE(values, "Values", .leader = 3, .check = check_values);

#define THIS wire_hyper
static const wire_field hyper_fields[] = {
    [1] = F(U32, "kind", kind, MOST(OPTIM_KINDS - 1)),
    [2] = F(FLOAT, "lr", lr),
    [3] = F(FLOAT, "eps", eps),
    [4] = F(FLOAT, "beta1", beta1),
    [5] = F(FLOAT, "beta2", beta2),
    [6] = F(FLOAT, "momentum", momentum),
    [7] = F(FLOAT, "weight_decay", weight_decay),
    [8] = F(FLOAT, "max_grad_norm", max_grad_norm),
    [9] = F(FLOAT, "max_norm", max_norm),
    [10] = F(FLOAT, "weight_bound", weight_bound),
    [11] = F(FLOAT, "grad_scale", grad_scale),
};
#undef THIS
TYPE(hyper, "Hyper");

#define THIS wire_push_table
static const wire_field push_table_fields[] = {
    [1] = F(U32, "no", grads.no, MOST(WIRE_TABLES_MAX - 1)),
    [2] = F(U32, "dim", grads.dim, MOST(DIM_MAX)),
    [3] = F(BULK, "ids", ids, COUNT(grads.n), .item = 8),
    [4] = F(BULK, "values", grads.values, COUNT(grads.n), WIDTH(grads.dim)),
    [5] = F(BULK, "scales", grads.scales, COUNT(grads.n), .item = 4),
    [6] = F(BULK, "rows", grads.rows, COUNT(grads.n), .item = 4),
    [7] = F(MESSAGE, "hyper", hyper, OF(hyper)),
};
#undef THIS
static int check_push_table(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_values *v = &((const wire_push_table *)m)->grads;
    if (v->n && !v->values)
        return at_refuse(at, 4, "no gradients for %zu ids", v->n);
    return check_scales(at, 5, v, dtype);
}
TYPE(push_table, "PushTable", .leader = 3, .check = check_push_table);

#define THIS wire_file
static const wire_field file_fields[] = {
    [1] = F(U32, "no", no, MOST(WIRE_TABLES_MAX - 1)),
    [2] = F(NAME, "name", name, MOST(WIRE_NAME)),
    [3] = F(U64, "rows", rows),
    [4] = F(U64, "bytes", bytes),
    [5] = F(U32, "crc", crc, ANY),
};
#undef THIS
TYPE(file, "File");

#define THIS wire_table_stats
static const wire_field table_stats_fields[] = {
    [1] = F(U64, "rows", rows),
    [2] = F(U64, "bytes", bytes),
    [3] = F(U64, "row_bytes", row_bytes),
    [4] = F(U64, "pushes", pushes),
    [5] = F(U64, "pulled", pulled),
    [6] = F(U64, "missed", missed),
    [7] = F(U64, "created", created),
    [8] = F(U64, "evicted", evicted),
    [9] = F(U64, "refused", refused),
    [10] = F(U64, "nonfinite", nonfinite),
};
#undef THIS
TYPE(table_stats, "TableStats");

#define TABLES(id) COUNT(tables_n), MOST(WIRE_TABLES_MAX), OF(id)

/* ---- hello and declare -------------------------------------------------- */

#define THIS wire_hello
static const wire_field hello_fields[] = {
    [1] = CALLER,
    [2] = F(U32, "version", version, ANY),
    [3] = F(NAME, "namespace", name_space, MOST(WIRE_NAME)),
    [4] = F(NAME, "role", role, MOST(sizeof((THIS *)0)->role)),
    [5] = F(U32, "rank", rank, ANY),
    [6] = F(U32, "world", world, ANY),
    [7] = F(FIXED64, "stream", stream),
};
#undef THIS
static int check_hello(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_hello *h = m;
    (void)dtype;
    if (h->rank && h->rank >= h->world)
        return at_refuse(at, 5, "is %u of a world of %u", h->rank, h->world);
    return PERSIA_OK;
}
TYPE(hello, "HelloRequest", .check = check_hello);

#define THIS wire_hello_reply
static const wire_field hello_reply_fields[] = {
    [1] = F(U32, "version", version, ANY),
    [2] = F(NAME, "namespace", name_space, MOST(WIRE_NAME)),
    [3] = F(U32, "shard", shard, ANY),
    [4] = F(U32, "shards", shards, ANY),
    [5] = F(FIXED64, "boot", boot),
    [6] = F(FIXED64, "lineage", lineage),
    [7] = F(U64, "updates", updates),
    [8] = F(U64, "message_limit", message_limit),
    [9] = F(MESSAGE, "ledger", ledger, OF(ledger)),
    [10] = F(MESSAGES, "tables", tables, TABLES(table_spec)),
};
#undef THIS
static int check_hello_reply(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_hello_reply *h = m;
    (void)dtype;
    if (h->shard >= h->shards)
        return at_refuse(at, 3, "is %u of %u", h->shard, h->shards);
    return PERSIA_OK;
}
TYPE(hello_reply, "HelloReply", .check = check_hello_reply);

#define THIS wire_declare
static const wire_field declare_fields[] = {
    [1] = CALLER,
    [2] = F(MESSAGE, "table", table, OF(table_spec)),
};
#undef THIS
TYPE(declare, "DeclareRequest");

#define THIS wire_declare_reply
static const wire_field declare_reply_fields[] = {
    [1] = F(U32, "no", no, MOST(WIRE_TABLES_MAX - 1)),
    [2] = F(U32, "created", created, MOST(1)),
};
#undef THIS
TYPE(declare_reply, "DeclareReply");

/* ---- pull and push ------------------------------------------------------ */

#define THIS wire_pull
static const wire_field pull_fields[] = {
    [1] = CALLER,
    [2] = F(U32, "dtype", dtype, MOST(WIRE_DTYPES - 1)),
    [3] = F(U32, "want_rows", want_rows, MOST(1)),
    [4] = F(U64, "after", after),
    [5] = F(MESSAGES, "tables", tables, TABLES(pull_table)),
    [6] = F(FIXED64, "stream", stream),
};
#undef THIS
TYPE(pull, "PullRequest");

#define THIS wire_pull_reply
static const wire_field pull_reply_fields[] = {
    [1] = F(U32, "dtype", dtype, MOST(WIRE_DTYPES - 1)),
    [2] = F(MESSAGES, "tables", tables, TABLES(values)),
};
#undef THIS
TYPE(pull_reply, "PullReply", .dtype = 1);

#define THIS wire_push
static const wire_field push_fields[] = {
    [1] = CALLER,
    [2] = F(FIXED64, "stream", stream),
    [3] = F(U64, "number", number),
    [4] = F(U64, "settled", settled),
    [5] = F(U64, "step", step),
    [6] = F(U32, "part", part, MOST(PARTS_MAX - 1)),
    [7] = F(U32, "parts", parts, MOST(PARTS_MAX), .unset = 1),
    [8] = F(U32, "dtype", dtype, MOST(WIRE_DTYPES - 1)),
    [9] = F(MESSAGES, "tables", tables, TABLES(push_table)),
};
#undef THIS
static int check_push(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_push *p = m;
    (void)dtype;
    if (!p->stream)
        return at_refuse(at, 2, "is 0, which is no stream");
    if (!p->number)
        return at_refuse(at, 3, "is 0, numbers begin at 1");
    if (p->settled >= p->number)
        return at_refuse(at, 4, "is %llu, it must be below the number %llu",
                         (unsigned long long)p->settled,
                         (unsigned long long)p->number);
    if (p->part >= p->parts)
        return at_refuse(at, 6, "is %u of %u", p->part, p->parts);
    if (p->parts > 1 && !p->step)
        return at_refuse(at, 5, "is 0, but %u parts belong to a step, from 1",
                         p->parts);
    return PERSIA_OK;
}
TYPE(push, "PushRequest", .dtype = 8, .check = check_push);

#define LEFT F(NUMBERS, "left", left, COUNT(left_n), MOST(PARTS_MAX))

#define THIS wire_push_reply
static const wire_field push_reply_fields[] = {
    [1] = F(U32, "status", status, MOST(PUSH_STATUSES - 1)),
    [2] = F(U64, "created", created),
    [3] = F(U64, "refused", refused),
    [4] = F(U64, "evicted", evicted),
    [5] = F(U64, "nonfinite", nonfinite),
    [6] = F(U64, "touched", touched),
    [7] = F(U64, "updates", updates),
    [8] = LEFT,
};
#undef THIS
TYPE(push_reply, "PushReply");

#define THIS wire_leave
static const wire_field leave_fields[] = {
    [1] = CALLER,
    [2] = F(U32, "rank", rank, MOST(PARTS_MAX - 1)),
    [3] = F(U32, "world", world, MOST(PARTS_MAX)),
    [4] = F(U32, "joins", joins, MOST(1)),
    [5] = F(U64, "step", step),
    [6] = LEFT,
    [7] = F(U32, "move", move, MOST(UINT32_MAX)),
};
#undef THIS
static int check_leave(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_leave *l = m;
    (void)dtype;
    if (l->rank >= l->world)
        return at_refuse(at, 2, "is %u of a world of %u", l->rank, l->world);
    return PERSIA_OK;
}
TYPE(leave, "LeaveRequest", .check = check_leave);

#define THIS wire_leave_reply
static const wire_field leave_reply_fields[] = {
    [1] = F(U64, "step", step),
};
#undef THIS
TYPE(leave_reply, "LeaveReply");

/* ---- administration ----------------------------------------------------- */

#define THIS wire_rows
static const wire_field rows_fields[] = {
    [1] = CALLER,
    [2] = F(U32, "no", no, MOST(WIRE_TABLES_MAX - 1)),
    [3] = F(BULK, "ids", ids, COUNT(n), .item = 8),
    [4] = F(U32, "dim", dim, MOST(DIM_MAX)),
    [5] = F(U32, "state_floats", state_floats, MOST(STATE_MAX)),
    [6] = F(BULK, "vectors", vectors, COUNT(n), WIDTH(dim), .item = 4),
    [7] = F(BULK, "state", state, COUNT(n), WIDTH(state_floats), .item = 4),
    [8] = F(BULK, "found", found, COUNT(n), .item = 1),
    [9] = F(U32, "clear", clear, MOST(1)),
    [10] = F(U32, "list", list, ANY),
    [11] = F(U64, "cursor", cursor),
};
#undef THIS
TYPE(rows, "Rows", .leader = 3);

#define PUSHES F(NUMBERS, "pushes", pushes, COUNT(pushes_n),                  \
                 MOST(WIRE_TABLES_MAX))
#define LEDGERS F(MESSAGES, "ledgers", ledgers, COUNT(ledgers_n),             \
                  MOST(LEDGERS_MAX), OF(ledger))
#define FILES F(MESSAGES, "files", files, COUNT(files_n), MOST(FILES_MAX),    \
                OF(file))
#define ROOT F(NAME, "root", root, MOST(WIRE_NAME))
#define FOLDER F(NAME, "folder", folder, MOST(WIRE_NAME))
#define PROOF F(NAME, "proof", proof, MOST(sizeof((THIS *)0)->proof))

#define THIS wire_snapshot
static const wire_field snapshot_fields[] = {
    [1] = CALLER,
    [2] = F(U32, "verb", verb, MOST(SNAPSHOT_END)),
    [3] = ROOT,
    [4] = FOLDER,
    [5] = PROOF,
};
#undef THIS
TYPE(snapshot, "SnapshotRequest");

#define THIS wire_snapshot_reply
static const wire_field snapshot_reply_fields[] = {
    [1] = F(U32, "done", done, MOST(1)),
    [2] = F(U64, "updates", updates),
    [3] = F(U64, "step", step),
    [4] = PUSHES,
    [5] = LEDGERS,
    [6] = FILES,
    [7] = F(U64, "rows_written", rows_written),
};
#undef THIS
TYPE(snapshot_reply, "SnapshotReply");

#define THIS wire_restore
static const wire_field restore_fields[] = {
    [1] = CALLER,
    [2] = F(U32, "verb", verb, MOST(RESTORE_ABORT)),
    [3] = ROOT,
    [4] = FOLDER,
    [5] = PROOF,
    [6] = F(FIXED64, "lineage", lineage),
    [7] = F(U64, "updates", updates),
    [8] = F(U64, "step", step),
    [9] = PUSHES,
    [10] = LEDGERS,
    [11] = FILES,
};
#undef THIS
TYPE(restore, "RestoreRequest");

#define THIS wire_restore_reply
static const wire_field restore_reply_fields[] = {
    [1] = F(U32, "done", done, MOST(1)),
    [2] = F(U64, "rows", rows),
};
#undef THIS
TYPE(restore_reply, "RestoreReply");

#define THIS wire_stats
static const wire_field stats_fields[] = {
    [1] = CALLER,
};
#undef THIS
TYPE(stats, "StatsRequest");

#define THIS wire_stats_reply
static const wire_field stats_reply_fields[] = {
    [1] = F(FIXED64, "boot", boot),
    [2] = F(FIXED64, "lineage", lineage),
    [3] = F(U64, "updates", updates),
    [4] = F(U64, "step", step),
    [5] = F(U64, "uptime_ns", uptime_ns),
    [6] = F(U64, "memory_used", memory_used),
    [7] = F(U64, "memory_limit", memory_limit),
    [8] = F(U64, "pulls", pulls),
    [9] = F(U64, "pushes", pushes),
    [10] = F(U64, "duplicates", duplicates),
    [11] = F(U64, "parked", parked),
    [12] = F(U64, "failed", failed),
    [13] = F(MESSAGES, "tables", tables, TABLES(table_spec)),
    [14] = F(MESSAGES, "stats", stats, TABLES(table_stats)),
};
#undef THIS
TYPE(stats_reply, "StatsReply");

/* ---- encode and decode -------------------------------------------------- */

#define WIRE_DEFINE(id)                                                       \
    int wire_put_##id(wire_out *o, const wire_##id *m)                        \
    {                                                                         \
        return message_put(o, &id##_type, m);                                 \
    }                                                                         \
    int wire_get_##id(const void *data, size_t n, wire_memory *memory,        \
                      wire_##id *out)                                         \
    {                                                                         \
        return message_get(data, n, memory, &id##_type, out);                 \
    }
WIRE_MESSAGES(WIRE_DEFINE)
