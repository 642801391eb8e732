"""Settings of all tests."""

import os

# Threads of libgomp that spin while they wait make a test many times slower
# where other work shares the cores. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
