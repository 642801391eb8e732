/* loader.h: the data loader's side of embedding workers: it sends batches,
 * keeps those that are not done, and learns what servers have.
 */
#ifndef PERSIA_LOADER_H
#define PERSIA_LOADER_H

#include "link/link.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A data loader: sends batches. */
typedef struct loader_sender loader_sender;
PERSIA_API int persia_sender_open(const worker_client_config *config,
                                  loader_sender **out);
/* The workers are those of the configuration now: see worker_client_list(). */
PERSIA_API int persia_sender_list(loader_sender *s,
                                  const worker_client_config *config);
/* leaves: there are no more epochs; else workers take it for dead when it has
 * been silent for a while. */
PERSIA_API void persia_sender_close(loader_sender *s, int leaves);
/* Sends a batch: caller, stream, number, settled, attempt and epoch are filled
 * in here.  Waits for room.  One that all servers have is passed over. */
PERSIA_API int persia_sender_send(loader_sender *s, wire_submit *m);
/* Ends an epoch. */
PERSIA_API int persia_sender_end(loader_sender *s);
/* Waits until all batches are done.  PERSIA_ETIMEOUT: none was for so long (0:
 * no limit).  PERSIA_EINTR.  Once the error of a batch that ended without an
 * update. */
PERSIA_API int persia_sender_flush(loader_sender *s, uint64_t timeout_ns);
/* Asks workers for the stream, which has so many epochs, and keeps it from
 * other loaders that ask.  *status: SUBMIT_QUEUED: it is this sender's;
 * SUBMIT_HELD: another one's, which was heard of lately; SUBMIT_ENDED: it has
 * no more batches. */
PERSIA_API int persia_sender_claim(loader_sender *s, uint64_t epochs,
                                   uint32_t *status);
/* Batches up to this number are not sent: there are none.  Waits until those
 * before them are done. */
PERSIA_API int persia_sender_skip(loader_sender *s, uint64_t number);
typedef struct sender_counts {
    uint64_t stream;
    uint64_t position; /* batches, from the first on, that were done at the
                          start or are now */
    uint64_t sent; /* batches, those that were passed over included */
    uint64_t done; /* that need not be sent again, from the first on */
    uint64_t passed; /* over: an earlier process had sent them */
    uint64_t moved;  /* that another worker got, or one that had lost them */
    uint64_t failed; /* done, but without an update: refused, or given up */
    uint64_t lost;   /* done, but not in the rows of servers that were started
                        again, or of a checkpoint that was loaded, since */
    uint64_t away;   /* workers, now */
    uint64_t sending_ns; /* in which it sent, or waited until a worker had
                            room */
    uint64_t lineage; /* of the rows that have what is done */
} sender_counts;
PERSIA_API void persia_sender_get_counts(loader_sender *s, sender_counts *out);

#ifdef __cplusplus
}
#endif
#endif
