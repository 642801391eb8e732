/* Lines of a server's log: who was denied, who changed what. */
#include "tests/server/folders.h"

#include <fcntl.h>

#include "base/lines.h"

static int ends[2]; /* of a pipe: read, write */
static char text[4096];

static int pipe_make(void **state)
{
    (void)state;
    return pipe2(ends, O_NONBLOCK);
}

static int pipe_free(void **state)
{
    (void)state;
    close(ends[0]);
    close(ends[1]);
    return 0;
}

/* What was written since the last time. */
static const char *said(void)
{
    ssize_t n = read(ends[0], text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    return text;
}

static size_t lines_of(const char *all)
{
    size_t n = 0;
    for (; *all; all++)
        n += *all == '\n';
    return n;
}

static void expect_line(const char *fields)
{
    (void)said();
    if (lines_of(text) != 1 || !strstr(text, fields))
        fail_msg("%s", text);
}

static void deny(server *v, uint32_t method, wire_out o, const rpc_who *who)
{
    pending *c = call_start_as(v, method, &o, SECOND, who);
    expect(call_wait(c), PERSIA_EDENIED, "");
}

static void the_reason_of_a_denied_call_is_logged(void **state)
{
    static const rpc_who reader = {
        .name = "r", .roles = RPC_READ, .tables = "a"};
    (void)state;
    server v = server_with_lines(0, 1, base, 0, ends[1]);
    declare_two(&v, 1);
    wire_hello hello = {.caller = caller_of(&v), .version = WIRE_VERSION,
                        .name_space = "test", .stream = STREAM};
    deny(&v, WIRE_HELLO, ENCODED(hello, &hello), &reader);
    expect_line("/Hello reason=role\n");
    wire_rows rows = {.caller = caller_of(&v), .no = 1};
    deny(&v, WIRE_GET_ROWS, ENCODED(rows, &rows), &reader);
    expect_line("/GetRows reason=table\n");
    server_stop(&v);
}

static void who_changes_what_is_logged(void **state)
{
    (void)state;
    server v = server_with_lines(0, 1, base, 0, ends[1]);
    declare_two(&v, 1);
    assert_string_equal(said(), "");
    static const rpc_who user = {.name = "one", .roles = RPC_USER};
    wire_stats stats = {.caller = caller_of(&v)};
    deny(&v, WIRE_SNAPSHOT, ENCODED(stats, &stats), &user);
    expect_line("Z denied peer=this process name=one method=/persia.v1."
                "ParameterServer/Snapshot reason=role\n");
    persia_service_denied(v.s, "/s/M", "ipv4:10.0.0.7:1", "", "wrong");
    expect_line("Z denied peer=ipv4:10.0.0.7:1 name= method=/s/M "
                "reason=wrong\n");
    uint64_t id = 3;
    wire_rows put = {.caller = caller_of(&v), .no = 1, .clear = 1};
    expect(CALL(&v, PUT_ROWS, rows, &put), PERSIA_OK, "");
    expect_line("Z cleared peer=this process client=0000000000000001 "
                "table=b\n");
    put = (wire_rows){.caller = caller_of(&v), .no = 1, .erase = 1, .n = 1,
                      .ids = &id};
    expect(CALL(&v, PUT_ROWS, rows, &put), PERSIA_OK, "");
    expect_line("Z erased peer=");
    put = (wire_rows){.caller = caller_of(&v), .no = 1, .drop = 1};
    expect(CALL(&v, PUT_ROWS, rows, &put), PERSIA_OK, "");
    expect_line("Z dropped peer=");
    wire_hello m = {.caller = {.client = 7, .incarnation = 2},
                    .version = WIRE_VERSION, .name_space = "test",
                    .stream = STREAM, .rank = 3, .world = 4};
    expect(CALL(&v, HELLO, hello, &m), PERSIA_OK, "");
    expect_line("Z takeover peer=this process client=0000000000000007 rank=3 "
                "stream=0000000000000064 incarnation=2\n");
    expect(CALL(&v, HELLO, hello, &m), PERSIA_OK, ""); /* its own again */
    make_folder("empty", "secret");
    uint64_t pushes[] = {1};
    wire_restore r = {.folder = "empty", .proof = "secret", .lineage = 77,
                      .pushes = pushes, .pushes_n = 1};
    (void)restore_prepare(&v, &r);
    assert_string_equal(said(), "");
    expect(restore_ask(&v, &r, RESTORE_COMMIT), PERSIA_OK, "");
    expect_line("Z restored peer=this process client=0000000000000001 "
                "root=root folder=empty lineage=000000000000004d rows=0\n");
    server_stop(&v);
}

/* At the end of a save: its beginning says nothing of it. */
static void rows_that_were_not_written_are_logged(void **state)
{
    (void)state;
    server v = server_with_lines(0, 1, base, 0, ends[1]);
    declare_two(&v, 1);
    wire_snapshot m = snapshot_of(&v, SNAPSHOT_BEGIN, "nowhere");
    wire_snapshot_reply reply;
    result r = CALL(&v, SNAPSHOT, snapshot, &m);
    for (m.verb = SNAPSHOT_STATUS; r.code == PERSIA_OK; nap()) {
        result_free(&r);
        r = CALL(&v, SNAPSHOT, snapshot, &m);
    }
    result_free(&r);
    assert_string_equal(said(), "");
    m.verb = SNAPSHOT_END;
    r = CALL(&v, SNAPSHOT, snapshot, &m);
    DECODE(&r, snapshot_reply, &reply);
    assert_true(reply.failed && !reply.whole);
    result_free(&r);
    expect_line("Z not written peer=this process client=0000000000000001 "
                "root=root folder=nowhere rows=0\n");
    snapshot_end(&v, "nowhere"); /* the answer was lost */
    assert_string_equal(said(), "");
    server_stop(&v);
}

/* A line with one field of text, or a number. */
static uint64_t line(process_lines *l, enum line_kind kind, const char *text)
{
    const line_field field = {.name = "i", .text = text};
    return persia_lines_write(l, kind, &field, 1);
}

static uint64_t later; /* added to the machine's clock */
static uint64_t (*real_now)(void *ctx);

static uint64_t now(void *ctx)
{
    return real_now(ctx) + later;
}

static void many_lines_become_a_count(void **state)
{
    (void)state;
    persia_system machine = *persia_system_get();
    real_now = machine.now;
    machine.now = now;
    persia_system_install(&machine);
    process_lines l;
    persia_lines_init(&l, &(lines_to){.fd = ends[1]});
    for (int i = 0; i < 3; i++)
        assert_true(line(&l, LINE_DENIED, "a") == UINT64_MAX);
    assert_int_equal(lines_of(said()), 3);
    uint64_t due = 0;
    for (int i = 0; i < 1000; i++)
        due = line(&l, LINE_DENIED, "a");
    assert_true(line(&l, LINE_DROPPED, "other") == UINT64_MAX);
    expect_line("dropped i=other");
    assert_true(persia_lines_count(&l, due - 1) == due);
    assert_string_equal(said(), "");
    later = 61 * (uint64_t)SECOND;
    assert_true(persia_lines_count(&l, persia_clock_ns()) == UINT64_MAX);
    expect_line("denied more=1000\n");
    (void)line(&l, LINE_DENIED, "two\nlines");
    expect_line("denied i=two?lines\n");
    for (int i = 0; i < 5; i++)
        (void)line(&l, LINE_DENIED, "a");
    assert_int_equal(lines_of(said()), 2);
    persia_lines_free(&l);
    expect_line("denied more=3\n");
    persia_system_install(NULL);
}

static void lines_are_json(void **state)
{
    const line_field fields[] = {{.name = "table", .text = "a\"b\\\n"},
                                 {.name = "client", .number = 7, .hex = 1},
                                 {.name = "rows", .number = 1ull << 40}};
    (void)state;
    process_lines l;
    persia_lines_init(&l, &(lines_to){.fd = ends[1], .json = 1, .shard = 3});
    (void)persia_lines_write(&l, LINE_ERASED, fields, 3);
    expect_line("Z\", \"level\": \"info\", \"event\": \"erased\", "
                "\"role\": \"server\", \"shard\": 3, \"table\": "
                "\"a\\\"b\\\\?\", \"client\": \"0000000000000007\", "
                "\"rows\": 1099511627776}\n");
    (void)persia_lines_write(&l, LINE_SET, fields, 1); /* for audits alone */
    assert_string_equal(said(), "");
    persia_lines_free(&l);
}

/* Calls that were denied are bounded there, too: anyone who reaches the port
 * makes them. */
static void audits_have_all_but_what_was_denied(void **state)
{
    (void)state;
    process_lines l;
    persia_lines_init(&l, &(lines_to){.audit = ends[1]});
    for (int i = 0; i < 10; i++)
        (void)line(&l, LINE_ERASED, "a");
    assert_int_equal(lines_of(said()), 10);
    for (int i = 0; i < 10; i++)
        (void)line(&l, LINE_DENIED, "a");
    assert_int_equal(lines_of(said()), 3);
    (void)line(&l, LINE_SET, "a");
    expect_line("\"event\": \"set\"");
    persia_lines_free(&l);
    expect_line("\"more\": 7");
}

/* The reader of the log may hang: no call waits for it. */
static void a_full_pipe_costs_lines_alone(void **state)
{
    static char fill[4096];
    (void)state;
    process_lines l;
    persia_lines_init(&l, &(lines_to){.fd = ends[1]});
    while (write(ends[1], fill, sizeof fill) > 0)
        ;
    assert_int_equal(fcntl(ends[1], F_SETFL, 0), 0); /* writing waits now */
    assert_true(line(&l, LINE_DENIED, "lost") != UINT64_MAX);
    while (read(ends[0], fill, sizeof fill) > 0)
        ;
    persia_lines_free(&l);
    expect_line("denied more=1\n");
}

int main(void)
{
#define TEST(name)                                                            \
    cmocka_unit_test_setup_teardown(name, pipe_make, pipe_free)
    const struct CMUnitTest tests[] = {
        TEST(the_reason_of_a_denied_call_is_logged),
        TEST(who_changes_what_is_logged),
        TEST(rows_that_were_not_written_are_logged),
        TEST(many_lines_become_a_count),
        TEST(lines_are_json),
        TEST(audits_have_all_but_what_was_denied),
        TEST(a_full_pipe_costs_lines_alone),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
