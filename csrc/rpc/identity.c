#include "rpc/identity.h"

#include <stdlib.h>
#include <string.h>

#include "rpc/channel.h"

/* Identities with a source.  They stay: a later channel may have the same
 * source. */
static struct {
    pthread_mutex_t lock; /* guards what follows, and users of all */
    identity *first;
} identities = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- texts ---- */

static void identity_free_text(const char *text)
{
    char *own = (char *)(uintptr_t)text;
    if (own)
        explicit_bzero(own, strlen(own));
    free(own);
}

static void identity_free_texts(rpc_security *s)
{
    identity_free_text(s->ca);
    identity_free_text(s->cert);
    identity_free_text(s->key);
    identity_free_text(s->token);
    identity_free_text(s->admin_token);
    identity_free_text(s->server_name);
    *s = (rpc_security){0};
}

/* Without the lines of tokens, which are in its access list. */
static int identity_copy_texts(const rpc_security *from, rpc_security *to)
{
    *to = (rpc_security){.mutual = from->mutual,
                         .insecure = from->insecure,
                         .source = from->source};
#define COPY(text) (!from->text || (to->text = strdup(from->text)))
    if (COPY(ca) && COPY(cert) && COPY(key) && COPY(token) &&
        COPY(admin_token) && COPY(server_name))
        return PERSIA_OK;
#undef COPY
    identity_free_texts(to);
    return persia_err_set(PERSIA_ENOMEM, "no memory for certificates");
}

/* ---- life ---- */

static void identity_free(identity *i)
{
    identity_free_texts(&i->texts);
    access_drop(i->access);
    pthread_rwlock_destroy(&i->lock);
    free(i);
}

static int identity_make(const rpc_security *s, identity **out)
{
    identity *i = calloc(1, sizeof *i);
    *out = NULL;
    if (!i)
        return persia_err_set(PERSIA_ENOMEM, "no memory for certificates");
    pthread_rwlock_init(&i->lock, NULL);
    atomic_init(&i->version, 1);
    i->source = s->source;
    int rc = identity_copy_texts(s, &i->texts);
    if (!rc)
        rc = access_make(s, NULL, &i->access);
    if (rc)
        identity_free(i);
    else
        *out = i;
    return rc;
}

static identity *identities_find_locked(uint64_t source)
{
    identity *i = identities.first;
    while (i && i->source != source)
        i = i->next;
    return i;
}

int identity_open(const rpc_security *s, identity **out)
{
    int rc = PERSIA_OK;
    if (!s->source)
        return identity_make(s, out);
    pthread_mutex_lock(&identities.lock);
    identity *i = identities_find_locked(s->source);
    if (!i && !(rc = identity_make(s, &i))) {
        i->next = identities.first;
        identities.first = i;
    }
    if (!rc)
        i->users++;
    pthread_mutex_unlock(&identities.lock);
    *out = i;
    return rc;
}

void identity_close(identity *i)
{
    if (i && !i->source) {
        identity_free(i);
    } else if (i) {
        pthread_mutex_lock(&identities.lock);
        i->users--;
        pthread_mutex_unlock(&identities.lock);
    }
}

access_list *identity_access(identity *i)
{
    pthread_rwlock_rdlock(&i->lock);
    access_list *a = access_get(i->access);
    pthread_rwlock_unlock(&i->lock);
    return a;
}

/* ---- renewal ---- */

static int identity_renew(identity *i, const rpc_security *s)
{
    rpc_security texts;
    access_list *made = NULL, *before = identity_access(i);
    int rc = access_make(s, before, &made);
    access_drop(before);
    if (!rc)
        rc = identity_copy_texts(s, &texts);
    if (rc) {
        access_drop(made);
        return rc;
    }
    pthread_rwlock_wrlock(&i->lock);
    const rpc_security old = i->texts;
    before = i->access;
    i->texts = texts;
    i->access = made;
    atomic_fetch_add(&i->version, 1);
    pthread_rwlock_unlock(&i->lock);
    texts = old;
    identity_free_texts(&texts);
    access_drop(before);
    return PERSIA_OK;
}

int persia_rpc_renew(const rpc_security *s, uint32_t *users)
{
    int rc = security_check_texts(s);
    *users = 0;
    if (rc)
        return rc;
    pthread_mutex_lock(&identities.lock);
    identity *i = identities_find_locked(s->source);
    if (i) {
        *users = i->users;
        rc = identity_renew(i, s);
    }
    pthread_mutex_unlock(&identities.lock);
    if (!i) {
        access_list *made = NULL;
        rc = access_make(s, NULL, &made);
        access_drop(made);
    }
    return rc;
}

uint32_t persia_rpc_users(uint64_t source)
{
    pthread_mutex_lock(&identities.lock);
    const identity *i = identities_find_locked(source);
    const uint32_t users = i ? i->users : 0;
    pthread_mutex_unlock(&identities.lock);
    return users;
}
