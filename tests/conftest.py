"""Settings of all tests."""

import os
import signal

import pytest

# Threads of libgomp that spin while they wait make a test many times slower
# where other work shares the cores. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ctrl-C is ignored by what a script starts in the background, the tests among
# it; some of them press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=[True, False], ids=["idle", "busy"])
def idle_core(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether there is a core for what is done ahead, however many threads
    torch has here."""
    idle: bool = request.param
    monkeypatch.setattr("persia.loader._nothing_to_hide", lambda *_: not idle)
    return idle
