/* rpc: lines of tokens, who they are, and their limits. */
#include "help.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpc/access.h"

#define TOKEN "0123456789abcdef"
/* printf %s 0123456789abcdef | sha256sum */
#define DIGEST                                                                \
    "sha256:9f9f5111f7b27a781f1f1ddde5ebc2dd"                                 \
    "2b796bfc7365c9c28b548e564176929f"

static access_list *made(const char *tokens)
{
    access_list *a;
    const rpc_security s = {.tokens = tokens};
    if (access_make(&s, NULL, &a) != PERSIA_OK)
        fail_msg("%s: %s", tokens, persia_err_text());
    return a;
}

static const rpc_who *found(const access_list *a, const char *token,
                            int64_t seconds, enum rpc_reason *why)
{
    return access_find(a, token, token ? strlen(token) : 0, NULL, seconds,
                       why);
}

static void lines_say_who_has_a_token(void **state)
{
    (void)state;
    static const struct {
        const char *tokens;
        uint32_t roles;
        const char *name;
        int64_t last; /* second at which it is valid; 0: it has no end */
    } cases[] = {
        {"train a " TOKEN, RPC_TRAIN, "a", 0},
        {"train,read a " TOKEN "\n", RPC_TRAIN | RPC_READ, "a", 0},
        {"# words\n\n \t\nfeed\tb.c_d-9  " TOKEN "  \r\n", RPC_FEED,
         "b.c_d-9", 0},
        {"admin root " DIGEST, RPC_ALL, "root", 0},
        {"serve a " TOKEN " 1970-01-01", RPC_SERVE, "a", 86399},
        {"serve a " TOKEN " 2000-02-29", RPC_SERVE, "a", 951868799},
        {"serve a " TOKEN " 2026-12-31", RPC_SERVE, "a", 1798761599},
        {"serve a " TOKEN " 2100-03-01T00:00:01Z", RPC_SERVE, "a",
         4107542400},
        {"serve a " TOKEN " rate=7 2026-12-31 calls=3", RPC_SERVE, "a",
         1798761599},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        access_list *a = made(cases[i].tokens);
        enum rpc_reason why;
        const rpc_who *who = found(a, TOKEN, cases[i].last, &why);
        assert_non_null(who);
        assert_int_equal(who->roles, cases[i].roles);
        assert_string_equal(who->name, cases[i].name);
        if (cases[i].last) {
            assert_null(found(a, TOKEN, cases[i].last + 1, &why));
            assert_int_equal(why, RPC_EXPIRED);
        }
        assert_null(found(a, TOKEN "0", 0, &why));
        assert_int_equal(why, RPC_WRONG);
        assert_null(found(a, NULL, 0, &why));
        assert_int_equal(why, RPC_MISSING);
        access_drop(a);
    }
}

static void wrong_lines_are_refused_and_not_told(void **state)
{
    (void)state;
    static const char *const lines[] = {
        "", "\n# none\n", "train", "train a", "train a short",
        "boss a " TOKEN, "train,,read a " TOKEN, ",train a " TOKEN,
        "train, a " TOKEN, "train a/b " TOKEN, "Train a " TOKEN,
        "train a sha256:" TOKEN, "train a " DIGEST "0",
        "train a sha256:" TOKEN TOKEN TOKEN "0123456789ABCDEF",
        "train a " TOKEN " soon", "train a " TOKEN " 2027-13-01",
        "train a " TOKEN " 2027-02-29", "train a " TOKEN " 2027-00-10",
        "train a " TOKEN " 2027-01-00", "train a " TOKEN " 1969-12-31",
        "train a " TOKEN " 2027-01-01T24:00:00Z",
        "train a " TOKEN " 2027-01-01T10:00:00",
        "train a " TOKEN " 2027-01-01 2027-01-02",
        "train a " TOKEN " rate=", "train a " TOKEN " rate=0",
        "train a " TOKEN " rate=1 rate=2", "train a " TOKEN " rate=-1",
        "train a " TOKEN " calls=1e3", "train a " TOKEN " calls=9999999999",
        "train a " TOKEN " tables=", "train a " TOKEN " tables=a tables=b",
        "feed a " TOKEN " tables=a", "admin a " TOKEN " tables=a",
        "train a " TOKEN "\nread b " DIGEST,
        "train a peer:", "train a peer:dns:", "train a peer:a-name",
        "train a peer:dns:a\nread b peer:dns:a",
        "train caf\xc3\xa9 " TOKEN, "train a 0123456789\x7f" "abcdef",
        "train a " TOKEN " 1 2 3 4 5 6",
        TOKEN " a train",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        access_list *a = (access_list *)1;
        const rpc_security s = {.tokens = lines[i]};
        assert_int_equal(access_make(&s, NULL, &a), PERSIA_EARG);
        assert_null(a);
        assert_null(strstr(persia_err_text(), TOKEN));
    }
    char *name = malloc(200);
    snprintf(name, 200, "train %064d " TOKEN, 1);
    access_list *a;
    assert_int_equal(access_make(&(rpc_security){.tokens = name}, NULL, &a),
                     PERSIA_EARG);
    free(name);
}

