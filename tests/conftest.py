"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.s3 import bucket, endpoint, uri  # noqa: F401

HERE = Path(__file__).parent

#: Folders and modules whose tests are all marked slow.
SLOW = (
    *("benchmarks", "counted", "deploy", "examples", "lint", "roles_told"),
    *("system", "wire", "test_checkpoint_far.py", "test_checkpoint_remote.py"),
    *("test_compile.py", "test_loader_processes.py", "test_moves.py"),
    *("test_roles_rollback.py",),
)

#: What the interpreter calls the start of a process.
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")

#: How many modules there were when garbage was last collected for good, and
#: how many more are reason to do it again.
_FROZEN = pytest.StashKey[int]()
_MANY = 200

# Threads of libgomp that spin while they wait make a test many times slower
# where other work shares the cores. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Processes that compile kernels import torch, to compile one kernel.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Time decides no test, however busy the machine is.
hypothesis.settings.register_profile("persia", deadline=None)
hypothesis.settings.load_profile("persia")

# Ctrl-C is ignored by what a script starts in the background, the tests among
# it; some of them press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    """A run without slow tests refuses to start a process."""

    def refuse(event: str, _: tuple[Any, ...]) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST")
        if event in STARTS and test:
            pytest.fail(f"{test} starts a process: mark it slow")

    if "not slow" in config.option.markexpr:
        sys.addaudithook(refuse)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Collections of garbage pass over what imports have made: torch has half
    a million objects, and a test that collects would look at each."""
    modules = len(sys.modules)
    if modules > item.config.stash.get(_FROZEN, 0) + _MANY:
        gc.collect()
        gc.freeze()
        item.config.stash[_FROZEN] = modules


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Each test has as many as the first one: of them depends what is done
    ahead."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[True, False], ids=["idle", "busy"])
def idle_core(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether there is a core for what is done ahead, however many threads
    torch has here."""
    idle: bool = request.param
    monkeypatch.setattr(
        "persia.loop.loader.nothing_to_hide", lambda *_: not idle
    )
    return idle
