/* restores.c: rows that another client replaced, and servers whose rows stem
 * from different restores. */
#include "client/private.h"

#include <stdio.h>
#include <string.h>

/* ---- rows that were replaced ---- */

void client_note_replaced(ps_client *r, const server *to, uint64_t restore,
                          uint64_t lost)
{
    pthread_mutex_lock(&r->lock);
    const int first = r->replaced_by != restore;
    const uint64_t known = first ? 0 : r->replaced_lost;
    /* Every update reaches every server: the one that lacks most counts. */
    if (lost > known)
        r->counts.lost += lost - known;
    r->replaced_by = restore;
    r->replaced_lost = lost > known ? lost : known;
    if (r->policy == LOST_RAISE &&
        (first || r->lost_code == PERSIA_EREPLACED)) {
        r->lost_code = PERSIA_EREPLACED;
        snprintf(r->lost_text, sizeof r->lost_text,
                 "another client has loaded other rows into %s: %llu updates "
                 "that were acknowledged to this store are not in them",
                 to->address, (unsigned long long)r->replaced_lost);
    }
    pthread_mutex_unlock(&r->lock);
    atomic_store(&r->restores, RESTORES_UNSURE);
}

/* ---- mixtures ---- */

static uint64_t restore_of(server *to)
{
    pthread_mutex_lock(&to->lock);
    const uint64_t restore = to->restore;
    pthread_mutex_unlock(&to->lock);
    return restore;
}

uint64_t persia_client_restore(ps_client *r)
{
    return restore_of(r->servers[0]);
}

static int restores_is_mixed(const ps_client *r)
{
    for (uint32_t i = 1; i < r->servers_n; i++)
        if (restore_of(r->servers[i]) != restore_of(r->servers[0]))
            return 1;
    return 0;
}

void client_note_mixture(ps_client *r)
{
    if (restores_is_mixed(r))
        atomic_store(&r->restores, RESTORES_UNSURE);
}

void client_compare_restores(ps_client *r)
{
    atomic_store(&r->restores,
                 restores_is_mixed(r) ? RESTORES_MIXED : RESTORES_ONE);
}

static int restores_refuse(const ps_client *r)
{
    char list[FAN_TEXT] = "";
    size_t n = 0;
    for (uint32_t i = 0; i < r->servers_n && n < sizeof list; i++) {
        const uint64_t restore = restore_of(r->servers[i]);
        const char *comma = i ? ", " : "";
        const char *name = r->servers[i]->address;
        int more = restore ? snprintf(list + n, sizeof list - n,
                                      "%s%s has rows of restore %016llx",
                                      comma, name,
                                      (unsigned long long)restore)
                           : snprintf(list + n, sizeof list - n,
                                      "%s%s has rows of no restore", comma,
                                      name);
        n += more > 0 ? (size_t)more : 0;
    }
    return persia_err_set(
        PERSIA_EINCOMPLETE,
        "%s: a load was cut short, or a server "
        "was started with other rows; load a checkpoint, which "
        "reaches all of them",
        list);
}

int client_check_mixture(ps_client *r, int named)
{
    if (atomic_load(&r->restores) == RESTORES_ONE)
        return PERSIA_OK;
    if (atomic_load(&r->loading)) /* this store makes them one */
        return PERSIA_OK;
    int rc = persia_turn_take(&r->comparing);
    if (rc)
        return rc;
    const int known = atomic_load(&r->restores);
    if (known == RESTORES_MIXED && named) {
        rc = restores_refuse(r);
    } else if (known != RESTORES_ONE) {
        uint64_t last = 0;
        rc = client_greet_each(r, known == RESTORES_MIXED ? GREET_NUMBERS
                                                          : GREET_REPAIR,
                               &last);
        const int mixed = !rc && restores_is_mixed(r);
        if (!rc && !mixed) {
            if (known == RESTORES_MIXED) {
                persia_client_set_last_number(r, last);
                atomic_store(&r->restored_number, last);
            }
            atomic_store(&r->restores, RESTORES_ONE);
        } else if (mixed) {
            rc = restores_refuse(r);
        }
    }
    persia_turn_give(&r->comparing);
    return rc;
}
