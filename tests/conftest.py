"""Settings of all tests."""

import os
import signal

# Threads of libgomp that spin while they wait make a test many times slower
# where other work shares the cores. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ctrl-C is ignored by what a script starts in the background, the tests among
# it; some of them press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
