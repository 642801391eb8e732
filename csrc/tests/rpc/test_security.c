/* rpc: addresses, tokens, TLS. */
#include "help.h"

#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rpc/channel.h"

extern char **environ;

/* ---- addresses ---- */

static void addresses_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *text, *host;
        unsigned port;
        int loopback;
    } good[] = {
        {"localhost:1", "localhost", 1, 1},
        {"LOCALHOST:65535", "LOCALHOST", 65535, 1},
        {"127.0.0.1:0", "127.0.0.1", 0, 1},
        {"127.9.8.7:80", "127.9.8.7", 80, 1},
        {"[::1]:80", "::1", 80, 1},
        {"[::ffff:127.0.0.1]:80", "::ffff:127.0.0.1", 80, 1},
        {"0.0.0.0:80", "0.0.0.0", 80, 0},
        {"[::]:80", "::", 80, 0},
        {"[fe80::1]:80", "fe80::1", 80, 0},
        {"10.127.0.1:80", "10.127.0.1", 80, 0},
        {"128.0.0.1:80", "128.0.0.1", 80, 0},
        {"ps-0.ps.default.svc:8888", "ps-0.ps.default.svc", 8888, 0},
        {"localhost.evil.example:1", "localhost.evil.example", 1, 0},
        {"127.0.0.1.evil.example:1", "127.0.0.1.evil.example", 1, 0},
    };
    rpc_address a;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_int_equal(address_parse(good[i].text, &a), PERSIA_OK);
        assert_string_equal(a.host, good[i].host);
        assert_int_equal(a.port, good[i].port);
        assert_int_equal(a.loopback, good[i].loopback);
    }
    static const char *const bad[] = {
        "",          "host",       ":80",        "host:",
        "host:x",    "host:65536", "host:-1",    "host:+1",
        "host: 1",   "host:1 ",    "ho st:1",    "::1:80",
        "[::1]",     "[::1]80",    "[::1:80",    "[]:80",
        "unix:/tmp", "unix:1:2",   "dns:///a:1", "a/b:1",
        "a@b:1",     "host:123456", "host:00000000000000000080",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(address_parse(bad[i], &a), PERSIA_EARG);
        assert_non_null(strstr(persia_err_text(), "host:port"));
    }
    assert_int_equal(address_parse(NULL, &a), PERSIA_EARG);
    char text[400];
    memset(text, 'a', sizeof text);
    memcpy(text + sizeof text - 4, ":80", 4);
    assert_int_equal(address_parse(text, &a), PERSIA_EARG);
}

static const char PEM[] = "-----BEGIN CERTIFICATE-----\n"
                          "-----END CERTIFICATE-----\n";

