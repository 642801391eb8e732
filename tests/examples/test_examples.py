"""The examples run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from persia import _core

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def criteo_line(i: int) -> str:
    integers = [str((i * k) % 17) for k in range(13)]
    categories = [f"{(i * 31 + k) % 97:08x}" for k in range(26)]
    # The click follows the first category, so that there is something to
    # learn.
    label = str(int((i * 31) % 97 < 30))
    return "\t".join([label, *integers, *categories])


def criteo_dlrm(python: list[str], data: Path, *options: str) -> float:
    """The AUC that the example reaches."""
    data.write_text("".join(f"{criteo_line(i)}\n" for i in range(4000)))
    done = subprocess.run(
        [
            *python,
            str(EXAMPLES / "criteo_dlrm.py"),
            str(data),
            *("--epochs", "2", "--batch-size", "64", "--dim", "8"),
            *options,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2 and lines[1].startswith("epoch 2: ")
    return float(lines[1].split("AUC ")[1].split(",")[0])


def test_criteo_dlrm(tmp_path: Path) -> None:
    data, out = tmp_path / "day_0.tsv", tmp_path / "out"
    options = "--save", str(out), "--device", "cpu"
    auc = criteo_dlrm([sys.executable], data, *options)
    assert auc > 0.9
    assert (out / "LATEST").exists()


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
@pytest.mark.parametrize("ranks", [2, 3])
def test_criteo_dlrm_on_ranks(tmp_path: Path, ranks: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nproc-per-node", str(ranks)]
    assert criteo_dlrm(torchrun, tmp_path / "day_0.tsv") > 0.9
