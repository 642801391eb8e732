/* main.c: seeds, each a process of its own.
 *
 *   sim --seed 17             one history, its trace in words
 *   sim --histories 200 [--first 1] [--jobs 2] [--seconds 60]
 *   sim_bugs --bug NAME ...   with a planted bug
 *   sim_bugs --bugs A,B,C     each must be found within as many histories
 *
 * Every 20th runs twice, and the hashes of its traces must be equal.  Of a
 * history that fails the end of its trace is shown.
 */
#include "tests/sim/history.h"
#include "tests/sim/storage.h"

#include <errno.h>
#include <malloc.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { JOBS_MAX = 64, LINES = 60, TWICE = 20, HASH = 64 };

typedef struct options {
    uint64_t first, histories, seconds;
    unsigned jobs;
    int show, one;
    const char *bug, *bugs;
    int quiet;
} options;

/* ---- a history: in a process that exec has made ---- */

static int run_history(uint64_t seed, int show, const char *bug)
{
    mallopt(M_ARENA_MAX, 1);
    setvbuf(stdout, NULL, _IOLBF, 0);
    sim_bug_choose(bug);
    sim_begin(seed, show);
    history_run();
    printf("%016llx %llu steps\n", (unsigned long long)sim_hash(),
           (unsigned long long)sim_steps());
    fflush(stdout);
    _exit(0);
}

/* ---- the parent ---- */

typedef struct job {
    pid_t pid;
    uint64_t seed;
    int out;         /* what it prints */
    int second;
    char hash[HASH]; /* of the first run */
} job;

static void start(const options *o, job *j, unsigned cpu, int show)
{
    int ends[2];
    char seed[32];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)j->seed);
    if (pipe(ends))
        abort();
    j->pid = fork();
    if (j->pid < 0)
        abort();
    if (j->pid == 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu % (unsigned)sysconf(_SC_NPROCESSORS_ONLN), &set);
        (void)sched_setaffinity(0, sizeof set, &set);
        (void)personality(ADDR_NO_RANDOMIZE);
        if (!o->one) {
            dup2(ends[1], 1);
            dup2(ends[1], 2);
        }
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "sim", "--child", seed, show ? "1" : "0",
              o->bug, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    j->out = ends[0];
}

/* All that it prints, or its end. */
static int finish(job *j, char *text, size_t room)
{
    size_t n = 0;
    ssize_t got;
    int status;
    while ((got = read(j->out, text + n, room - 1 - n)) > 0) {
        n += (size_t)got;
        if (n == room - 1) {
            memmove(text, text + room / 2, n - room / 2);
            n -= room / 2;
        }
    }
    text[n] = 0;
    close(j->out);
    waitpid(j->pid, &status, 0);
    storage_remove((uint64_t)j->pid);
    j->pid = 0;
    return status;
}

static void show_end(const char *text)
{
    const char *at = text + strlen(text);
    for (int lines = 0; at > text && lines <= LINES; at--)
        lines += at[-1] == '\n';
    printf("%s", at);
}

static char text[1 << 20];

/* Again, with its trace. */
static void show_failure(const options *o, uint64_t seed, unsigned cpu)
{
    job j = {.seed = seed};
    start(o, &j, cpu, 1);
    int status = finish(&j, text, sizeof text);
    show_end(text);
    if (WIFSIGNALED(status))
        printf("seed %llu: signal %d\n", (unsigned long long)seed,
               WTERMSIG(status));
    printf("seed %llu fails; its whole trace: make sim SEED=%llu%s%s\n",
           (unsigned long long)seed, (unsigned long long)seed,
           o->bug[0] ? " BUG=" : "", o->bug);
}

/* 1: it failed. */
static int judge(const options *o, job *j, unsigned cpu)
{
    const uint64_t seed = j->seed;
    int status = finish(j, text, sizeof text);
    if (status) {
        if (!o->quiet)
            show_failure(o, seed, cpu);
        return 1;
    }
    if (j->second) {
        if (strncmp(text, j->hash, strlen(j->hash)) == 0)
            return 0;
        printf("seed %llu is not the same twice: %s and %s",
               (unsigned long long)seed, j->hash, text);
        return 1;
    }
    const size_t n = strcspn(text, "\n");
    snprintf(j->hash, sizeof j->hash, "%.*s", n < HASH ? (int)n : HASH - 1,
             text);
    j->second = seed % TWICE == 0;
    if (j->second)
        start(o, j, cpu + 1, 0);
    return 0;
}

