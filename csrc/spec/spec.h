/* spec.h: the lists that several rooms share: what a table can be.
 *
 * All of them are in lists.h, generated from persia.proto.
 */
#ifndef PERSIA_SPEC_H
#define PERSIA_SPEC_H

#include "spec/lists.h"

#endif
