#include "shard/ledger.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"
#include "shard/gaps.h"
#include "shard/numbers.h"

typedef struct stream {
    struct stream *next; /* of the same bucket */
    uint64_t name;
    numbers_set set; /* what was applied; what was not is skipped */
    uint64_t gaps[WIRE_GAPS_MAX]; /* the last that were skipped */
    uint64_t used; /* when it was used last, in uses of the ledger */
    ledger_owner owner; /* {0, 0}: none since the rows were restored */
    uint64_t forgotten; /* the highest number whose refusal was dropped: of
                           all above it the refusals are kept */
} stream;

typedef struct refusal {
    uint64_t stream, number; /* number 0: none */
    int code;
    char text[512];
} refusal;

enum { BUCKETS = 64 }; /* at first */

struct ledger {
    uint32_t streams_max;
    pthread_mutex_t lock; /* guards all below */
    stream **bucket;      /* [buckets], a power of two */
    uint32_t buckets;
    uint64_t key;         /* of the places of names in `bucket` */
    uint32_t streams;
    uint64_t uses;
    uint64_t expired; /* the highest incarnation of streams that expired */
    ledger_flight *flights; /* as many as pushes that run: few */
    refusal refused[LEDGER_REFUSALS]; /* the last ones, a ring */
    uint64_t refused_n;               /* all that were put there */
};

int ledger_create(uint32_t streams, ledger **out)
{
    ledger *l = calloc(1, sizeof *l);
    *out = NULL;
    if (l)
        l->bucket = calloc(BUCKETS, sizeof(stream *));
    if (!l || !l->bucket) {
        free(l);
        return persia_err_set(PERSIA_ENOMEM, "no memory for a ledger");
    }
    l->buckets = BUCKETS;
    l->key = persia_ids_key();
    l->streams_max = streams;
    pthread_mutex_init(&l->lock, NULL);
    *out = l;
    return PERSIA_OK;
}

static void streams_free(stream **bucket, uint32_t buckets)
{
    for (uint32_t i = 0; i < buckets; i++)
        while (bucket[i]) {
            stream *s = bucket[i];
            bucket[i] = s->next;
            free(s);
        }
    free(bucket);
}

