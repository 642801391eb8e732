/* security.c: credentials, and errors as statuses. */
#include "rpc/core.h"

#include <stdlib.h>
#include <string.h>

/* ---- TLS ---- */

grpc_channel_credentials *client_credentials(const rpc_security *s)
{
    if (!s->ca)
        return grpc_insecure_credentials_create();
    grpc_ssl_pem_key_cert_pair pair = {s->key, s->cert};
    return grpc_ssl_credentials_create_ex(s->ca, s->cert ? &pair : NULL, NULL,
                                          NULL);
}

/* What a server asks for its certificates at each handshake. */
struct rpc_renewed {
    identity *identity;
    _Atomic(uint64_t) version; /* that gRPC has; 0: none */
};

static grpc_ssl_certificate_config_reload_status
renewed_fetch(void *user, grpc_ssl_server_certificate_config **out)
{
    rpc_renewed *r = user;
    identity *i = r->identity;
    pthread_rwlock_rdlock(&i->lock);
    const uint64_t version = atomic_load(&i->version);
    const int is_new = atomic_exchange(&r->version, version) != version;
    if (is_new) {
        grpc_ssl_pem_key_cert_pair pair = {i->texts.key, i->texts.cert};
        /* gRPC wants an authority; without clients' certificates it does not
         * use it. */
        *out = grpc_ssl_server_certificate_config_create(
            i->texts.mutual ? i->texts.ca : i->texts.cert, &pair, 1);
    }
    pthread_rwlock_unlock(&i->lock);
    return is_new ? GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW
                  : GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
}

int server_credentials(const rpc_security *s, rpc_renewed **renewed,
                       grpc_server_credentials **out)
{
    *renewed = NULL;
    *out = NULL;
    if (!s->cert) {
        *out = grpc_insecure_server_credentials_create();
        return PERSIA_OK;
    }
    rpc_renewed *r = calloc(1, sizeof *r);
    if (!r)
        return persia_err_set(PERSIA_ENOMEM, "no memory for certificates");
    int rc = identity_open(s, &r->identity);
    if (rc) {
        free(r);
        return rc;
    }
    *renewed = r;
    *out = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            s->mutual
                ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            renewed_fetch, r));
    return PERSIA_OK;
}

void renewed_free(rpc_renewed *r)
{
    if (!r)
        return;
    identity_close(r->identity);
    free(r);
}

/* ---- tokens ---- */

grpc_slice token_header(const char *token)
{
    static const char scheme[] = "Bearer ";
    const size_t n = sizeof scheme - 1;
    if (!token)
        return grpc_empty_slice();
    grpc_slice header = grpc_slice_malloc(n + strlen(token));
    memcpy(GRPC_SLICE_START_PTR(header), scheme, n);
    memcpy(GRPC_SLICE_START_PTR(header) + n, token, strlen(token));
    return header;
}

/* ---- errors ---- */

char *slice_text(grpc_slice s)
{
    size_t n = GRPC_SLICE_LENGTH(s);
    char *text = malloc(n + 1);
    if (text) {
        slice_copy(text, s);
        text[n] = 0;
    }
    return text;
}