static void what_may_be_served(void **state)
{
    (void)state;
    rpc_address here, there;
    assert_int_equal(address_parse("127.0.0.1:1", &here), PERSIA_OK);
    assert_int_equal(address_parse("0.0.0.0:1", &there), PERSIA_OK);
    const struct {
        rpc_security s;
        int server, here, there; /* whether it may be, and where */
    } cases[] = {
        {{0}, 1, 1, 0},
        {{.insecure = 1}, 1, 1, 1},
        {{.token = "t"}, 1, 1, 0},
        {{.token = "t", .insecure = 1}, 1, 1, 0},
        {{.admin_token = "t", .insecure = 1}, 1, 1, 0},
        {{.cert = PEM, .key = PEM}, 1, 1, 0},
        {{.cert = PEM, .key = PEM, .insecure = 1}, 1, 1, 1},
        {{.cert = PEM, .key = PEM, .admin_token = "t"}, 1, 1, 0},
        {{.cert = PEM, .key = PEM, .token = "t"}, 1, 1, 1},
        {{.cert = PEM, .token = "t"}, 1, 0, 0},
        {{.key = PEM, .token = "t"}, 1, 0, 0},
        {{.cert = PEM, .key = PEM, .token = "t", .mutual = 1}, 1, 0, 0},
        {{.ca = PEM, .token = "t", .mutual = 1}, 1, 0, 0},
        {{.ca = PEM, .cert = PEM, .key = PEM, .token = "t", .mutual = 1},
         1, 1, 1},
        {{.ca = "-----BEGIN CERTIFICATE-----"}, 1, 0, 0},
        {{.cert = "server.pem", .key = PEM, .token = "t"}, 1, 0, 0},
        {{.token = ""}, 1, 0, 0},
        {{.token = "a b"}, 1, 0, 0},
        {{.token = "a\n"}, 1, 0, 0},
        {{.admin_token = "caf\xc3\xa9"}, 1, 0, 0},
        {{0}, 0, 1, 0},
        {{.insecure = 1}, 0, 1, 1},
        {{.token = "t"}, 0, 1, 0},
        {{.token = "t", .insecure = 1}, 0, 1, 0},
        {{.ca = PEM}, 0, 1, 1},
        {{.ca = PEM, .token = "t"}, 0, 1, 1},
        {{.ca = PEM, .cert = PEM, .token = "t"}, 0, 0, 0},
        {{.cert = PEM, .key = PEM}, 0, 0, 0},
        {{.ca = "/etc/ssl/ca.pem"}, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const rpc_security *s = &cases[i].s;
        int a = security_check(s, &here, "127.0.0.1:1", cases[i].server);
        assert_int_equal(a, cases[i].here ? PERSIA_OK : PERSIA_EARG);
        a = security_check(s, &there, "0.0.0.0:1", cases[i].server);
        assert_int_equal(a, cases[i].there ? PERSIA_OK : PERSIA_EARG);
    }
}

static void other_machines_are_refused_without_tls_and_token(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    rpc_server *s = (rpc_server *)1;
    config.address = "0.0.0.0:0";
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_EARG);
    assert_null(s);
    assert_non_null(strstr(persia_err_text(), "TLS"));
    rpc_channel_config to = {.address = "192.0.2.1:1",
                             .message_limit = 1000,
                             .methods = &test_methods};
    rpc_channel *c = (rpc_channel *)1;
    assert_int_equal(persia_rpc_channel_open(&to, &c), PERSIA_EARG);
    assert_null(c);
    to.security = (rpc_security){.token = "secret", .insecure = 1};
    assert_int_equal(persia_rpc_channel_open(&to, &c), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "in the clear"));
    assert_null(strstr(persia_err_text(), "secret"));
    to.security.insecure = 0;
    to.address = "127.0.0.1:0";
    assert_int_equal(persia_rpc_channel_open(&to, &c), PERSIA_EARG);

    config.security.insecure = 1;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    c = channel_to(persia_rpc_server_port(s));
    echo(c, WIRE_HELLO, 1, 100);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* ---- tokens ---- */

/* What the server says of a caller: "admin", "user", or the error's name. */
static const char *who_calls(uint32_t method, int port,
                             const rpc_security *security)
{
    rpc_channel *c = channel_with(port, security);
    wire_out o = message_of("x", 1, 1);
    rpc_reply reply;
    int code = rpc_wait(c, method, &o, 20 * SECOND, &reply);
    const char *answer = code != PERSIA_OK ? persia_err_name(code)
                         : reply.n == 5    ? "admin"
                                           : "user";
    persia_rpc_reply_free(&reply);
    persia_rpc_channel_close(c);
    return answer;
}

static const char *who(int port, const rpc_security *security)
{
    return who_calls(WIRE_STATS, port, security);
}

static _Atomic(int) denied_n;
static const char *denied_method;

static void on_denied(void *ctx, const char *method, const char *peer,
                      const char *name, const char *reason)
{
    (void)ctx;
    (void)name;
    (void)reason;
    denied_n += strstr(peer, "127.0.0.1") != NULL;
    denied_method = method;
}

static rpc_server *secure_server(deck *d, rpc_security security)
{
    rpc_server_config config = server_config_of(d);
    rpc_server *s;
    config.security = security;
    config.denied = on_denied;
    if (persia_rpc_server_start(&config, &s) != PERSIA_OK)
        fail_msg("%s", persia_err_text());
    return s;
}