void ledger_destroy(ledger *l)
{
    if (!l)
        return;
    streams_free(l->bucket, l->buckets);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

uint32_t ledger_longest(ledger *l)
{
    uint32_t longest = 0;
    pthread_mutex_lock(&l->lock);
    for (uint32_t i = 0; i < l->buckets; i++) {
        uint32_t n = 0;
        for (const stream *s = l->bucket[i]; s; s = s->next)
            n++;
        longest = n > longest ? n : longest;
    }
    pthread_mutex_unlock(&l->lock);
    return longest;
}

/* ---- streams ------------------------------------------------------------ */

static int owner_compare(const ledger_owner *a, const ledger_owner *b)
{
    if (a->incarnation != b->incarnation)
        return a->incarnation < b->incarnation ? -1 : 1;
    return a->client < b->client ? -1 : a->client > b->client;
}

/* By a secret key: a client that chooses names must not know which collide. */
static stream **ledger_bucket_of(stream **bucket, uint32_t buckets,
                                 uint64_t key, uint64_t name)
{
    return &bucket[place_home(id_place(name, key), buckets)];
}

static stream *ledger_find_locked(ledger *l, uint64_t name)
{
    stream *s = *ledger_bucket_of(l->bucket, l->buckets, l->key, name);
    while (s && s->name != name)
        s = s->next;
    if (s)
        s->used = ++l->uses;
    return s;
}

static void ledger_mark(stream *s, uint64_t number)
{
    if (number <= s->set.w.watermark) { /* settled while it was in flight */
        s->set.w.skipped--;
        gaps_fill(s->gaps, number);
    } else {
        numbers_add(&s->set, number);
    }
}

static void export_stream(const stream *s, wire_ledger *out)
{
    out->stream = s->name;
    out->incarnation = s->owner.incarnation;
    out->client = s->owner.client;
    numbers_to_wire(&s->set, out);
    memcpy(out->gaps, s->gaps, sizeof out->gaps);
}

static void import_stream(stream *s, const wire_ledger *from)
{
    s->name = from->stream;
    s->owner = (ledger_owner){from->incarnation, from->client};
    numbers_from_wire(&s->set, from);
}

/* More buckets, where there is memory; chains get longer otherwise. */
static void ledger_grow_locked(ledger *l)
{
    uint32_t buckets = 2 * l->buckets;
    stream **bigger = calloc(buckets, sizeof *bigger);
    if (!bigger)
        return;
    for (uint32_t i = 0; i < l->buckets; i++)
        while (l->bucket[i]) {
            stream *s = l->bucket[i];
            l->bucket[i] = s->next;
            stream **at = ledger_bucket_of(bigger, buckets, l->key, s->name);
            s->next = *at;
            *at = s;
        }
    free(l->bucket);
    l->bucket = bigger;
    l->buckets = buckets;
}

static int ledger_under_way_locked(const ledger *l, uint64_t name)
{
    for (const ledger_flight *f = l->flights; f; f = f->next)
        if (f->stream == name)
            return 1;
    return 0;
}

/* Removes the stream used longest ago that has nothing in flight. */
static int ledger_expire_locked(ledger *l)
{
    stream **oldest = NULL;
    for (uint32_t i = 0; i < l->buckets; i++)
        for (stream **at = &l->bucket[i]; *at; at = &(*at)->next)
            if ((!oldest || (*at)->used < (*oldest)->used) &&
                !ledger_under_way_locked(l, (*at)->name))
                oldest = at;
    if (!oldest)
        return persia_err_set(PERSIA_ELIMIT,
                              "%u streams of updates are open, all "
                              "of them with updates that have not "
                              "ended",
                              l->streams);
    stream *gone = *oldest;
    if (gone->owner.incarnation > l->expired)
        l->expired = gone->owner.incarnation;
    *oldest = gone->next;
    free(gone);
    l->streams--;
    return PERSIA_OK;
}

static void ledger_insert_locked(ledger *l, stream *s)
{
    if (l->streams >= l->buckets)
        ledger_grow_locked(l);
    stream **at = ledger_bucket_of(l->bucket, l->buckets, l->key, s->name);
    s->next = *at;
    *at = s;
    l->streams++;
}

static int ledger_add_locked(ledger *l, uint64_t name, stream **out)
{
    int rc =
        l->streams >= l->streams_max ? ledger_expire_locked(l) : PERSIA_OK;
    if (rc)
        return rc;
    stream *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for a stream of updates");
    s->name = name;
    s->used = ++l->uses;
    numbers_init(&s->set, 0);
    ledger_insert_locked(l, s);
    *out = s;
    return PERSIA_OK;
}

/* A stream that expired may have had updates of all these incarnations. */
static int ledger_add_claimed_locked(ledger *l, uint64_t name,
                                     ledger_owner owner, stream **out)
{
    if (owner.incarnation <= l->expired)
        return persia_err_set(
            PERSIA_ECLOSED,
            "the stream of these updates has "
            "expired: too many others were used since; open the "
            "store again");
    return ledger_add_locked(l, name, out);
}

/* What others have in flight counts as applied. */
static void ledger_add_flights_locked(const ledger *l, const stream *s,
                                      wire_ledger *out)
{
    for (const ledger_flight *f = l->flights; f; f = f->next) {
        uint64_t bit = f->number - s->set.w.watermark - 1;
        if (f->stream == s->name &&
            owner_compare(&f->owner, &s->owner) != 0 &&
            f->number > s->set.w.watermark && bit < LEDGER_WINDOW)
            out->window[bit / 64] |= (uint64_t)1 << (bit % 64);
    }
}

/* The next owner has other updates of these numbers. */
static void drop_refusals_locked(ledger *l, stream *s)
{
    s->forgotten = 0;
    for (uint32_t i = 0; i < LEDGER_REFUSALS; i++)
        if (l->refused[i].stream == s->name)
            l->refused[i].number = 0;
}

int ledger_open(ledger *l, uint64_t name, ledger_owner owner, int *taken,
                wire_ledger *out)
{
    int rc = PERSIA_OK;
    *taken = 0;
    assert(owner.incarnation > 0);
    pthread_mutex_lock(&l->lock);
    stream *s = ledger_find_locked(l, name);
    if (wire_leaps(s ? s->owner.incarnation : l->expired, owner.incarnation))
        rc = persia_err_set(PERSIA_EARG,
                            "incarnation %llu of a stream of updates: no "
                            "process was replaced so often",
                            (unsigned long long)owner.incarnation);
    else if (!s)
        rc = ledger_add_claimed_locked(l, name, owner, &s);
    else if (owner_compare(&s->owner, &owner) > 0)
        rc = persia_err_set(PERSIA_ECLOSED,
                            "another process sends the updates of "
                            "this rank now");
    if (!rc) {
        *taken = s->owner.client &&
                 owner_compare(&s->owner, &owner) != 0;
        s->owner = owner;
        if (*taken)
            drop_refusals_locked(l, s);
        export_stream(s, out);
        ledger_add_flights_locked(l, s, out);
    }
    pthread_mutex_unlock(&l->lock);
    return rc;
}

void ledger_read(ledger *l, uint64_t name, wire_ledger *out)
{
    memset(out, 0, sizeof *out);
    out->stream = name;
    pthread_mutex_lock(&l->lock);
    out->incarnation = l->expired;
    const stream *s = ledger_find_locked(l, name);
    if (s)
        export_stream(s, out);
    pthread_mutex_unlock(&l->lock);
}

int ledger_is_older(ledger *l, uint64_t name, ledger_owner owner)
{
    pthread_mutex_lock(&l->lock);
    const stream *s = ledger_find_locked(l, name);
    int older = s && owner_compare(&owner, &s->owner) < 0;
    pthread_mutex_unlock(&l->lock);
    return older;
}

/* ---- updates ------------------------------------------------------------ */

enum { NEVER = FLIGHT_STATES };

static const unsigned char next[FLIGHT_STATES][FLIGHT_EVENTS] = {
    [FLIGHT_NONE] = {FLIGHT_BEGUN, NEVER, NEVER, NEVER},
    [FLIGHT_BEGUN] = {NEVER, FLIGHT_COMMITTED, NEVER, FLIGHT_NONE},
    [FLIGHT_COMMITTED] = {NEVER, NEVER, FLIGHT_REFUSED, FLIGHT_NONE},
    [FLIGHT_REFUSED] = {NEVER, NEVER, NEVER, FLIGHT_NONE},
};

/* The only place that changes the state of an update in flight; f NULL: the
 * update is in none. */
static void flight_event(ledger_flight *f, enum flight_event event)
{
    const enum flight_state to = f ? next[f->state][event] : FLIGHT_NONE;
    assert((int)to != NEVER);
    if (f)
        f->state = to;
}

static ledger_flight **flight_locked(ledger *l, const ledger_key *key)
{
    ledger_flight **at = &l->flights;
    while (*at &&
           ((*at)->stream != key->stream || (*at)->number != key->number))
        at = &(*at)->next;
    return at;
}

static enum ledger_state check_locked(ledger *l, const ledger_key *key)
{
    const stream *s = ledger_find_locked(l, key->stream);
    if (!s)
        return LEDGER_UNKNOWN;
    uint64_t watermark = s->set.w.watermark;
    if (wire_leaps(watermark, key->settled))
        return LEDGER_ABSURD;
    if (key->settled > watermark)
        watermark = key->settled;
    if (key->number <= watermark || window_has(&s->set.w, key->number))
        return LEDGER_DONE;
    return key->number - watermark <= LEDGER_WINDOW ? LEDGER_NEW
                                                    : LEDGER_BEYOND;
}

/* Whether the stream is of this owner. */
static enum ledger_state ledger_owned_locked(ledger *l, const ledger_key *key)
{
    const stream *s = ledger_find_locked(l, key->stream);
    int order = s ? owner_compare(&key->owner, &s->owner) : 1;
    return order < 0 ? LEDGER_TAKEN : order ? LEDGER_UNKNOWN : LEDGER_NEW;
}

static enum ledger_state ledger_look_locked(ledger *l, const ledger_key *key,
                                            ledger_waiter *waiter)
{
    enum ledger_state state = ledger_owned_locked(l, key);
    if (state == LEDGER_NEW)
        state = check_locked(l, key);
    ledger_flight *f = *flight_locked(l, key);
    /* Also when it is done already: how it went, its answer says. */
    if (!f || (state != LEDGER_NEW && state != LEDGER_DONE))
        return state;
    if (f->part_of != key->part_of)
        return LEDGER_ELSEWHERE;
    if (waiter) {
        waiter->next = NULL;
        *f->last = waiter;
        f->last = &waiter->next;
    }
    return LEDGER_BUSY;
}

int ledger_has(ledger *l, uint64_t stream, uint64_t number)
{
    const ledger_key key = {.stream = stream, .number = number};
    return ledger_check(l, &key) == LEDGER_DONE;
}

enum ledger_state ledger_look(ledger *l, const ledger_key *key,
                              ledger_waiter *waiter)
{
    pthread_mutex_lock(&l->lock);
    enum ledger_state state = ledger_look_locked(l, key, waiter);
    pthread_mutex_unlock(&l->lock);
    return state;
}

enum ledger_state ledger_begin(ledger *l, const ledger_key *key,
                               ledger_flight *f, ledger_waiter *waiter)
{
    pthread_mutex_lock(&l->lock);
    enum ledger_state state = ledger_look_locked(l, key, waiter);
    if (state == LEDGER_NEW) {
        assert(!*flight_locked(l, key)); /* it would be BUSY */
        *f = (ledger_flight){.next = l->flights,
                             .stream = key->stream,
                             .number = key->number,
                             .part_of = key->part_of,
                             .owner = key->owner};
        f->last = &f->first;
        flight_event(f, FLIGHT_BEGIN);
        l->flights = f;
    }
    pthread_mutex_unlock(&l->lock);
    return state;
}

enum ledger_state ledger_check(ledger *l, const ledger_key *key)
{
    pthread_mutex_lock(&l->lock);
    enum ledger_state state = check_locked(l, key);
    pthread_mutex_unlock(&l->lock);
    return state;
}

void ledger_commit(ledger *l, const ledger_key *key)
{
    pthread_mutex_lock(&l->lock);
    /* It is there: streams with an update in flight do not expire. */
    stream *s = ledger_find_locked(l, key->stream);
    flight_event(*flight_locked(l, key), FLIGHT_COMMIT);
    if (s) {
        gaps_settle(s->gaps, &s->set.w, key->settled);
        numbers_settle(&s->set, key->settled);
        ledger_mark(s, key->number);
    }
    pthread_mutex_unlock(&l->lock);
}

void ledger_refuse(ledger *l, const ledger_key *key, int code,
                   const char *text)
{
    pthread_mutex_lock(&l->lock);
    flight_event(*flight_locked(l, key), FLIGHT_REFUSE);
    refusal *r = &l->refused[l->refused_n++ % LEDGER_REFUSALS];
    stream *s = r->number ? ledger_find_locked(l, r->stream) : NULL;
    if (s && r->number > s->forgotten)
        s->forgotten = r->number;
    *r = (refusal){.stream = key->stream, .number = key->number,
                   .code = code};
    snprintf(r->text, sizeof r->text, "%s", text);
    pthread_mutex_unlock(&l->lock);
}

static const refusal *refusal_locked(const ledger *l, const ledger_key *key)
{
    for (uint32_t i = 0; i < LEDGER_REFUSALS; i++)
        if (l->refused[i].stream == key->stream &&
            l->refused[i].number == key->number)
            return &l->refused[i];
    return NULL;
}

int ledger_refusal(ledger *l, const ledger_key *key, char *text, size_t room)
{
    int code = PERSIA_OK;
    pthread_mutex_lock(&l->lock);
    const refusal *r = refusal_locked(l, key);
    const stream *s = ledger_find_locked(l, key->stream);
    if (r) {
        code = r->code;
        snprintf(text, room, "%s", r->text);
    } else if (s && key->number <= s->forgotten) {
        code = PERSIA_ETIMEOUT;
        snprintf(text, room, "update %llu was sent again so late that the "
                 "server does not know any more whether it was applied or "
                 "refused", (unsigned long long)key->number);
    }
    pthread_mutex_unlock(&l->lock);
    return code;
}

int ledger_refusal_at(ledger *l, uint32_t i, ledger_key *key, err_kept *why)
{
    pthread_mutex_lock(&l->lock);
    const refusal *r = &l->refused[(l->refused_n + i) % LEDGER_REFUSALS];
    const stream *s = r->number ? ledger_find_locked(l, r->stream) : NULL;
    if (s) {
        *key = (ledger_key){.stream = r->stream, .number = r->number,
                            .owner = s->owner};
        why->code = r->code;
        snprintf(why->text, sizeof why->text, "%s", r->text);
    }
    pthread_mutex_unlock(&l->lock);
    return s != NULL;
}

ledger_waiter *ledger_end(ledger *l, const ledger_key *key)
{
    ledger_waiter *waiters = NULL;
    pthread_mutex_lock(&l->lock);
    ledger_flight **at = flight_locked(l, key), *f = *at;
    if (f) {
        waiters = f->first;
        *at = f->next;
        flight_event(f, FLIGHT_END);
    }
    pthread_mutex_unlock(&l->lock);
    return waiters;
}

/* ---- all streams -------------------------------------------------------- */

static int ledger_room_make(uint32_t streams, wire_ledger **out, size_t *room)
{
    const size_t more = streams + (size_t)64;
    if (*room >= streams && *out)
        return PERSIA_OK;
    free(*out);
    *out = malloc(more * sizeof **out);
    *room = *out ? more : 0;
    if (!*out)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for the ledgers of %u streams",
                              streams);
    memset(*out, 0, more * sizeof **out);
    return PERSIA_OK;
}

