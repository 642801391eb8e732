/* security.c: credentials, tokens, and errors as statuses. */
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

grpc_server_credentials *server_credentials(const rpc_security *s)
{
    if (!s->cert)
        return grpc_insecure_server_credentials_create();
    grpc_ssl_pem_key_cert_pair pair = {s->key, s->cert};
    grpc_ssl_server_certificate_config *config =
        grpc_ssl_server_certificate_config_create(s->mutual ? s->ca : NULL,
                                                  &pair, 1);
    grpc_ssl_server_credentials_options *options =
        grpc_ssl_server_credentials_create_options_using_config(
            s->mutual
                ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            config);
    return grpc_ssl_server_credentials_create_with_options(options);
}

/* ---- tokens ---- */

static const char SCHEME[] = "Bearer ";

/* "Bearer " and the token; NULL for none. */
static int security_header_of(const char *token, char **out)
{
    *out = NULL;
    if (!token)
        return PERSIA_OK;
    size_t n = strlen(token) + 1;
    *out = malloc(sizeof SCHEME - 1 + n);
    if (!*out)
        return persia_err_set(PERSIA_ENOMEM, "out of memory: a token");
    memcpy(*out, SCHEME, sizeof SCHEME - 1);
    memcpy(*out + sizeof SCHEME - 1, token, n);
    return PERSIA_OK;
}

int guard_init(rpc_guard *g, const rpc_security *s)
{
    *g = (rpc_guard){0};
    int code = security_header_of(s->token, &g->token);
    if (code == PERSIA_OK)
        code = security_header_of(s->admin_token, &g->admin_token);
    if (code != PERSIA_OK)
        guard_free(g);
    return code;
}

static void security_forget(char *secret)
{
    if (secret)
        explicit_bzero(secret, strlen(secret));
    free(secret);
}

void guard_free(rpc_guard *g)
{
    security_forget(g->token);
    security_forget(g->admin_token);
    *g = (rpc_guard){0};
}

/* In a time that tells nothing but the length. */
static int security_same_secret(const char *secret, grpc_slice shown)
{
    size_t n = strlen(secret);
    if (GRPC_SLICE_LENGTH(shown) != n)
        return 0;
    const unsigned char *a = (const unsigned char *)secret;
    const unsigned char *b = GRPC_SLICE_START_PTR(shown);
    unsigned differ = 0;
    for (size_t i = 0; i < n; i++)
        differ |= (unsigned)(a[i] ^ b[i]);
    return differ == 0;
}

int guard_admits(const rpc_guard *g, const grpc_metadata_array *metadata,
                 int *admin)
{
    int user = 0;
    *admin = 0;
    for (size_t i = 0; i < metadata->count; i++) {
        const grpc_metadata *m = &metadata->metadata[i];
        if (grpc_slice_str_cmp(m->key, "authorization") != 0)
            continue;
        user |= g->token && security_same_secret(g->token, m->value);
        *admin |=
            g->admin_token && security_same_secret(g->admin_token, m->value);
    }
    user |= !g->token || *admin;
    if (!g->admin_token)
        *admin = user;
    return user;
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