static void tokens_say_who_may_what(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    unsigned admitted = 0;
    static const struct {
        const char *token, *admin;    /* the server's */
        const char *shown, *admin_shown; /* the client's */
        const char *answer, *admin_answer; /* NULL: the same */
    } cases[] = {
        {NULL, NULL, NULL, NULL, "admin", NULL},
        {NULL, NULL, "any", NULL, "admin", NULL},
        {"tok", NULL, "tok", NULL, "admin", NULL},
        {"tok", NULL, NULL, NULL, "AccessDenied", NULL},
        {"tok", NULL, "toK", NULL, "AccessDenied", NULL},
        {"tok", NULL, "to", NULL, "AccessDenied", NULL},
        {"tok", NULL, "tokk", NULL, "AccessDenied", NULL},
        {"tok", "adm", "tok", NULL, "user", "AccessDenied"},
        {"tok", "adm", NULL, "adm", "admin", NULL},
        {"tok", "adm", "tok", "adm", "user", "admin"},
        {"tok", "adm", "adm", NULL, "admin", NULL},
        {"tok", "adm", NULL, "tok", "user", "AccessDenied"},
        {"tok", "adm", NULL, "adn", "AccessDenied", NULL},
        {NULL, "adm", NULL, NULL, "user", "AccessDenied"},
        {NULL, "adm", "any", NULL, "user", "AccessDenied"},
        {NULL, "adm", NULL, "adm", "admin", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rpc_server *s = secure_server(
            &d, (rpc_security){.token = cases[i].token,
                               .admin_token = cases[i].admin});
        int port = persia_rpc_server_port(s);
        rpc_security shown = {.token = cases[i].shown,
                              .admin_token = cases[i].admin_shown};
        const char *expected = cases[i].answer;
        int denied = !strcmp(expected, "AccessDenied");
        assert_string_equal(who_calls(WIRE_STATS, port, &shown), expected);
        if (cases[i].admin_answer)
            expected = cases[i].admin_answer;
        denied += !strcmp(expected, "AccessDenied");
        admitted += 2 - (unsigned)denied;
        assert_string_equal(who_calls(WIRE_SNAPSHOT, port, &shown), expected);
        assert_int_equal(persia_rpc_denied_sum(persia_rpc_server_denied(s)),
                         denied);
        persia_rpc_server_stop(s, SECOND);
        assert_int_equal(denied_n, denied);
        if (denied)
            assert_string_equal(denied_method,
                                persia_wire_paths[WIRE_SNAPSHOT]);
        denied_n = 0;
    }
    assert_int_equal(d.requests, admitted); /* the others never arrived */
    deck_stop(&d);
}

/* ---- TLS ---- */

static char folder[] = "/tmp/persia-test-rpc-XXXXXX";
static int has_certificates;

static int run_openssl(const char *arguments)
{
    char command[1024];
    snprintf(command, sizeof command,
             "cd %s && openssl %s >/dev/null 2>&1", folder, arguments);
    char *argv[] = {"sh", "-c", command, NULL};
    pid_t child;
    int status;
    if (posix_spawnp(&child, "sh", NULL, NULL, argv, environ) != 0)
        return 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* An authority `ca` and a certificate of it; `other` stands alone. */
static int make_certificates(void)
{
    static const char *const steps[] = {
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        " -days 2 -subj /CN=test-ca -keyout ca.key -out ca.pem",
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        " -days 2 -subj /CN=other-ca -keyout other.key -out other.pem",
        "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        " -subj /CN=persia -keyout node.key -out node.csr",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial"
        " -days 2 -extfile names -out node.pem",
    };
    char path[256];
    snprintf(path, sizeof path, "%s/names", folder);
    FILE *f = fopen(path, "w");
    if (!f)
        return 0;
    fputs("subjectAltName=DNS:ps.persia.test,IP:127.0.0.1\n", f);
    fclose(f);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (!run_openssl(steps[i]))
            return 0;
    return 1;
}

static char *file_text(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    char *text = calloc(1, 16384);
    assert_true(fread(text, 1, 16383, f) > 0);
    fclose(f);
    return text;
}

typedef struct certificates {
    char *ca, *other, *other_key, *cert, *key;
} certificates;

/* Skips the test where there are none. */
static certificates certificates_load(void)
{
    if (!has_certificates) {
        print_message("no openssl program here: TLS is not tested\n");
        skip();
    }
    return (certificates){file_text("ca.pem"), file_text("other.pem"),
                          file_text("other.key"), file_text("node.pem"),
                          file_text("node.key")};
}

static void certificates_free(certificates *k)
{
    free(k->ca);
    free(k->other);
    free(k->other_key);
    free(k->cert);
    free(k->key);
}

static void tls_and_token_serve_other_machines(void **state)
{
    NEED_GRPC();
    certificates k = certificates_load();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.address = "0.0.0.0:0";
    config.security =
        (rpc_security){.cert = k.cert, .key = k.key, .token = "tok"};
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    int port = persia_rpc_server_port(s);
    rpc_security good = {.ca = k.ca, .token = "tok"};
    rpc_channel *c = channel_with(port, &good);
    echo(c, WIRE_HELLO, 1, 100);
    echo(c, WIRE_PULL, 2, 20 << 20);
    persia_rpc_channel_close(c);

    rpc_security s_other = {.ca = k.other, .token = "tok"};
    assert_string_equal(who(port, &s_other), "AccessDenied");
    assert_non_null(strstr(persia_err_text(), "certificate"));
    rpc_security s_plain = {.token = "tok"};
    assert_string_equal(who(port, &s_plain), "Unavailable");
    assert_non_null(strstr(persia_err_text(), "TLS"));
    rpc_security s_wrong = {.ca = k.ca, .token = "wrong"};
    assert_string_equal(who(port, &s_wrong), "AccessDenied");
    rpc_security s_name = {
        .ca = k.ca, .token = "tok", .server_name = "ps.persia.test"};
    assert_string_equal(who(port, &s_name), "admin");
    s_name.server_name = "bad.persia.test";
    assert_string_equal(who(port, &s_name), "AccessDenied");
    assert_non_null(strstr(persia_err_text(), "bad.persia.test"));
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
    certificates_free(&k);
}

static void mutual_tls_asks_for_the_clients_certificate(void **state)
{
    NEED_GRPC();
    certificates k = certificates_load();
    deck d;
    deck_start(&d);
    rpc_server *s = secure_server(
        &d, (rpc_security){
                .ca = k.ca, .cert = k.cert, .key = k.key, .mutual = 1});
    int port = persia_rpc_server_port(s);
    rpc_security good = {.ca = k.ca, .cert = k.cert, .key = k.key};
    assert_string_equal(who(port, &good), "admin");
    rpc_security none = {.ca = k.ca};
    assert_string_equal(who(port, &none), "Unavailable");
    rpc_security foreign = {
        .ca = k.ca, .cert = k.other, .key = k.other_key};
    assert_string_equal(who(port, &foreign), "Unavailable");
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
    certificates_free(&k);
}

static void certificates_that_do_not_fit_are_an_error(void **state)
{
    NEED_GRPC();
    certificates k = certificates_load();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.security = (rpc_security){.cert = k.cert, .key = k.other_key};
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s),
                     PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), "certificate"));
    config.security = (rpc_security){.cert = PEM, .key = PEM};
    assert_int_equal(persia_rpc_server_start(&config, &s),
                     PERSIA_EUNAVAILABLE);

    s = secure_server(&d, (rpc_security){.cert = k.cert, .key = k.key});
    rpc_security broken = {.ca = PEM};
    assert_string_equal(who(persia_rpc_server_port(s), &broken),
                        "Unavailable");
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
    certificates_free(&k);
}

