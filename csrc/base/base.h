/* base.h: what every room stands on: error codes, messages, the machine,
 * random bits, windows of numbers.
 *
 * Every function that can fail returns an int: PERSIA_OK (0) or one of the
 * codes below.  The text of a failure (what was wrong, where, the remedy) is
 * kept per thread by persia_err_set() and read with persia_err_text() by the
 * same thread.
 */
#ifndef PERSIA_BASE_H
#define PERSIA_BASE_H

#include <assert.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "base/deadline.h"
#include "base/retry.h"
#include "base/system.h"
#include "base/window.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The one list of errors: X(code, name, message).  The class of
 * persia.errors that the Python side raises has the same name. */
#define PERSIA_ERRORS(X)                                                      \
    X(PERSIA_OK, "Ok", "no error")                                            \
    X(PERSIA_ENOMEM, "OutOfMemory", "out of memory")                          \
    X(PERSIA_EARG, "InvalidArgument", "invalid argument")                     \
    X(PERSIA_EDTYPE, "DtypeError", "wrong dtype")                             \
    X(PERSIA_ESHAPE, "ShapeError", "wrong rank or shape")                     \
    X(PERSIA_EOFFSETS, "OffsetsError", "offsets or lengths do not add up")    \
    X(PERSIA_EFEATURE, "MissingFeature", "a configured feature is missing")   \
    X(PERSIA_ENONFINITE, "NonFiniteGradient", "a gradient is NaN or Inf")     \
    X(PERSIA_ECAPACITY, "CapacityReached", "the table is full")               \
    X(PERSIA_ELIMIT, "LimitReached", "a configured limit was reached")        \
    X(PERSIA_ETICKET, "TicketError", "the batch's ticket cannot be used")     \
    X(PERSIA_ECORRUPT, "CorruptFile", "a file is truncated or altered")       \
    X(PERSIA_EMISMATCH, "SchemaMismatch", "declared and stored differ")       \
    X(PERSIA_EROWSMISSING, "RowsMissing", "the rows were not loaded")         \
    X(PERSIA_EIO, "StorageError", "reading or writing failed")                \
    X(PERSIA_EFORK, "UsedAfterFork", "used in a forked child")                \
    X(PERSIA_EINTR, "Interrupted", "interrupted by a signal")                 \
    X(PERSIA_ETIMEOUT, "DeadlineExceeded", "a deadline passed")               \
    X(PERSIA_ECLOSED, "Closed", "the object was closed")                      \
    X(PERSIA_EDATA, "MalformedData", "a line of input is malformed")          \
    X(PERSIA_EUNAVAILABLE, "Unavailable", "a server cannot be reached")       \
    X(PERSIA_EPROTOCOL, "ProtocolError", "a message is malformed")            \
    X(PERSIA_EDENIED, "AccessDenied", "a token or certificate is missing")    \
    X(PERSIA_ESTALE, "StaleLineage", "the server has other rows now")         \
    X(PERSIA_ELOST, "UpdatesLost", "acknowledged updates were lost")          \
    X(PERSIA_EREPLACED, "RowsReplaced", "another client replaced the rows")   \
    X(PERSIA_EINCOMPLETE, "RestoreIncomplete",                                \
      "a restore has not reached all servers")                                \
    X(PERSIA_EMOVED, "Moved", "the shard is at another server now")           \
    X(PERSIA_ENOTFOUND, "NotFound", "there is nothing of that name")          \
    X(PERSIA_EINTERNAL, "InternalError", "a bug in persia, please report it")

#define PERSIA_ERROR_CODE(code, name, message) code,
enum persia_error { PERSIA_ERRORS(PERSIA_ERROR_CODE) PERSIA_ERROR_COUNT };
#undef PERSIA_ERROR_CODE

/* Keeps a message for this thread and returns `code`: the usual way out is
 * `return persia_err_set(PERSIA_EARG, "table %s: dim is %u, ...", ...)`. */
PERSIA_API int persia_err_set(int code, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));
/* The message of this thread's last persia_err_set(); "" when there was none.
 */
