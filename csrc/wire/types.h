/* types.h: what the messages of persia.proto are made of, as tables of data
 * by which put.c writes and get.c reads them; private to wire.
 */
#ifndef PERSIA_WIRE_TYPES_H
#define PERSIA_WIRE_TYPES_H

#include "wire/wire.h"

enum wire_kind {
    KIND_NONE,     /* a number that is not used */
    KIND_U32,      /* varint: uint32, bool, enum */
    KIND_U64,      /* varint */
    KIND_FIXED64,  /* uint64_t of random bits */
    KIND_FLOAT,    /* must be finite */
    KIND_NAME,     /* char[limit], UTF-8 */
    KIND_WORDS,    /* bytes: uint64_t[limit]; 0 at the end is left out */
    KIND_BULK,     /* bytes: pointer, see count */
    KIND_NUMBERS,  /* repeated uint64: pointer and count */
    KIND_MESSAGE,  /* embedded; its fields are none of the repeated kinds */
    KIND_MESSAGES, /* repeated: pointer and count */
};

/* How protobuf writes a field. */
enum wire_coding {
    CODING_VARINT,
    CODING_64,
    CODING_BYTES, /* a length, then as many bytes */
    CODING_GROUP, /* both skipped: no field of ours is a group */
    CODING_GROUP_END,
    CODING_32,
};

enum { FIELD_PAD = 15 };

typedef struct wire_type wire_type;

typedef struct wire_field {
    const char *name;
    enum wire_kind kind;
    uint32_t limit;  /* U32: largest value; NAME: bytes with the 0; WORDS;
                        NUMBERS, MESSAGES: most elements */
    uint32_t unset;  /* U32: what 0 stands for */
    size_t offset;   /* of the member */
    size_t count;    /* NUMBERS, MESSAGES, BULK: offset of its size_t */
    size_t width;    /* BULK: offset of the uint32_t that tells how many items
                        an element has; 0: one */
    uint32_t item;   /* BULK: bytes of an item; 0: by the message's dtype */
    const wire_type *type; /* MESSAGE, MESSAGES */
} wire_field;

/* Where an error is: a message within its parents. */
typedef struct wire_at {
    const struct wire_at *up;
    const wire_type *type;
    uint32_t field; /* of the parent */
    size_t index;   /* of the element, if the field is repeated */
    int code;       /* of the errors: PERSIA_EARG, PERSIA_EPROTOCOL */
} wire_at;

struct wire_type {
    const char *name;
    size_t size;              /* of the struct */
    const wire_field *fields; /* by number, [0] is not used */
    uint32_t fields_n;        /* highest number */
    uint32_t dtype;  /* field by which values below are measured; 0: none */
    uint32_t leader; /* BULK field whose length tells the count of all bulk
                        fields; 0: the message has none */
    /* What no single field can tell, or NULL. */
    int (*check)(const wire_at *at, const void *m, uint32_t dtype);
};

/* The fields of messages.c. */
#define F(of, member, K, text, ...)                                           \
    { .kind = KIND_##K, .name = text, .offset = offsetof(of, member),         \
      ##__VA_ARGS__ }
#define COUNT(of, member) .count = offsetof(of, member)
#define WIDTH(of, member) .width = offsetof(of, member)

/* The checks of types.c. */
#define WIRE_CHECK(id)                                                        \
    int at_check_##id(const wire_at *at, const void *m, uint32_t dtype);
WIRE_CHECKED(WIRE_CHECK)
#undef WIRE_CHECK

/* The field of a number, or NULL if there is none. */
const wire_field *type_field(const wire_type *t, uint64_t no);

/* The number of a field that is there. */
uint32_t type_number(const wire_type *t, const char *name);

/* Sets an error that names message and field; no = 0: the message. */
int at_refuse(const wire_at *at, uint64_t no, const char *format, ...)
    __attribute__((format(printf, 3, 4), cold));
/* UTF-8 without 0, below the field's bytes. */
int at_check_name(const wire_at *at, uint32_t no, const char *text,
                  size_t bytes);
/* Bytes of one element of a bulk field. */
size_t bulk_item(const wire_field *f, const void *m, uint32_t dtype);

int message_put(wire_out *o, const wire_type *t, const void *m);
int message_get(const void *data, size_t n, wire_memory *memory,
                const wire_type *t, void *out);

#endif
