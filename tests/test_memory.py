from __future__ import annotations

import subprocess
import sys

import pytest

from tests.system.processes import environment

# What a process has when it frees 100 blocks of a megabyte, all at the end.
SCRIPT = """
import ctypes, os
from persia.base.memory import keep_memory
print(keep_memory())
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
blocks = [c.malloc(1 << 20) for _ in range(100)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
for block in blocks:
    c.free(ctypes.c_void_p(block))
with open("/proc/self/statm") as file:
    print(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "MALLOC_TRIM_THRESHOLD_"])
def test_memory_is_kept_unless_the_user_says_how(given: str) -> None:
    more = {given: "131072"} if given else {}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.split()
    if out[0] == "False" and not given:
        pytest.skip("no glibc")
    assert (out[0] == "True", int(out[1]) >= 100) == (not given, not given)