int ledger_room(ledger *l, wire_ledger **out, size_t *room)
{
    pthread_mutex_lock(&l->lock);
    const uint32_t streams = l->streams;
    pthread_mutex_unlock(&l->lock);
    return ledger_room_make(streams, out, room);
}

int ledger_copy(ledger *l, wire_ledger **out, size_t *room, size_t *n)
{
    *n = 0;
    pthread_mutex_lock(&l->lock);
    int rc = ledger_room_make(l->streams, out, room);
    for (uint32_t i = 0; i < l->buckets && !rc; i++)
        for (const stream *s = l->bucket[i]; s; s = s->next)
            if (window_top(&s->set.w))
                export_stream(s, &(*out)[(*n)++]);
    pthread_mutex_unlock(&l->lock);
    return rc;
}

int ledger_fill(ledger *l, const wire_ledger *from, size_t n)
{
    int rc = PERSIA_OK;
    pthread_mutex_lock(&l->lock);
    for (size_t i = 0; i < n && !rc; i++) {
        stream *s = ledger_find_locked(l, from[i].stream);
        if (s)
            rc = persia_err_set(PERSIA_EARG,
                                "the ledger of a stream is there twice");
        else if (!(rc = ledger_add_locked(l, from[i].stream, &s)))
            import_stream(s, &from[i]);
    }
    pthread_mutex_unlock(&l->lock);
    return rc;
}

