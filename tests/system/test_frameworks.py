"""Lightning and Accelerate on two ranks, with the tables on the ranks.

The oracle is a plain loop over ``persia.DataLoader(staleness=0)`` under
DistributedDataParallel: rows, optimizer state and dense weights are the same
to the bit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system import frameworks
from tests.system.processes import environment
from tests.system.test_ranks import same

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WORLD = 2


def launch(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each rank has left."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(WORLD), "--standalone"]
    done = subprocess.run(
        [*command, frameworks.__file__, str(folder), name],
        env=environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [torch.load(folder / f"{name}.{r}.pt") for r in range(WORLD)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("plain"), "plain")


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_a_framework_on_two_ranks(
    name: str, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip(name)
    left = launch(tmp_path, name)
    updates = frameworks.EPOCHS * frameworks.STEPS
    for mine, expected in zip(left, plain, strict=True):
        assert mine.pop("updates") == expected["updates"] == updates
        assert same(mine, {k: expected[k] for k in mine})
