/* address.c: where a server is, and whether it may be talked to so. */
#include "rpc/channel.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int address_is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, host, &v4) == 1)
        return (ntohl(v4.s_addr) >> 24) == 127;
    if (inet_pton(AF_INET6, host, &v6) == 1)
        return IN6_IS_ADDR_LOOPBACK(&v6) ||
               (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
    return strcasecmp(host, "localhost") == 0;
}

static int address_wrong(const char *text, const char *why)
{
    return persia_err_set(
        PERSIA_EARG,
        "address \"%.300s\": %s; write host:port, 1.2.3.4:port or "
        "[v6 address]:port",
        text, why);
}

int address_parse(const char *text, rpc_address *out)
{
    if (!text || !*text)
        return address_wrong(text ? text : "", "it is empty");
    const char *host = text, *end, *port;
    if (*text == '[') {
        host++;
        end = strchr(host, ']');
        if (!end || end[1] != ':')
            return address_wrong(text, "no \"]:port\"");
        port = end + 2;
    } else {
        end = strrchr(text, ':');
        if (!end)
            return address_wrong(text, "no port");
        port = end + 1;
        if (memchr(host, ':', (size_t)(end - host)))
            return address_wrong(text, "more than one colon");
    }
    size_t n = (size_t)(end - host);
    if (n == 0 || n >= sizeof out->host)
        return address_wrong(text, "no host, or too long");
    for (size_t i = 0; i < n; i++)
        if (host[i] <= ' ' || host[i] > '~' || strchr("/?#@%\\", host[i]))
            return address_wrong(text, "a character that no host has");
    unsigned number = 0;
    size_t digits = strspn(port, "0123456789");
    if (digits && digits <= 5 && !port[digits])
        number = (unsigned)strtoul(port, NULL, 10);
    else
        return address_wrong(text, "the port is no number");
    if (number > 65535)
        return address_wrong(text, "no port is larger than 65535");
    memcpy(out->host, host, n);
    out->host[n] = 0;
    out->port = number;
    out->loopback = address_is_loopback(out->host);
    return PERSIA_OK;
}

static int address_not_pem(const char *text, const char *what)
{
    if (!text ||
        (strstr(text, "-----BEGIN ") && strstr(text, "-----END ")))
        return 0;
    (void)persia_err_set(
        PERSIA_EARG,
        "%s: the text is not in PEM (it has no lines -----BEGIN "
        "and -----END): give the contents of the file, not its "
        "name",
        what);
    return 1;
}

static int address_token_wrong(const char *token, const char *what)
{
    if (!token)
        return 0;
    size_t n = strlen(token);
    int printable = 1;
    for (size_t i = 0; i < n; i++)
        printable &= token[i] > ' ' && token[i] <= '~';
    if (n && n <= 1024 && printable)
        return 0;
    (void)persia_err_set(PERSIA_EARG,
                         "%s: 1 to 1024 printable characters without spaces",
                         what);
    return 1;
}

int security_check_texts(const rpc_security *s)
{
    return address_not_pem(s->ca, "security.ca") ||
                   address_not_pem(s->cert, "security.cert") ||
                   address_not_pem(s->key, "security.key") ||
                   address_token_wrong(s->token, "security.token") ||
                   address_token_wrong(s->admin_token, "security.admin_token")
               ? PERSIA_EARG
               : PERSIA_OK;
}

int security_check(const rpc_security *s, const rpc_address *a,
                   const char *address, int server)
{
    if (security_check_texts(s))
        return PERSIA_EARG;
    if (!s->cert != !s->key)
        return persia_err_set(PERSIA_EARG,
                              "%s: security.cert and security.key go together",
                              address);
    if (!server && s->cert && !s->ca)
        return persia_err_set(
            PERSIA_EARG,
            "server %s: a certificate is shown only over TLS: give "
            "security.ca too",
            address);
    if (server && s->mutual && (!s->ca || !s->cert))
        return persia_err_set(
            PERSIA_EARG,
            "serving at %s: mutual TLS needs security.ca, cert and "
            "key",
            address);
    int tls = server ? s->cert != NULL : s->ca != NULL;
    int token = s->token || s->admin_token || s->tokens;
    if (a->loopback)
        return PERSIA_OK;
    if (!tls && token)
        return persia_err_set(PERSIA_EARG,
                              "%s: a token would travel in the clear: give "
                              "certificates (TLS), or no token",
                              address);
    if (s->insecure)
        return PERSIA_OK;
    if (server && (!tls || !(s->token || s->tokens)))
        return persia_err_set(
            PERSIA_EARG,
            "serving at %s: an address that other machines reach "
            "needs TLS and tokens (--tls-cert, --tls-key, --token-file or "
            "--tokens-file; of "
            "ranks PERSIA_TLS_CERT, PERSIA_TLS_KEY, PERSIA_TOKEN_FILE), or "
            "--insecure where the network is trusted",
            address);
    if (!tls)
        return persia_err_set(
            PERSIA_EARG,
            "server %s is on another machine: give the "
            "certificate that it is trusted by (PERSIA_TLS_CA, or "
            "Security(ca=)), or Security(insecure=True) where the "
            "network is trusted",
            address);
    return PERSIA_OK;
}