PERSIA_API const char *persia_err_text(void);
/* An error of this thread, over calls that may set others. */
enum { PERSIA_TEXT = 1024 /* bytes of a text, with its end */ };
typedef struct err_kept {
    int code;
    char text[PERSIA_TEXT];
} err_kept;
/* code: of the error; PERSIA_OK: there is none, and no text. */
PERSIA_API void persia_err_keep(err_kept *out, int code);
/* Sets it again, as persia_err_set(). */
PERSIA_API int persia_err_again(const err_kept *k);
/* "OutOfMemory", ...; "InternalError" for a number that is no code. */
PERSIA_API const char *persia_err_name(int code);
/* The reverse; PERSIA_EINTERNAL for another text. */
PERSIA_API int persia_err_code(const char *name);
/* The general message of a code, for use without persia_err_set(). */
PERSIA_API const char *persia_err_message(int code);

/* Whether an invariant holds that no memory depends on, but an account, which
 * what clients send might bring out of order if this library has a bug.  A
 * build with tests aborts where it does not.  A release, whose abort would
 * cost a server its rows, reports it on stderr (once a place), keeps
 * PERSIA_EINTERNAL as this thread's error, and the caller continues or
 * refuses.  Invariants that memory depends on are asserted in both. */
#ifdef PERSIA_STRICT
#define PERSIA_HOLDS(condition) (assert(condition), 1)
#else
#define PERSIA_HOLDS(condition)                                               \
    __extension__({                                                           \
        static int reported_;                                                 \
        const int holds_ = !!(condition);                                     \
        if (__builtin_expect(!holds_, 0))                                     \
            persia_broken(#condition, __FILE__, __LINE__,                     \
                          !__atomic_exchange_n(&reported_, 1,                 \
                                               __ATOMIC_RELAXED));            \
        holds_;                                                               \
    })
#endif
PERSIA_API void persia_broken(const char *condition, const char *file,
                              int line, int report);

/* A callback that tells whether the user asked to stop (Ctrl-C): returns
 * PERSIA_OK or PERSIA_EINTR.  `py` installs it; every blocking wait of a
 * user's thread calls persia_interrupt_poll() at least every 100 ms.  Calls
 * from threads other than the user's return PERSIA_OK. */
typedef int (*interrupt_fn)(void);
PERSIA_API void persia_interrupt_install(interrupt_fn fn);
PERSIA_API int persia_interrupt_poll(void);
/* A background thread as others see it; both fields by __atomic_*_n. */
typedef struct interrupt_flag {
    int stop; /* set by others: persia_interrupt_poll() returns PERSIA_EINTR */
    uint64_t
        polls; /* its calls of persia_interrupt_poll(): it makes progress */
} interrupt_flag;
/* From now on this thread's persia_interrupt_poll() uses the flag; NULL: no
 * more. */
PERSIA_API void persia_interrupt_watch(interrupt_flag *flag);

/* PERSIA_OK, or PERSIA_EFORK in a child of the process in which the library
 * was loaded: threads and locks do not survive a fork. */
PERSIA_API int persia_fork_check(const char *what);

/* glibc keeps blocks below 32 MiB, and so many bytes at the end of each of its
 * arenas, which it otherwise returns at once, to clear their pages again for
 * the next block.  Of the whole process.  Whether it is set: not where the
 * user has set that, nor without glibc. */
PERSIA_API int persia_keep_memory(int bytes);

/* A read-write lock whose writers wait only for the readers that hold it
 * already, however many follow.  So a reader must not take it twice. */
PERSIA_API void persia_fair_lock_init(pthread_rwlock_t *lock);

/* Philox4x32-10 (Salmon et al., SC 2011): 128 random bits that depend on
 * (counter, key) alone.  Used for initial values and stochastic rounding. */
static inline __attribute__((always_inline)) void
philox4x32(const uint32_t counter[4], const uint32_t key[2],
                              uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2],
             c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

#ifdef __cplusplus
}
#endif
#endif
