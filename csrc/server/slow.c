#include "server/slow.h"

void slow_init(slow_calls *s, uint64_t over_ns)
{
    *s = (slow_calls){.over_ns = over_ns};
    pthread_mutex_init(&s->lock, NULL);
}

void slow_free(slow_calls *s)
{
    pthread_mutex_destroy(&s->lock);
}

void slow_note(slow_calls *s, const wire_slow_call *call)
{
    pthread_mutex_lock(&s->lock);
    s->of[s->n++ % WIRE_SLOW_MAX] = *call;
    pthread_mutex_unlock(&s->lock);
}

int slow_list(slow_calls *s, wire_memory *memory, wire_slow_call **out,
              size_t *n)
{
    *out = persia_wire_memory_take(memory, sizeof s->of);
    if (!*out)
        return PERSIA_ENOMEM;
    pthread_mutex_lock(&s->lock);
    *n = s->n < WIRE_SLOW_MAX ? (size_t)s->n : WIRE_SLOW_MAX;
    for (size_t i = 0; i < *n; i++)
        (*out)[i] = s->of[(s->n - 1 - i) % WIRE_SLOW_MAX];
    pthread_mutex_unlock(&s->lock);
    return PERSIA_OK;
}
