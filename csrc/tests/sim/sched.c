/* sched.c: the baton, time, locks and signals; see sim.h. */
#include "tests/sim/sim.h"

#include "base/base.h"
#include "base/system.h"

#include <assert.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    NAME = 16,
    NET_THREADS = 3,         /* of a node, that take what arrives */
    STACK_BYTES = 1 << 20,
    STEPS_MAX = 4000000      /* beyond, a history runs for ever */
};

enum state {
    RUNNABLE,
    WAITING, /* for sim_wake(on), a signal of the condition `on`, or `until` */
    ENDED
};

typedef struct thread {
    struct thread *next;
    sim_node *node;
    int number;
    char name[NAME];
    enum state state;
    const void *on;
    const char *why;   /* for texts */
    uint64_t until;
    int timed_out;
    int statics;       /* locks that all nodes share, held by this thread */
    int baton;         /* a futex: 1: run */
    void *(*run)(void *arg);
    void *arg;
} thread;

typedef struct post {
    struct post *next;
    void (*run)(void *ctx);
    void *ctx;
} post;

struct sim_node {
    char name[NAME];
    int slot, dead;
    uint64_t paused_until, paused;
    post *first, **last; /* what has arrived */
    int takers, idle;    /* threads for that */
};

typedef struct event {
    uint64_t at, number;
    void (*run)(void *ctx);
    void *ctx;
} event;

static struct {
    int on, show;
    uint64_t now, state, hash, steps;
    uint32_t yields, chances; /* of 1,000: at a lock; a waiter by chance */
    thread *threads, **last, *current;
    int threads_n;
    event *events; /* a heap: the first is the next */
    size_t events_n, events_room;
    uint64_t events_made;
    char bug[64];
} sim;

static _Thread_local thread *self;

/* ---- random numbers, trace ---- */

static uint64_t draw(void)
{
    uint64_t z = sim.state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

uint32_t sim_random(uint32_t n)
{
    return (uint32_t)(((draw() >> 32) * n) >> 32);
}

int sim_chance(uint32_t of)
{
    return of && sim_random(1000) < of;
}

uint64_t sim_between(uint64_t least, uint64_t most)
{
    int bits = 0;
    while (most - least > (uint64_t)1 << bits && bits < 62)
        bits++;
    uint64_t room = (uint64_t)1 << sim_random((uint32_t)bits + 1);
    if (room > most - least)
        room = most - least;
    return least + (room ? draw() % (room + 1) : 0);
}

static void mix(uint64_t value)
{
    sim.hash = (sim.hash ^ value) * 0x100000001B3u;
    sim.hash ^= sim.hash >> 29;
}

void sim_say(const char *format, ...)
{
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    for (const char *c = line; *c; c++)
        mix((unsigned char)*c);
    if (sim.show)
        printf("%11.6f %-8s %s\n", (double)sim.now / 1e9,
               self ? self->node->name : "", line);
}

void sim_fail(const char *format, ...)
{
    va_list args;
    printf("%11.6f %-8s FAULT: ", (double)sim.now / 1e9,
           self ? self->node->name : "");
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    fflush(stdout);
    _exit(1);
}

uint64_t sim_hash(void)
{
    return sim.hash;
}

uint64_t sim_steps(void)
{
    return sim.steps;
}

uint64_t sim_now(void)
{
    return sim.now;
}

/* ---- events ---- */

static int is_before(const event *a, const event *b)
{
    return a->at != b->at ? a->at < b->at : a->number < b->number;
}

void sim_at(uint64_t at, void (*run)(void *ctx), void *ctx)
{
    if (sim.events_n == sim.events_room) {
        sim.events_room = sim.events_room * 2 + 64;
        sim.events = realloc(sim.events,
                             sim.events_room * sizeof *sim.events);
        assert(sim.events);
    }
    size_t i = sim.events_n++;
    event e = {at, sim.events_made++, run, ctx};
    for (; i && is_before(&e, &sim.events[(i - 1) / 2]); i = (i - 1) / 2)
        sim.events[i] = sim.events[(i - 1) / 2];
    sim.events[i] = e;
}

static event take_event(void)
{
    event first = sim.events[0], e = sim.events[--sim.events_n];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child + 1 < sim.events_n &&
            is_before(&sim.events[child + 1], &sim.events[child]))
            child++;
        if (child >= sim.events_n || is_before(&e, &sim.events[child]))
            break;
        sim.events[i] = sim.events[child];
        i = child;
    }
    sim.events[i] = e;
    return first;
}

static void run_events(void)
{
    while (sim.events_n && sim.events[0].at <= sim.now) {
        event e = take_event();
        e.run(e.ctx);
    }
}

