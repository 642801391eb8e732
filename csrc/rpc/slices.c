/* slices.c: messages to gRPC without copies, and from gRPC with one. */
#include "rpc/core.h"

#include <grpc/compression.h>
#include <limits.h>
#include <stdlib.h>

/* Up to here a copy costs less than a slice that points, bytes. */
enum { POINT_FROM = 512, SLICES_ON_STACK = 32 };

/* Received messages from here on, in bytes, are joined by several threads. */
enum { JOIN_TOGETHER = 1 << 20, JOIN_PARTS = 32 };

/* Called by gRPC, on any thread, maybe with its locks held. */
static void slices_span_released(void *arg)
{
    rpc_sent *s = arg;
    if (atomic_fetch_sub_explicit(&s->users, 1, memory_order_acq_rel) == 1)
        runtime_end_sent(s);
}

int sent_start(rpc_sent *s, wire_out *o, void (*ended)(rpc_sent *sent),
               grpc_byte_buffer **out)
{
    grpc_slice some[SLICES_ON_STACK], *slices = some;
    *out = NULL;
    s->out = *o;
    persia_wire_out_init(o);
    s->ended = ended;
    size_t n = s->out.spans_n, pointed = 0;
    if (n > SLICES_ON_STACK && !(slices = malloc(n * sizeof *slices))) {
        persia_wire_out_free(&s->out);
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a message of %zu pieces", n);
    }
    for (size_t i = 0; i < n; i++)
        pointed += s->out.spans[i].n >= POINT_FROM;
    atomic_init(&s->users, 1 + pointed);
    for (size_t i = 0; i < n; i++) {
        wire_span span = s->out.spans[i];
        if (span.n < POINT_FROM)
            slices[i] = grpc_slice_from_copied_buffer(span.data, span.n);
        else
            slices[i] = grpc_slice_new_with_user_data(
                (void *)(uintptr_t)span.data, span.n, slices_span_released, s);
    }
    *out = grpc_raw_byte_buffer_create(slices, n);
    for (size_t i = 0; i < n; i++)
        grpc_slice_unref(slices[i]);
    if (slices != some)
        free(slices);
    return PERSIA_OK;
}

void sent_drop(rpc_sent *s)
{
    if (atomic_fetch_sub_explicit(&s->users, 1, memory_order_acq_rel) == 1)
        s->ended(s);
}

typedef struct joining {
    const grpc_slice_buffer *from;
    char *to;
    size_t slices; /* of a part */
} joining;

static int slices_join_part(void *ctx, size_t part)
{
    const joining *j = ctx;
    size_t first = part * j->slices, end = first + j->slices, at = 0;
    for (size_t i = 0; i < end && i < j->from->count; i++) {
        if (i >= first)
            slice_copy(j->to + at, j->from->slices[i]);
        at += GRPC_SLICE_LENGTH(j->from->slices[i]);
    }
    return PERSIA_OK;
}

int received_join(grpc_byte_buffer *b, sched *s, void **data, size_t *n)
{
    *data = NULL;
    *n = grpc_byte_buffer_length(b);
    /* Both sides say that they take no compressed messages: few bytes must
     * not become many. */
    if (b->type != GRPC_BB_RAW ||
        b->data.raw.compression != GRPC_COMPRESS_NONE)
        return persia_err_set(PERSIA_EPROTOCOL,
                              "compressed messages are not taken");
    *data = bytes_take(*n);
    if (!*data)
        return PERSIA_ENOMEM;
    joining j = {&b->data.raw.slice_buffer, *data, 0};
    size_t count = j.from->count;
    int together = s && *n >= JOIN_TOGETHER;
    j.slices = together ? count / JOIN_PARTS + 1 : count;
    if (!together)
        return slices_join_part(&j, 0);
    return persia_sched_for(s, (count + j.slices - 1) / j.slices,
                            slices_join_part, &j);
}

/* ---- arguments ---- */

void args_integer(rpc_args *a, const char *key, int value)
{
    grpc_arg *arg = &a->list[a->n++];
    arg->type = GRPC_ARG_INTEGER;
    arg->key = (char *)(uintptr_t)key;
    arg->value.integer = value;
}

void args_string(rpc_args *a, const char *key, const char *value)
{
    grpc_arg *arg = &a->list[a->n++];
    arg->type = GRPC_ARG_STRING;
    arg->key = (char *)(uintptr_t)key;
    arg->value.string = (char *)(uintptr_t)value;
}

void args_messages(rpc_args *a, uint64_t limit)
{
    args_integer(a, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
                 limit > INT_MAX ? INT_MAX : (int)limit);
    args_integer(a, GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1);
    /* 16 KiB by default: hundreds of frames a message.  Small calls of the
     * same connection still pass between frames of this size. */
    args_integer(a, GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
    args_integer(a, GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                 1 << GRPC_COMPRESS_NONE);
    args_integer(a, GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
}
