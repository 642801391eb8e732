/* huge.h: 2 MiB pages made in the background (private).
 *
 * The kernel clears a huge page when it is first touched: 0.2 ms, or 5 ms on
 * a virtual machine whose host has not backed that memory yet, during which
 * a push would wait.  So memory that grows is touched in small pages, and one
 * thread of the process makes each 2 MiB that are full, or nearly so, one huge
 * page.  It
 * ends when it was idle for a while, and is best effort: where it fails pages
 * stay small.
 */
#ifndef PERSIA_MEM_HUGE_H
#define PERSIA_MEM_HUGE_H

#include "base/base.h"

#define HUGE ((size_t)2 << 20)

/* Whether this kernel can (Linux 6.1); if not, huge_later() does nothing. */
int huge_can(void);
/* `range` begins 2 MiB of private memory, aligned to 2 MiB.  Ranges are taken
 * in the order in which they are given.  Allocates nothing and starts no
 * thread; 0: too many wait, it is to be handed in again later. */
int huge_later(char *range);
/* Whether a range is to be handed in of which `used` bytes are in use: what is
 * unused costs memory, and may be `spare` bytes.  At least a half is in use,
 * so that pages are there to be joined. */
static inline int huge_pays(size_t used, size_t spare)
{
    return used >= HUGE || (used >= HUGE / 2 && HUGE - used <= spare);
}
/* Starts the thread if ranges wait for it. */
void huge_start(void);
/* Must be called before [from, from + bytes) is unmapped or moved: when it
 * returns no thread works there.  The lowest range that was given up, or
 * NULL. */
char *huge_forget(const char *from, size_t bytes);
/* Waits until all ranges are done (tests). */
void huge_wait(void);

#endif