static int is_name(void *ctx, const char *name)
{
    return strcmp(ctx, name) == 0;
}

static void certificates_have_lines_too(void **state)
{
    (void)state;
    static const char tokens[] = "train t peer:spiffe://c/trainer rate=9\n"
                                 "read r peer:dns:reader 1970-01-01\n"
                                 "feed f " TOKEN;
    static const struct {
        const char *token, *peer; /* NULL: none */
        const char *name;         /* NULL: no one */
        int64_t at;
        enum rpc_reason why;
    } cases[] = {
        {NULL, "spiffe://c/trainer", "t", 0, 0},
        {NULL, "dns:reader", "r", 86399, 0},
        {NULL, "dns:reader", NULL, 86400, RPC_EXPIRED},
        {NULL, "spiffe://c/trainer2", NULL, 0, RPC_MISSING},
        {NULL, "spiffe://c/", NULL, 0, RPC_MISSING},
        {NULL, "reader", NULL, 0, RPC_MISSING},
        {TOKEN, "spiffe://c/trainer", "f", 0, 0}, /* the token counts */
        {"peer:dns:reader", NULL, NULL, 0, RPC_WRONG},
        {"peer:spiffe://c/trainer", "spiffe://c/trainer", NULL, 0, RPC_WRONG},
        {NULL, NULL, NULL, 0, RPC_MISSING},
    };
    access_list *a = made(tokens);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum rpc_reason why;
        const char *token = cases[i].token;
        const rpc_peer peer = {is_name, (void *)(uintptr_t)cases[i].peer};
        const rpc_who *who =
            access_find(a, token, token ? strlen(token) : 0,
                        cases[i].peer ? &peer : NULL, cases[i].at, &why);
        assert_int_equal(who != NULL, cases[i].name != NULL);
        if (who)
            assert_string_equal(who->name, cases[i].name);
        else
            assert_int_equal(why, cases[i].why);
    }
    access_drop(a);
}

