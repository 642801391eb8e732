/* Messages made of arbitrary bytes, the first of which tells their type:
 * they are refused with an error, or what they mean can be written and read
 * again without loss.  Writing reads each byte that a message promises.
 *
 * With PAIR in the first byte there are two messages of the type: the next two
 * bytes are the length of the first.  Each is read alone, then both into one
 * struct, as parts of one message. */
#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct message {
    const char *name;
    size_t size;
    int (*put)(wire_out *o, const void *m);
    int (*get)(const void *data, size_t n, wire_memory *memory, void *out);
} message;

#define MESSAGE(id)                                                           \
    static int put_##id(wire_out *o, const void *m)                           \
    {                                                                         \
        return persia_wire_put_##id(o, m);                                    \
    }                                                                         \
    static int get_##id(const void *data, size_t n, wire_memory *memory,      \
                        void *out)                                            \
    {                                                                         \
        return persia_wire_get_##id(data, n, memory, out);                    \
    }
WIRE_MESSAGES(MESSAGE)
#undef MESSAGE
#define MESSAGE(id) { #id, sizeof(wire_##id), put_##id, get_##id },
static const message messages[] = { WIRE_MESSAGES(MESSAGE) };
#undef MESSAGE
enum { MESSAGES_N = sizeof messages / sizeof messages[0], PAIR = 128 };

/* Reads the n bytes at data and writes what they mean to a block of *bytes,
 * which the caller frees; NULL if they are refused. */
static unsigned char *rewrite(const message *type, const void *data, size_t n,
                              size_t *bytes)
{
    unsigned char *written = NULL;
    void *m = malloc(type->size);
    wire_memory memory;
    wire_out out;
    persia_wire_memory_init(&memory);
    persia_wire_out_init(&out);
    int code = m ? type->get(data, n, &memory, m) : PERSIA_ENOMEM;
    if (code == PERSIA_OK) {
        if (type->put(&out, m))
            abort();
        *bytes = out.bytes;
        written = aligned_alloc(64, (out.bytes + 64) & ~(size_t)63);
        if (!written)
            abort();
        persia_wire_out_copy(&out, written);
    } else if (code != PERSIA_EPROTOCOL ||
               !strstr(persia_err_text(), "message ")) {
        abort();
    }
    persia_wire_out_free(&out);
    persia_wire_memory_free(&memory);
    free(m);
    return written;
}

/* Whether the message is accepted. */
static int check(const message *type, const uint8_t *data, size_t n)
{
    size_t once_n, again_n;
    unsigned char *once = rewrite(type, data, n, &once_n);
    if (!once)
        return 0;
    unsigned char *again = rewrite(type, once, once_n, &again_n);
    if (!again || once_n != again_n || memcmp(once, again, once_n))
        abort();
    free(again);
    free(once);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    const message *type = &messages[data[0] % PAIR % MESSAGES_N];
    if (data[0] < PAIR) {
        (void)check(type, data + 1, size - 1);
        return 0;
    }
    if (size < 3)
        return 0;
    const size_t both = size - 3, n = data[1] | (size_t)data[2] << 8;
    if (n <= both && check(type, data + 3, n) &&
        check(type, data + 3 + n, both - n))
        (void)check(type, data + 3, both);
    return 0;
}
