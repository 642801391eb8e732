#include "rpc/access.h"

#include <ctype.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpc/sha256.h"

enum {
    LINES_MAX = 1024,
    TEXT_MAX = 1 << 20,  /* bytes of all lines */
    TOKEN_MIN = 16,      /* characters */
    TOKEN_MAX = 1024,
    FIELDS_MAX = 8,
    CALLS_MS = 100       /* until a call may end for another one */
};
#define SECOND_NS ((uint64_t)1000000000)

/* Counts the calls of one name. */
struct access_meter {
    _Atomic(uint32_t) users;
    _Atomic(uint32_t) calls; /* now */
    _Atomic(uint64_t) due;   /* time of the last one at its rate, in ns */
};

typedef struct access_line {
    rpc_who who; /* first */
    access_meter *meter; /* NULL: no limit */
    int64_t until; /* seconds since 1970; 0: no end */
    uint8_t digest[SHA256_BYTES]; /* of the token, or of what is for `peer` */
    char *peer;   /* name in its certificate; NULL: it has a token */
    char *tables; /* who.tables */
} access_line;

struct access_list {
    _Atomic(uint32_t) users;
    const rpc_who *others; /* callers without a token; NULL: are refused */
    size_t n;
    access_line *lines;
};

/* ---- roles ---- */

const char *const persia_rpc_roles[RPC_ROLES] = {
#define ROLE(upper, lower) #lower,
    RPC_ROLES_EACH(ROLE)
#undef ROLE
};

const char *const persia_rpc_reasons[RPC_REASONS] = {
#define REASON(upper, lower) #lower,
    RPC_REASONS_EACH(REASON)
#undef REASON
};

const rpc_who persia_rpc_everyone = {.name = "", .roles = RPC_ALL};
static const rpc_who users = {.name = "", .roles = RPC_USER};

int persia_rpc_tables(const rpc_who *who, const char *table)
{
    char pattern[RPC_TABLES_MAX + 1];
    if (!who->tables)
        return 1;
    for (const char *at = who->tables; *at;) {
        const size_t n = strcspn(at, ",");
        memcpy(pattern, at, n);
        pattern[n] = 0;
        if (fnmatch(pattern, table, FNM_NOESCAPE) == 0)
            return 1;
        at += n + (at[n] == ',');
    }
    return 0;
}

/* ---- meters ---- */

static int meter_make(access_meter **out)
{
    access_meter *m = calloc(1, sizeof *m);
    *out = m;
    if (!m)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a token");
    atomic_init(&m->users, 1);
    return PERSIA_OK;
}

static void meter_drop(access_meter *m)
{
    if (m && atomic_fetch_sub(&m->users, 1) == 1)
        free(m);
}

/* The meter of another line with this name; *out stays where there is none. */
static void meter_find(const access_list *a, const char *name,
                       access_meter **out)
{
    for (size_t i = 0; a && i < a->n && !*out; i++)
        if (a->lines[i].meter && !strcmp(a->lines[i].who.name, name)) {
            *out = a->lines[i].meter;
            atomic_fetch_add(&(*out)->users, 1);
        }
}

access_meter *access_meter_of(const rpc_who *who)
{
    if (who == &persia_rpc_everyone || who == &users)
        return NULL;
    return ((const access_line *)who)->meter;
}

/* A second's calls may arrive at once. */
static uint32_t meter_rate(access_meter *m, uint32_t rate, uint64_t now)
{
    const uint64_t each = SECOND_NS / rate;
    uint64_t due = atomic_load(&m->due), next;
    do {
        const uint64_t begin = now > SECOND_NS ? now - SECOND_NS : 0;
        next = (due > begin ? due : begin) + each;
        if (next > now)
            return (uint32_t)((next - now) / 1000000 + 1);
    } while (!atomic_compare_exchange_weak(&m->due, &due, next));
    return 0;
}

uint32_t access_meter_enter(access_meter *m, const rpc_who *who, uint64_t now)
{
    const uint32_t calls = atomic_fetch_add(&m->calls, 1);
    uint32_t wait = 0;
    if (who->calls && calls >= who->calls)
        wait = CALLS_MS;
    else if (who->rate)
        wait = meter_rate(m, who->rate, now);
    if (wait)
        access_meter_leave(m);
    return wait;
}

void access_meter_leave(access_meter *m)
{
    atomic_fetch_sub(&m->calls, 1);
}

/* ---- fields ---- */

typedef struct field {
    const char *at;
    size_t n;
} field;

