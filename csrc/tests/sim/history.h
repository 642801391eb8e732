/* history.h: one history of the seed that sim_begin() has. */
#ifndef PERSIA_TESTS_SIM_HISTORY_H
#define PERSIA_TESTS_SIM_HISTORY_H

#include "tests/sim/roles.h"

/* Returns if all was right, else ends the process: sim_fail(). */
void history_run(void);

#endif