static uint64_t seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec;
}

/* The first seed that failed; 0: none did. */
static uint64_t run_many(const options *o, uint64_t *ran)
{
    job jobs[JOBS_MAX] = {{0}};
    uint64_t next = o->first, failed = 0;
    const uint64_t end = o->first + o->histories, began = seconds();
    unsigned running = 0, at = 0;
    *ran = 0;
    do {
        for (unsigned i = 0; i < o->jobs && next < end && !failed; i++) {
            if (jobs[i].pid || (o->seconds && seconds() - began > o->seconds))
                continue;
            jobs[i] = (job){.seed = next++};
            start(o, &jobs[i], i, 0);
        }
        running = 0;
        for (unsigned i = 0; i < o->jobs; i++)
            running += jobs[i].pid != 0;
        if (!running)
            break;
        while (!jobs[at % o->jobs].pid)
            at++;
        job *j = &jobs[at % o->jobs];
        const uint64_t seed = j->seed;
        if (judge(o, j, at % o->jobs) && (!failed || seed < failed))
            failed = seed;
        *ran += !j->pid;
        at++;
    } while (running);
    return failed;
}

/* ---- options ---- */

static uint64_t number(const char *of)
{
    char *end;
    const uint64_t n = of ? strtoull(of, &end, 10) : 0;
    if (!of || *end) {
        fprintf(stderr, "sim: a number is needed, not %s\n", of ? of : "");
        exit(2);
    }
    return n;
}

static void read_options(options *o, char **argv)
{
    for (char **a = argv + 1; *a; a += 2) {
        if (strcmp(*a, "--seed") == 0)
            o->first = number(a[1]), o->one = 1;
        else if (strcmp(*a, "--first") == 0)
            o->first = number(a[1]);
        else if (strcmp(*a, "--histories") == 0)
            o->histories = number(a[1]);
        else if (strcmp(*a, "--seconds") == 0)
            o->seconds = number(a[1]);
        else if (strcmp(*a, "--jobs") == 0)
            o->jobs = (unsigned)number(a[1]);
        else if (strcmp(*a, "--bug") == 0 && a[1])
            o->bug = a[1];
        else if (strcmp(*a, "--bugs") == 0 && a[1])
            o->bugs = a[1];
        else {
            fprintf(stderr, "sim: there is no option %s\n", *a);
            exit(2);
        }
    }
    if (o->jobs < 1 || o->jobs > JOBS_MAX)
        o->jobs = 1;
}

static int look_for_faults(const options *o)
{
    uint64_t ran;
    const uint64_t failed = run_many(o, &ran);
    printf("%llu histories, seeds %llu to %llu: %s\n",
           (unsigned long long)ran, (unsigned long long)o->first,
           (unsigned long long)(o->first + ran - 1),
           failed ? "a fault" : "no fault");
    return failed != 0;
}

static int find_bugs(const options *all)
{
    int missed = 0;
    for (const char *at = all->bugs; *at; at += *at == ',') {
        char name[64];
        options o = *all;
        uint64_t ran;
        const size_t n = strcspn(at, ",");
        snprintf(name, sizeof name, "%.*s", (int)n, at);
        o.bug = name;
        o.quiet = 1;
        const uint64_t failed = run_many(&o, &ran);
        if (failed)
            printf("planted bug %s: found by seed %llu\n", name,
                   (unsigned long long)failed);
        else
            printf("planted bug %s: NOT FOUND in %llu histories\n", name,
                   (unsigned long long)ran);
        missed += !failed;
        at += n;
    }
    return missed;
}

int main(int argc, char **argv)
{
    options o = {.first = 1, .histories = 200, .jobs = 2, .bug = ""};
    if (argc == 5 && strcmp(argv[1], "--child") == 0)
        return run_history(number(argv[2]), argv[3][0] == '1', argv[4]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    read_options(&o, argv);
    if (o.one) {
        job j = {.seed = o.first};
        start(&o, &j, 0, 1);
        int status = finish(&j, text, sizeof text);
        if (WIFSIGNALED(status))
            printf("signal %d\n", WTERMSIG(status));
        return status != 0;
    }
    return o.bugs ? find_bugs(&o) : look_for_faults(&o);
}