static int field_is(field f, const char *text)
{
    return f.n == strlen(text) && memcmp(f.at, text, f.n) == 0;
}

/* What follows `key`, where the field begins with it. */
static int field_value(field f, const char *key, field *out)
{
    const size_t n = strlen(key);
    if (f.n < n || memcmp(f.at, key, n) != 0)
        return 0;
    *out = (field){f.at + n, f.n - n};
    return 1;
}

/* At most nine digits. */
static int field_number(field f, uint32_t *out)
{
    *out = 0;
    if (!f.n || f.n > 9)
        return 0;
    for (size_t i = 0; i < f.n; i++) {
        if (f.at[i] < '0' || f.at[i] > '9')
            return 0;
        *out = 10 * *out + (uint32_t)(f.at[i] - '0');
    }
    return 1;
}

/* "2027-01-31", whose end it is, or "2027-01-31T18:00:00Z". */
static int field_time(field f, int64_t *out)
{
    static const char form[] = "0000-00-00T00:00:00Z";
    static const int past[] = {0,   31,  59,  90,  120, 151,
                               181, 212, 243, 273, 304, 334};
    uint32_t v[6] = {0};
    if (f.n != 10 && f.n != sizeof form - 1)
        return 0;
    for (size_t i = 0, k = 0; i < f.n; i++) {
        if (form[i] != '0') {
            k++;
            if (f.at[i] != form[i])
                return 0;
        } else if (f.at[i] < '0' || f.at[i] > '9') {
            return 0;
        } else {
            v[k] = 10 * v[k] + (uint32_t)(f.at[i] - '0');
        }
    }
    const int leap = v[0] % 4 == 0 && (v[0] % 100 != 0 || v[0] % 400 == 0);
    if (v[0] < 1970 || v[1] < 1 || v[1] > 12 || v[2] < 1 || v[3] > 23 ||
        v[4] > 59 || v[5] > 59)
        return 0;
    const int month = (v[1] == 12 ? 365 : past[v[1]]) - past[v[1] - 1] +
                      (v[1] == 2 && leap);
    if ((int)v[2] > month)
        return 0;
    const int64_t y = (int64_t)v[0] - 1;
    const int64_t days = 365 * (y - 1969) + (y / 4 - y / 100 + y / 400) - 477 +
                         past[v[1] - 1] + (v[1] > 2 && leap) + v[2] - 1;
    *out = days * 86400 +
           (f.n == 10 ? 86400 : v[3] * 3600 + v[4] * 60 + v[5]);
    return 1;
}

static int field_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