static void single_tokens_are_lines_too(void **state)
{
    (void)state;
    static const struct {
        const char *token, *admin, *tokens;
        uint32_t of_token, of_admin, of_none;
    } cases[] = {
        {NULL, NULL, NULL, RPC_ALL, RPC_ALL, RPC_ALL},
        {"tok", NULL, NULL, RPC_ALL, 0, 0},
        {"tok", "adm", NULL, RPC_USER, RPC_ALL, 0},
        {NULL, "adm", NULL, RPC_USER, RPC_ALL, RPC_USER},
        {"tok", NULL, "read a " TOKEN, RPC_USER, 0, 0},
        {NULL, NULL, "read a " TOKEN, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const rpc_security s = {.token = cases[i].token,
                                .admin_token = cases[i].admin,
                                .tokens = cases[i].tokens};
        access_list *a;
        enum rpc_reason why;
        assert_int_equal(access_make(&s, NULL, &a), PERSIA_OK);
        const rpc_who *token = found(a, "tok", 0, &why);
        const rpc_who *admin = found(a, "adm", 0, &why);
        const rpc_who *none = found(a, NULL, 0, &why);
        assert_int_equal(token ? token->roles : 0, cases[i].of_token);
        assert_int_equal(admin ? admin->roles : 0, cases[i].of_admin);
        assert_int_equal(none ? none->roles : 0, cases[i].of_none);
        access_drop(a);
    }
    access_list *a;
    enum rpc_reason why;
    const rpc_security same = {.token = "tok", .admin_token = "tok"};
    assert_int_equal(access_make(&same, NULL, &a), PERSIA_OK);
    assert_int_equal(found(a, "tok", 0, &why)->roles, RPC_ALL);
    access_drop(a);
}

static void tables_are_patterns(void **state)
{
    (void)state;
    access_list *a = made("read a " TOKEN " tables=ads_*,user?,a.b");
    enum rpc_reason why;
    const rpc_who *who = found(a, TOKEN, 0, &why);
    static const char *const own[] = {"ads_", "ads_x,y", "user1", "a.b"};
    static const char *const others[] = {"", "ads", "xads_", "user12", "aXb",
                                         "ads_*,user?,a.b"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        assert_true(persia_rpc_tables(who, own[i]));
    for (size_t i = 0; i + 1 < sizeof others / sizeof *others; i++)
        assert_false(persia_rpc_tables(who, others[i]));
    assert_true(persia_rpc_tables(&persia_rpc_everyone, "any"));
    access_drop(a);
}

static void limits_are_of_a_name(void **state)
{
    (void)state;
    const uint64_t now = 1000 * SECOND;
    access_list *a = made("train a " TOKEN " calls=2\n"
                     "train a " TOKEN "0 calls=2\n"
                     "train b " TOKEN "1 rate=4\n"
                     "train c " TOKEN "2\n");
    enum rpc_reason why;
    const rpc_who *one = found(a, TOKEN, 0, &why);
    const rpc_who *two = found(a, TOKEN "0", 0, &why);
    access_meter *m = access_meter_of(one);
    assert_ptr_equal(m, access_meter_of(two));
    assert_null(access_meter_of(found(a, TOKEN "2", 0, &why)));
    assert_null(access_meter_of(&persia_rpc_everyone));
    assert_int_equal(access_meter_enter(m, one, now), 0);
    assert_int_equal(access_meter_enter(m, two, now), 0);
    assert_true(access_meter_enter(m, one, now) > 0);
    access_meter_leave(m);
    assert_int_equal(access_meter_enter(m, two, now), 0);

    /* A file that is read again: calls that have begun still count. */
    access_list *next;
    const rpc_security s = {.tokens = "train a " TOKEN "5 calls=3\n"};
    assert_int_equal(access_make(&s, a, &next), PERSIA_OK);
    const rpc_who *later = found(next, TOKEN "5", 0, &why);
    assert_ptr_equal(access_meter_of(later), m);
    assert_int_equal(access_meter_enter(m, later, now), 0);
    assert_true(access_meter_enter(m, later, now) > 0);
    access_drop(next);

    const rpc_who *rated = found(a, TOKEN "1", 0, &why);
    m = access_meter_of(rated);
    for (int i = 0; i < 4; i++)
        assert_int_equal(access_meter_enter(m, rated, now), 0);
    assert_int_equal(access_meter_enter(m, rated, now), 251);
    assert_true(access_meter_enter(m, rated, now + SECOND / 8) > 0);
    assert_int_equal(access_meter_enter(m, rated, now + SECOND / 4), 0);
    assert_true(access_meter_enter(m, rated, now + SECOND / 4) > 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(access_meter_enter(m, rated, now + 9 * SECOND), 0);
    assert_true(access_meter_enter(m, rated, now + 9 * SECOND) > 0);
    access_drop(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_say_who_has_a_token),
        cmocka_unit_test(wrong_lines_are_refused_and_not_told),
        cmocka_unit_test(certificates_have_lines_too),
        cmocka_unit_test(single_tokens_are_lines_too),
        cmocka_unit_test(tables_are_patterns),
        cmocka_unit_test(limits_are_of_a_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