/* ---- renewal ---- */

static uint32_t renew(rpc_security s, uint64_t source)
{
    uint32_t users;
    s.source = source;
    if (persia_rpc_renew(&s, &users) != PERSIA_OK)
        fail_msg("%s", persia_err_text());
    assert_int_equal(persia_rpc_users(source), users);
    return users;
}

static void a_server_shows_renewed_certificates(void **state)
{
    NEED_GRPC();
    certificates k = certificates_load();
    deck d;
    deck_start(&d);
    rpc_server *s = secure_server(
        &d, (rpc_security){.cert = k.cert, .key = k.key, .token = "tok",
                           .source = 71});
    const int port = persia_rpc_server_port(s);
    const rpc_security first = {.ca = k.ca, .token = "tok"};
    const rpc_security second = {.ca = k.other, .token = "new",
                                 .server_name = "other-ca"};
    rpc_channel *c = channel_with(port, &first);
    echo(c, WIRE_HELLO, 1, 100);
    assert_string_equal(who(port, &second), "AccessDenied");

    /* Its gate and its port are users. */
    assert_int_equal(renew((rpc_security){.cert = k.other,
                                          .key = k.other_key,
                                          .token = "new"},
                           71),
                     2);
    assert_string_equal(who(port, &second), "admin");
    assert_string_equal(who(port, &first), "AccessDenied");
    /* The connection is there, and its token is not. */
    assert_int_equal(call_with(c, WIRE_HELLO, "x", 1, 20 * SECOND),
                     PERSIA_EDENIED);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    assert_int_equal(persia_rpc_users(71), 0);
    deck_stop(&d);
    certificates_free(&k);
}

