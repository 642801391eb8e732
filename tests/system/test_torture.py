"""Short rounds of random kills; ``make test-long`` has more of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid

import pytest

from persia import _core
from tests.system.processes import ROOT, environment, marked, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

ROUNDS = 10


@pytest.mark.timeout(400)
def test_short_rounds() -> None:
    """No row is above its count, no update is torn, what is missing was told,
    and all ends."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "persia", "torture", "--short"),
            *("--minutes", "0", "--rounds", str(ROUNDS)),
        ],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"rounds +{ROUNDS}\n", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_command_ends_all(number: int) -> None:
    """Also in the middle of a round."""
    mark = uuid.uuid4().hex
    command = subprocess.Popen(
        [sys.executable, "-m", "persia", "torture", "--minutes", "0"],
        env=environment(mark),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(marked(mark)) > 5)
        command.send_signal(number)
        command.wait(60)
        wait_until(lambda: not marked(mark))
    finally:
        for pid in (command.pid, *marked(mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.wait(60)
