/* device.h: memory of another processor: how bytes get there and back.
 *
 * Calls that name a stream return before their work is done.  Works of one
 * stream run in their order; an event orders works of two.  The stream NULL
 * is the device's own default.
 *
 * The functions return 0, or a number that text() explains.
 */
#ifndef PERSIA_MEM_DEVICE_H
#define PERSIA_MEM_DEVICE_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mem_device {
    const char *name;
    const char *(*text)(int code);
    int (*count)(int *out); /* devices that can be used */
    /* What enter() takes; it lives as long as the process. */
    int (*context)(int index, void **out);
    /* The thread's calls of the functions below are for this device, until
     * leave(), which gets what enter() returned. */
    int (*enter)(void *context);
    void (*leave)(int code);
    /* Page-locked host memory: what a device copies from asynchronously. */
    int (*pin)(size_t bytes, void **out);
    void (*unpin)(void *memory);
    int (*stream_make)(void **out);
    void (*stream_free)(void *stream); /* after its works */
    /* Between any two of: pinned memory, memory of the stream's device. */
    int (*copy)(void *stream, void *to, const void *from, size_t bytes);
    /* An event is done until it is recorded. */
    int (*event_make)(void **out);
    void (*event_free)(void *event);
    int (*event_record)(void *event, void *stream);
    /* Later works of the stream wait for what the event recorded last. */
    int (*event_await)(void *event, void *stream);
    int (*event_done)(void *event, int *done);
    /* This thread waits for it. */
    int (*event_wait)(void *event);
} mem_device;

/* PERSIA_OK, or PERSIA_EINTERNAL with the device's text; what: the call. */
PERSIA_API int persia_mem_device_check(const mem_device *d, int code,
                                       const char *what);

/* The host as a device, for tests: a stream is a thread, its memory is the
 * host's, and the stream NULL is the calling thread. */
PERSIA_API const mem_device *persia_mem_host_device(void);
/* Runs fn on a copy of its arguments, `bytes` of them, as a work of a stream
 * of the host. */
enum { MEM_HOST_ARGS_MAX = 256 };
PERSIA_API int persia_mem_host_run(void *stream, void (*fn)(const void *args),
                                   const void *args, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