static void on_reply(void *ctx, int rc, rpc_reply *reply)
{
    persia_rpc_reply_free(reply);
    atomic_store((_Atomic(int) *)ctx, rc + 1);
}

static void a_renewed_channel_connects_again(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = secure_server(
        &d, (rpc_security){.tokens = "train a 0123456789abcdef\n"
                                     "train a fedcba9876543210\n"});
    const rpc_security old = {.token = "0123456789abcdef", .source = 72};
    rpc_channel *c = channel_with(persia_rpc_server_port(s), &old);
    echo(c, WIRE_HELLO, 1, 100);
    /* One that has begun ends on its way. */
    wire_out o = message_of("x", 1, 1);
    _Atomic(int) answered = 0;
    assert_int_equal(persia_rpc_start(c, WIRE_PUSH, &o, 20 * SECOND, on_reply,
                                      &answered),
                     PERSIA_OK);
    deck_wait_parked(&d, 1);
    for (int i = 0; i < 20; i++) {
        const char *token = i % 2 ? "0123456789abcdef" : "fedcba9876543210";
        assert_int_equal(renew((rpc_security){.token = token}, 72), 1);
        echo(c, WIRE_PULL, 2, 100000);
    }
    assert_int_equal(answered, 0);
    deck_release(&d);
    while (!atomic_load(&answered))
        sleep_ms(1);
    assert_int_equal(answered, PERSIA_OK + 1);
    /* Nothing changes for a text that is wrong. */
    rpc_security wrong = {.token = "two words", .source = 72};
    uint32_t users;
    assert_int_equal(persia_rpc_renew(&wrong, &users), PERSIA_EARG);
    echo(c, WIRE_HELLO, 1, 100);
    assert_int_equal(renew((rpc_security){.token = "another"}, 73), 0);
    assert_int_equal(renew((rpc_security){.token = "unknown"}, 72), 1);
    assert_int_equal(call_with(c, WIRE_HELLO, "x", 1, 20 * SECOND),
                     PERSIA_EDENIED);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void limits_are_tried_again(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = secure_server(
        &d, (rpc_security){.tokens = "train one 0123456789abcdef calls=1\n"
                                     "train two fedcba9876543210 calls=1\n"});
    const int port = persia_rpc_server_port(s);
    const rpc_security one = {.token = "0123456789abcdef"};
    const rpc_security two = {.token = "fedcba9876543210"};
    rpc_channel *c = channel_with(port, &one);
    wire_out o = message_of("x", 1, 1);
    _Atomic(int) answered = 0;
    assert_int_equal(persia_rpc_start(c, WIRE_PUSH, &o, 20 * SECOND, on_reply,
                                      &answered),
                     PERSIA_OK);
    deck_wait_parked(&d, 1);
    assert_string_equal(who(port, &one), "Unavailable");
    assert_string_equal(who(port, &two), "user");
    const rpc_denied *denied = persia_rpc_server_denied(s);
    assert_int_equal(denied->n[RPC_LIMIT][RPC_AT_TRAIN], 1);
    deck_release(&d);
    while (!atomic_load(&answered))
        sleep_ms(1);
    /* The answer may be there before its call has left the server. */
    while (strcmp(who(port, &one), "user") != 0)
        sleep_ms(1);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static int set_up(void **state)
{
    (void)state;
    if (!mkdtemp(folder))
        return -1;
    has_certificates = make_certificates();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    static const char *const names[] = {
        "ca.key", "ca.pem", "ca.srl",   "other.key", "other.pem",
        "names",  "node.key", "node.csr", "node.pem",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        (void)unlink(path);
    }
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(addresses_are_read),
        cmocka_unit_test(what_may_be_served),
        cmocka_unit_test(other_machines_are_refused_without_tls_and_token),
        cmocka_unit_test(tokens_say_who_may_what),
        cmocka_unit_test(tls_and_token_serve_other_machines),
        cmocka_unit_test(mutual_tls_asks_for_the_clients_certificate),
        cmocka_unit_test(certificates_that_do_not_fit_are_an_error),
        cmocka_unit_test(a_server_shows_renewed_certificates),
        cmocka_unit_test(a_renewed_channel_connects_again),
        cmocka_unit_test(limits_are_tried_again),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