/* The owners of `from`, where they are the later ones, to `to`: an older
 * one must not take a stream back because rows were restored. */
static void ledger_keep_owners(ledger *to, ledger *from)
{
    for (uint32_t i = 0; i < from->buckets; i++)
        for (stream **at = &from->bucket[i], *s; (s = *at);) {
            stream *same = ledger_find_locked(to, s->name);
            if (same && owner_compare(&same->owner, &s->owner) < 0)
                same->owner = s->owner;
            if (same || !s->owner.incarnation ||
                to->streams >= to->streams_max) {
                at = &s->next;
                continue;
            }
            *at = s->next;
            from->streams--;
            *s = (stream){.name = s->name, .owner = s->owner,
                          .used = ++to->uses};
            numbers_init(&s->set, 0);
            ledger_insert_locked(to, s);
        }
    if (from->expired > to->expired)
        to->expired = from->expired;
}

void ledger_exchange(ledger *l, ledger *other, _Atomic(uint64_t) *lineage,
                     uint64_t to)
{
    pthread_mutex_lock(&l->lock);
    atomic_store(lineage, to);
    ledger_keep_owners(other, l);
    stream **bucket = l->bucket;
    uint32_t buckets = l->buckets, streams = l->streams;
    uint64_t uses = l->uses, expired = l->expired, key = l->key;
    memset(l->refused, 0, sizeof l->refused); /* numbers are used again */
    l->bucket = other->bucket;
    l->buckets = other->buckets;
    l->streams = other->streams;
    l->uses = other->uses;
    l->expired = other->expired;
    l->key = other->key;
    other->bucket = bucket;
    other->buckets = buckets;
    other->streams = streams;
    other->uses = uses;
    other->expired = expired;
    other->key = key;
    pthread_mutex_unlock(&l->lock);
}