/* ---- the baton ---- */

static void futex(int *at, int op, int value)
{
    syscall(SYS_futex, at, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void give_baton(thread *t)
{
    __atomic_store_n(&t->baton, 1, __ATOMIC_RELEASE);
    futex(&t->baton, FUTEX_WAKE, 1);
}

static void await_baton(thread *t)
{
    while (!__atomic_load_n(&t->baton, __ATOMIC_ACQUIRE))
        futex(&t->baton, FUTEX_WAIT, 0);
    __atomic_store_n(&t->baton, 0, __ATOMIC_RELAXED);
}

static int may_run(const thread *t)
{
    return t->state != ENDED && !t->node->dead &&
           t->node->paused_until <= sim.now;
}

static _Noreturn void fail_stuck(void)
{
    printf("no thread can run any more:\n");
    for (thread *t = sim.threads; t; t = t->next)
        if (t->state != ENDED && !t->node->dead)
            printf("  %s %s waits: %s\n", t->node->name, t->name, t->why);
    sim_fail("a wait does not end");
}

/* Wakes those that have waited for this moment. */
static int wake_due(uint64_t *next)
{
    int n = 0;
    *next = sim.events_n ? sim.events[0].at : PERSIA_FOREVER;
    for (thread *t = sim.threads; t; t = t->next) {
        if (t->state == ENDED || t->node->dead)
            continue;
        uint64_t at = t->state == RUNNABLE ? 0 : t->until;
        if (at < t->node->paused_until)
            at = t->node->paused_until;
        if (at < *next)
            *next = at;
        if (t->state == WAITING && at <= sim.now) {
            t->state = RUNNABLE;
            t->timed_out = t->until <= sim.now;
        }
        n += may_run(t) && t->state == RUNNABLE;
    }
    return n;
}

static thread *choose(void)
{
    for (;;) {
        uint64_t next;
        run_events();
        int n = wake_due(&next);
        if (n) {
            int k = (int)sim_random((uint32_t)n);
            thread *t = sim.threads;
            while (!(may_run(t) && t->state == RUNNABLE && k-- == 0))
                t = t->next;
            return t;
        }
        if (next == PERSIA_FOREVER)
            fail_stuck();
        if (next > sim.now)
            sim.now = next;
    }
}

/* Another thread may run, and this one again if it is RUNNABLE. */
static void pass_baton(void)
{
    thread *me = self;
    if (++sim.steps > STEPS_MAX)
        sim_fail("the history does not end");
    sim.now += 1000 + sim_random(20000);
    thread *t = choose();
    mix((uint64_t)t->number);
    if (t == me)
        return;
    sim.current = t;
    give_baton(t);
    await_baton(me);
}

static int wait_for(const void *on, uint64_t until, const char *why)
{
    self->on = on;
    self->until = until;
    self->why = why;
    self->timed_out = 0;
    self->state = WAITING;
    if (sim_chance(sim.chances)) /* by chance, or a little later */
        self->state = RUNNABLE;
    pass_baton();
    self->on = NULL;
    self->until = 0;
    return self->timed_out;
}

int sim_wait(const void *on, uint64_t until)
{
    return wait_for(on, until, "for an event");
}

void sim_wake(const void *on)
{
    for (thread *t = sim.threads; t; t = t->next)
        if (t->state == WAITING && t->on == on)
            t->state = RUNNABLE;
}

static void wake_one(const void *on)
{
    uint32_t n = 0;
    for (thread *t = sim.threads; t; t = t->next)
        n += t->state == WAITING && t->on == on && !t->node->dead;
    if (!n)
        return;
    uint32_t k = sim_random(n);
    for (thread *t = sim.threads; t; t = t->next)
        if (t->state == WAITING && t->on == on && !t->node->dead && !k--)
            t->state = RUNNABLE;
}

void sim_sleep(uint64_t ns)
{
    const uint64_t until = sim.now + ns;
    while (sim.now < until)
        wait_for(NULL, until, "for some time");
}

/* ---- threads ---- */

static void *thread_main(void *arg)
{
    thread *t = self = arg;
    await_baton(t);
    t->run(t->arg);
    t->state = ENDED;
    sim_wake(t);
    /* It stays: what glibc does at its end would run beside others. */
    pass_baton();
    abort();
}

static thread *thread_add(sim_node *node, const char *name)
{
    thread *t = calloc(1, sizeof *t);
    assert(t);
    t->node = node;
    t->number = sim.threads_n++;
    snprintf(t->name, sizeof t->name, "%s", name);
    *sim.last = t;
    sim.last = &t->next;
    return t;
}

static thread *thread_make(sim_node *node, void *(*run)(void *arg), void *arg,
                           const char *name)
{
    pthread_attr_t attr;
    pthread_t id;
    thread *t = thread_add(node, name);
    t->run = run;
    t->arg = arg;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    if (pthread_create(&id, &attr, thread_main, t))
        sim_fail("the machine starts no thread");
    pthread_attr_destroy(&attr);
    return t;
}

void sim_spawn(sim_node *n, void *(*run)(void *arg), void *arg,
               const char *name)
{
    (void)thread_make(n, run, arg, name);
}

/* ---- nodes ---- */

sim_node *sim_node_make(const char *name, int slot)
{
    sim_node *n = calloc(1, sizeof *n);
    assert(n);
    snprintf(n->name, sizeof n->name, "%s", name);
    n->slot = slot;
    n->last = &n->first;
    return n;
}

const char *sim_node_name(const sim_node *n)
{
    return n->name;
}

int sim_node_slot(const sim_node *n)
{
    return n->slot;
}

int sim_node_alive(const sim_node *n)
{
    return !n->dead;
}

sim_node *sim_node_self(void)
{
    return self->node;
}

static int holds_statics(const sim_node *n)
{
    int held = 0;
    for (thread *t = sim.threads; t; t = t->next)
        held += t->node == n && t->statics;
    return held;
}

void sim_kill(sim_node *n)
{
    n->paused_until = 0;
    while (holds_statics(n)) /* what other nodes have of their own */
        wait_for(NULL, sim.now, "for a moment to kill");
    n->dead = 1;
}

void sim_pause(sim_node *n, uint64_t until)
{
    if (until <= n->paused_until)
        return;
    n->paused += until - (n->paused_until > sim.now ? n->paused_until
                                                    : sim.now);
    n->paused_until = until;
}

uint64_t sim_paused(const sim_node *n)
{
    return n->paused;
}

static void *taker_main(void *arg)
{
    sim_node *n = arg;
    for (;;) {
        while (!n->first) {
            n->idle++;
            wait_for(n, PERSIA_FOREVER, "for what arrives");
            n->idle--;
        }
        post *p = n->first;
        n->first = p->next;
        if (!n->first)
            n->last = &n->first;
        p->run(p->ctx);
        free(p);
    }
    return NULL;
}

void sim_post(sim_node *n, void (*run)(void *ctx), void *ctx)
{
    post *p = malloc(sizeof *p);
    assert(p);
    *p = (post){.run = run, .ctx = ctx};
    *n->last = p;
    n->last = &p->next;
    if (n->takers < NET_THREADS && !n->idle && !n->dead) {
        n->takers++;
        (void)thread_make(n, taker_main, n, "net");
    }
    sim_wake(n);
}

/* ---- the library's system ---- */

static void lock_mutex(pthread_mutex_t *m);
int __real_pthread_mutex_unlock(pthread_mutex_t *m);

static uint64_t system_now(void *ctx)
{
    (void)ctx;
    sim.now += 100; /* loops that watch the clock end */
    return sim.now;
}

static uint64_t system_seconds(void *ctx)
{
    (void)ctx;
    return 1700000000 + sim.now / SIM_S;
}

static int is_static(const void *lock)
{
    extern char __data_start, _end;
    return (const char *)lock >= &__data_start && (const char *)lock < &_end;
}

static int system_wait(void *ctx, pthread_cond_t *c, pthread_mutex_t *lock,
                       uint64_t until)
{
    (void)ctx;
    __real_pthread_mutex_unlock(lock);
    self->statics -= is_static(lock);
    sim_wake(lock);
    int late = wait_for(c, until, "for a signal");
    lock_mutex(lock);
    return late;
}

static int system_start(void *ctx, pthread_t *out, void *(*run)(void *arg),
                        void *arg, const char *name, int detached)
{
    (void)ctx;
    (void)detached;
    thread *t = thread_make(self->node, run, arg, name);
    *out = (pthread_t)(uintptr_t)t;
    return 0;
}

static void system_join(void *ctx, pthread_t id)
{
    (void)ctx;
    thread *t = (thread *)(uintptr_t)id;
    while (t->state != ENDED)
        wait_for(t, PERSIA_FOREVER, "for the end of a thread");
}

static int system_random(void *ctx, void *out, size_t n)
{
    (void)ctx;
    for (size_t i = 0; i < n; i++)
        ((unsigned char *)out)[i] = (unsigned char)(draw() >> 32);
    return 0;
}

static const persia_system simulated = {.now = system_now,
                                        .seconds = system_seconds,
                                        .wait = system_wait,
                                        .start = system_start,
                                        .join = system_join,
                                        .random = system_random};

void sim_begin(uint64_t seed, int show)
{
    static const uint32_t yields[] = {0, 10, 100, 400};
    sim.state = seed * 0xD1342543DE82EF95u + 1;
    sim.show = show;
    sim.now = 1000 * SIM_S;
    sim.last = &sim.threads;
    (void)draw();
    sim.yields = yields[sim_random(4)];
    sim.chances = sim_chance(500) ? 5 : 0;
    self = thread_add(sim_node_make("director", 0), "main");
    sim.current = self;
    sim.on = 1;
    persia_system_install(&simulated);
}

/* ---- locks and signals: linked with --wrap ---- */

#define WRAP(call, ...) int __wrap_##call(__VA_ARGS__)
int __real_pthread_mutex_lock(pthread_mutex_t *m);
int __real_pthread_mutex_trylock(pthread_mutex_t *m);
int __real_pthread_rwlock_rdlock(pthread_rwlock_t *m);
int __real_pthread_rwlock_wrlock(pthread_rwlock_t *m);
int __real_pthread_rwlock_tryrdlock(pthread_rwlock_t *m);
int __real_pthread_rwlock_trywrlock(pthread_rwlock_t *m);
int __real_pthread_rwlock_unlock(pthread_rwlock_t *m);
int __real_pthread_cond_signal(pthread_cond_t *c);
int __real_pthread_cond_broadcast(pthread_cond_t *c);
int __real_pthread_join(pthread_t id, void **out);

static void maybe_yield(void)
{
    if (sim_chance(sim.yields))
        pass_baton();
}

static void lock_mutex(pthread_mutex_t *m)
{
    maybe_yield();
    while (pthread_mutex_trylock(m))
        wait_for(m, PERSIA_FOREVER, "for a lock");
    self->statics += is_static(m);
}

WRAP(pthread_mutex_lock, pthread_mutex_t *m)
{
    if (!sim.on)
        return __real_pthread_mutex_lock(m);
    lock_mutex(m);
    return 0;
}

WRAP(pthread_mutex_unlock, pthread_mutex_t *m)
{
    int rc = __real_pthread_mutex_unlock(m);
    if (sim.on) {
        self->statics -= is_static(m);
        sim_wake(m);
    }
    return rc;
}

WRAP(pthread_rwlock_rdlock, pthread_rwlock_t *m)
{
    if (!sim.on)
        return __real_pthread_rwlock_rdlock(m);
    maybe_yield();
    while (pthread_rwlock_tryrdlock(m))
        wait_for(m, PERSIA_FOREVER, "for a lock to read");
    return 0;
}

WRAP(pthread_rwlock_wrlock, pthread_rwlock_t *m)
{
    if (!sim.on)
        return __real_pthread_rwlock_wrlock(m);
    maybe_yield();
    while (pthread_rwlock_trywrlock(m))
        wait_for(m, PERSIA_FOREVER, "for a lock to write");
    return 0;
}

WRAP(pthread_rwlock_unlock, pthread_rwlock_t *m)
{
    int rc = __real_pthread_rwlock_unlock(m);
    if (sim.on)
        sim_wake(m);
    return rc;
}

WRAP(pthread_cond_signal, pthread_cond_t *c)
{
    if (!sim.on)
        return __real_pthread_cond_signal(c);
    wake_one(c);
    return 0;
}

WRAP(pthread_cond_broadcast, pthread_cond_t *c)
{
    if (!sim.on)
        return __real_pthread_cond_broadcast(c);
    sim_wake(c);
    return 0;
}

WRAP(pthread_cond_wait, pthread_cond_t *c, pthread_mutex_t *m)
{
    (void)system_wait(NULL, c, m, PERSIA_FOREVER);
    return 0;
}

WRAP(pthread_join, pthread_t id, void **out)
{
    if (!sim.on)
        return __real_pthread_join(id, out);
    system_join(NULL, id);
    return 0;
}

WRAP(nanosleep, const struct timespec *t, struct timespec *left)
{
    (void)left;
    sim_sleep((uint64_t)t->tv_sec * SIM_S + (uint64_t)t->tv_nsec);
    return 0;
}

/* Each history is a process of its own, which an exec makes. */
WRAP(huge_can, void)
{
    return 0;
}

/* ---- planted bugs ---- */

void sim_bug_choose(const char *name)
{
    snprintf(sim.bug, sizeof sim.bug, "%s", name);
}

int sim_bug(const char *name)
{
    return strcmp(sim.bug, name) == 0;
}
