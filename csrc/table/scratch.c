#include "table/stripe.h"

#include <stdlib.h>

/* The buffers of a thread; freed when it ends. */
typedef struct scratch {
    mem_buffer buffer[SCRATCH_KINDS];
} scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static int scratch_key_error;

static void scratch_free(void *p)
{
    scratch *s = p;

    for (int i = 0; i < SCRATCH_KINDS; i++)
        persia_mem_buffer_free(&s->buffer[i]);
    free(s);
}

static void scratch_key_create(void)
{
    scratch_key_error = pthread_key_create(&scratch_key, scratch_free);
}

int scratch_need(enum scratch_kind which, size_t bytes, void **out)
{
    scratch *s;
    int rc;

    pthread_once(&scratch_once, scratch_key_create);
    if (scratch_key_error)
        return persia_err_set(PERSIA_ENOMEM, "no thread-specific key is left");
    s = pthread_getspecific(scratch_key);
    if (!s) {
        s = calloc(1, sizeof *s);
        if (!s || pthread_setspecific(scratch_key, s)) {
            free(s);
            return persia_err_set(PERSIA_ENOMEM, "out of memory: scratch of a "
                                                 "thread");
        }
    }
    rc = persia_mem_buffer_need(&s->buffer[which], bytes ? bytes : 1);
    if (!rc)
        *out = s->buffer[which].data;
    return rc;
}