static int field_digest(field f, uint8_t out[SHA256_BYTES])
{
    if (f.n != 2 * SHA256_BYTES)
        return 0;
    for (size_t i = 0; i < SHA256_BYTES; i++) {
        const int high = field_digit(f.at[2 * i]);
        const int low = field_digit(f.at[2 * i + 1]);
        if (high < 0 || low < 0)
            return 0;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return 1;
}

static int field_roles(field f, uint32_t *out)
{
    *out = 0;
    for (size_t begin = 0; begin <= f.n;) {
        size_t n = 0;
        while (begin + n < f.n && f.at[begin + n] != ',')
            n++;
        const field one = {f.at + begin, n};
        uint32_t role = 0;
        while (role < RPC_ROLES && !field_is(one, persia_rpc_roles[role]))
            role++;
        if (role == RPC_ROLES)
            return 0;
        *out |= 1u << role;
        begin += n + 1;
    }
    if (*out & RPC_ADMIN)
        *out = RPC_ALL;
    return 1;
}

static int field_name(field f, char out[RPC_NAME_MAX + 1])
{
    if (!f.n || f.n > RPC_NAME_MAX)
        return 0;
    for (size_t i = 0; i < f.n; i++)
        if (!isalnum((unsigned char)f.at[i]) && !strchr("._-", f.at[i]))
            return 0;
    memcpy(out, f.at, f.n);
    out[f.n] = 0;
    return 1;
}

/* ---- lines ---- */

/* A URI, or "dns:" and a host. */
static const char *line_peer(field f, field name, access_line *out)
{
    field host;
    if (name.n > TOKEN_MAX ||
        !(field_value(name, "dns:", &host) ? host.n
                                           : !!memmem(name.at, name.n,
                                                      "://", 3)))
        return "after peer: is a URI such as spiffe://cluster/trainer, or "
               "dns: and a host";
    sha256(f.at, f.n, out->digest);
    out->peer = strndup(name.at, name.n);
    return out->peer ? NULL : "no memory";
}

/* What is wrong with a line, without its words: one may be the token. */
static const char *line_secret(field f, access_line *out)
{
    field digest, name;
    if (field_value(f, "peer:", &name))
        return line_peer(f, name, out);
    if (field_value(f, "sha256:", &digest))
        return field_digest(digest, out->digest)
                   ? NULL
                   : "after sha256: there are 64 digits of 0 to 9, a to f";
    if (f.n < TOKEN_MIN || f.n > TOKEN_MAX)
        return "a token has 16 to 1024 characters";
    sha256(f.at, f.n, out->digest);
    return NULL;
}

static const char *line_option(field f, access_line *out)
{
    rpc_who *who = &out->who;
    field value;
    if (field_value(f, "tables=", &value)) {
        if (out->tables || !value.n || value.n > RPC_TABLES_MAX)
            return "tables= has 1 to 1024 characters, and is there once";
        out->tables = strndup(value.at, value.n);
        who->tables = out->tables;
        return out->tables ? NULL : "no memory";
    }
    if (field_value(f, "rate=", &value))
        return !who->rate && field_number(value, &who->rate) && who->rate
                   ? NULL
                   : "rate= has calls a second, and is there once";
    if (field_value(f, "calls=", &value))
        return !who->calls && field_number(value, &who->calls) && who->calls
                   ? NULL
                   : "calls= has calls at once, and is there once";
    if (!out->until && field_time(f, &out->until))
        return NULL;
    return "after the token are its last day (2027-01-31), tables=, rate= "
           "and calls=";
}

/* fields: [n], n at least 1. */
static const char *line_parse(const field *fields, size_t n, access_line *out)
{
    if (n < 3)
        return "need ROLE NAME TOKEN";
    if (!field_roles(fields[0], &out->who.roles))
        return "the roles are train, feed, read, publish, serve, scrape and "
               "admin, with commas between";
    if (!field_name(fields[1], out->who.name))
        return "a name has 1 to 63 letters, digits, dots, hyphens and "
               "underscores";
    const char *wrong = line_secret(fields[2], out);
    for (size_t i = 3; i < n && !wrong; i++)
        wrong = line_option(fields[i], out);
    if (!wrong && out->tables &&
        out->who.roles & ~(uint32_t)(RPC_TRAIN | RPC_READ | RPC_PUBLISH))
        wrong = "tables= is for train, read and publish alone";
    return wrong;
}

/* The fields of a line; FIELDS_MAX + 1: too many. */
static size_t line_split(const char *at, const char *end,
                         field fields[FIELDS_MAX])
{
    size_t n = 0;
    while (at < end) {
        while (at < end && (*at == ' ' || *at == '\t' || *at == '\r'))
            at++;
        if (at == end || (!n && *at == '#'))
            break;
        const char *begin = at;
        while (at < end && *at > ' ' && *at <= '~')
            at++;
        if (at == begin || n == FIELDS_MAX)
            return FIELDS_MAX + 1; /* or no printable character */
        fields[n++] = (field){begin, (size_t)(at - begin)};
    }
    return n;
}

static int access_wrong(size_t line, const char *why)
{
    return persia_err_set(PERSIA_EARG, "tokens, line %zu: %s", line, why);
}

/* The next line; NULL with *rc. */
static access_line *access_add(access_list *a, int *rc)
{
    if (a->n == LINES_MAX) {
        *rc = persia_err_set(PERSIA_EARG, "tokens: more than %d", LINES_MAX);
        return NULL;
    }
    access_line *more = realloc(a->lines, (a->n + 1) * sizeof *more);
    if (!more) {
        *rc = persia_err_set(PERSIA_ENOMEM, "no memory for tokens");
        return NULL;
    }
    a->lines = more;
    more += a->n++;
    *more = (access_line){.until = 0};
    return more;
}

static int access_read_line(access_list *a, const char *at, const char *end,
                            size_t number)
{
    field fields[FIELDS_MAX];
    const size_t n = line_split(at, end, fields);
    if (!n)
        return PERSIA_OK;
    if (n > FIELDS_MAX)
        return access_wrong(number, "need ROLE NAME TOKEN and at most five "
                                    "more, in printable ASCII");
    int rc = PERSIA_OK;
    access_line *line = access_add(a, &rc);
    if (!line)
        return rc;
    const char *wrong = line_parse(fields, n, line);
    if (wrong)
        rc = access_wrong(number, wrong);
    for (size_t i = 0; !rc && i + 1 < a->n; i++)
        if (!memcmp(a->lines[i].digest, line->digest, SHA256_BYTES))
            rc = access_wrong(number, "its token is that of another line");
    return rc;
}

static int access_read(access_list *a, const char *text)
{
    const size_t before = a->n;
    size_t number = 0;
    int rc = PERSIA_OK;
    if (strnlen(text, TEXT_MAX + 1) > TEXT_MAX)
        return persia_err_set(PERSIA_EARG, "tokens: more than 1 MiB");
    while (*text && !rc) {
        const size_t n = strcspn(text, "\n");
        rc = access_read_line(a, text, text + n, ++number);
        text += n + (text[n] == '\n');
    }
    if (!rc && a->n == before)
        rc = persia_err_set(PERSIA_EARG, "tokens: there is no line");
    return rc;
}

/* The line of a single token. */
static int access_add_single(access_list *a, const char *name,
                             const char *token, uint32_t roles)
{
    int rc = PERSIA_OK;
    access_line *line = token ? access_add(a, &rc) : NULL;
    if (!line)
        return rc;
    snprintf(line->who.name, sizeof line->who.name, "%s", name);
    line->who.roles = roles;
    sha256(token, strlen(token), line->digest);
    return PERSIA_OK;
}

/* ---- life ---- */

static int access_meters(access_list *a, const access_list *before)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < a->n && !rc; i++) {
        access_line *l = &a->lines[i];
        access_meter *found = NULL;
        if (!l->who.rate && !l->who.calls)
            continue;
        meter_find(a, l->who.name, &found);
        meter_find(before, l->who.name, &found);
        if (!found)
            rc = meter_make(&found);
        l->meter = found;
    }
    return rc;
}