grpc_status_code status_of_code(int code)
{
    switch (code) {
    case PERSIA_OK:
        return GRPC_STATUS_OK;
    case PERSIA_EARG:
    case PERSIA_EDTYPE:
    case PERSIA_ESHAPE:
    case PERSIA_EOFFSETS:
    case PERSIA_EFEATURE:
    case PERSIA_ENONFINITE:
    case PERSIA_EDATA:
    case PERSIA_EPROTOCOL:
        return GRPC_STATUS_INVALID_ARGUMENT;
    case PERSIA_ENOMEM:
    case PERSIA_ECAPACITY:
    case PERSIA_ELIMIT:
        return GRPC_STATUS_RESOURCE_EXHAUSTED;
    case PERSIA_ETICKET:
    case PERSIA_EMISMATCH:
    case PERSIA_EROWSMISSING:
    case PERSIA_ECLOSED:
    case PERSIA_ESTALE:
    case PERSIA_EINCOMPLETE:
    case PERSIA_EMOVED:
        return GRPC_STATUS_FAILED_PRECONDITION;
    case PERSIA_ECORRUPT:
    case PERSIA_ELOST:
    case PERSIA_EREPLACED:
        return GRPC_STATUS_DATA_LOSS;
    case PERSIA_EINTR:
        return GRPC_STATUS_ABORTED;
    case PERSIA_ETIMEOUT:
        return GRPC_STATUS_DEADLINE_EXCEEDED;
    case PERSIA_EUNAVAILABLE:
        return GRPC_STATUS_UNAVAILABLE;
    case PERSIA_EDENIED:
        return GRPC_STATUS_PERMISSION_DENIED;
    case PERSIA_ENOTFOUND:
        return GRPC_STATUS_NOT_FOUND;
    default:
        return GRPC_STATUS_INTERNAL;
    }
}

/* What gRPC itself, or a server that is not ours, means. */
static int code_of_status(grpc_status_code status)
{
    switch (status) {
    case GRPC_STATUS_OK:
        return PERSIA_OK;
    case GRPC_STATUS_DEADLINE_EXCEEDED:
        return PERSIA_ETIMEOUT;
    case GRPC_STATUS_RESOURCE_EXHAUSTED:
        return PERSIA_ELIMIT;
    case GRPC_STATUS_UNAUTHENTICATED:
    case GRPC_STATUS_PERMISSION_DENIED:
        return PERSIA_EDENIED;
    case GRPC_STATUS_UNIMPLEMENTED:
    case GRPC_STATUS_INVALID_ARGUMENT:
    case GRPC_STATUS_NOT_FOUND:
        return PERSIA_EPROTOCOL;
    /* A connection that breaks in the middle of a call shows as one of
     * UNAVAILABLE, INTERNAL, UNKNOWN and CANCELLED. */
    default:
        return PERSIA_EUNAVAILABLE;
    }
}

int status_to_code(grpc_status_code status,
                   const grpc_metadata_array *trailing, int *sent)
{
    *sent = 0;
    if (status == GRPC_STATUS_OK)
        return PERSIA_OK;
    /* The caller's name has too many calls: a later one may be taken. */
    for (size_t i = 0; i < trailing->count; i++)
        if (grpc_slice_str_cmp(trailing->metadata[i].key, WAIT_KEY) == 0)
            return PERSIA_EUNAVAILABLE;
    for (size_t i = 0; i < trailing->count; i++) {
        const grpc_metadata *m = &trailing->metadata[i];
        if (grpc_slice_str_cmp(m->key, ERROR_KEY) != 0)
            continue;
        *sent = 1;
        for (int code = PERSIA_OK + 1; code < PERSIA_ERROR_COUNT; code++)
            if (grpc_slice_str_cmp(m->value, persia_err_name(code)) == 0)
                return code;
        return PERSIA_EINTERNAL; /* of a later version */
    }
    return code_of_status(status);
}

int core_has_name(void *ctx, const char *name)
{
    const int host = strncmp(name, "dns:", 4) == 0;
    const char *want = host ? name + 4 : name;
    const size_t n = strlen(want);
    grpc_auth_context *a = grpc_call_auth_context(ctx);
    const grpc_auth_property *p = NULL;
    if (a && grpc_auth_context_peer_is_authenticated(a)) {
        grpc_auth_property_iterator i =
            grpc_auth_context_find_properties_by_name(
                a, host ? GRPC_PEER_DNS_PROPERTY_NAME
                        : GRPC_PEER_URI_PROPERTY_NAME);
        do
            p = grpc_auth_property_iterator_next(&i);
        while (p && (p->value_length != n || memcmp(p->value, want, n) != 0));
    }
    const int has = p != NULL;
    grpc_auth_context_release(a);
    return has;
}