int access_make(const rpc_security *s, access_list *before, access_list **out)
{
    access_list *a = calloc(1, sizeof *a);
    *out = NULL;
    if (!a)
        return persia_err_set(PERSIA_ENOMEM, "no memory for tokens");
    atomic_init(&a->users, 1);
    if (!s->token && !s->tokens)
        a->others = s->admin_token ? &users : &persia_rpc_everyone;
    /* The first that fits counts: both tokens may be the same. */
    int rc = access_add_single(a, "admin-token", s->admin_token, RPC_ALL);
    if (!rc)
        rc = access_add_single(a, "token", s->token,
                               s->admin_token || s->tokens ? RPC_USER
                                                           : RPC_ALL);
    if (!rc && s->tokens)
        rc = access_read(a, s->tokens);
    if (!rc)
        rc = access_meters(a, before);
    if (rc)
        access_drop(a);
    else
        *out = a;
    return rc;
}

access_list *access_get(access_list *a)
{
    atomic_fetch_add(&a->users, 1);
    return a;
}

void access_drop(access_list *a)
{
    if (!a || atomic_fetch_sub(&a->users, 1) != 1)
        return;
    for (size_t i = 0; i < a->n; i++) {
        meter_drop(a->lines[i].meter);
        free(a->lines[i].peer);
        free(a->lines[i].tables);
    }
    free(a->lines);
    free(a);
}

/* ---- who it is ---- */

/* Its time does not depend on where they differ. */
static int access_same(const uint8_t *a, const uint8_t *b)
{
    unsigned differ = 0;
    for (size_t i = 0; i < SHA256_BYTES; i++)
        differ |= (unsigned)(a[i] ^ b[i]);
    return differ == 0;
}

static const access_line *access_of_token(const access_list *a,
                                          const char *token, size_t n)
{
    uint8_t digest[SHA256_BYTES];
    const access_line *found = NULL;
    sha256(token, n, digest);
    for (size_t i = a->n; i-- > 0;)
        if (access_same(digest, a->lines[i].digest) && !a->lines[i].peer)
            found = &a->lines[i];
    return found;
}

static const access_line *access_of_peer(const access_list *a,
                                         const rpc_peer *peer)
{
    size_t i = 0;
    while (i < a->n && !(a->lines[i].peer &&
                         peer->has(peer->ctx, a->lines[i].peer)))
        i++;
    return i < a->n ? &a->lines[i] : NULL;
}

const rpc_who *access_find(const access_list *a, const char *token, size_t n,
                           const rpc_peer *peer, int64_t seconds,
                           enum rpc_reason *why)
{
    const access_line *found = NULL;
    *why = token ? RPC_WRONG : RPC_MISSING;
    if (token && a->n)
        found = access_of_token(a, token, n);
    else if (!token && peer)
        found = access_of_peer(a, peer);
    if (found && found->until && seconds >= found->until) {
        *why = RPC_EXPIRED;
        found = NULL;
    }
    return found ? &found->who : a->others;
}
