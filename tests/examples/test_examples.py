"""The examples run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia import _core
from tests.ready import ended
from tests.system.processes import environment, ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def criteo_line(i: int) -> str:
    integers = [str((i * k) % 17) for k in range(13)]
    categories = [f"{(i * 31 + k) % 97:08x}" for k in range(26)]
    # The click follows the first category, so that there is something to
    # learn.
    label = str(int((i * 31) % 97 < 30))
    return "\t".join([label, *integers, *categories])


def criteo_dlrm(folder: Path, *options: str, world: int) -> float:
    """The AUC that the example reaches on so many ranks; 0: without any."""
    data = folder / "day_0.tsv"
    data.write_text("".join(f"{criteo_line(i)}\n" for i in range(4000)))
    words = [str(EXAMPLES / "criteo_dlrm.py"), str(data), "--epochs", "2"]
    words += ["--batch-size", "64", "--dim", "8", *options]
    if world:
        status, text = ranks(world, *words)
    else:
        done = ended(*words, env=environment(), timeout=150)
        status, text = done.returncode, done.stdout + done.stderr
    assert status == 0, text
    lines = [x for x in text.splitlines() if x.startswith("epoch ")]
    assert len(lines) == 2 and lines[1].startswith("epoch 2: ")
    return float(lines[1].split("AUC ")[1].split(",")[0])


def test_criteo_dlrm(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = "--save", str(out), "--device", "cpu"
    auc = criteo_dlrm(tmp_path, *options, world=0)
    assert auc > 0.9
    assert (out / "LATEST").exists()


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
@pytest.mark.parametrize("world", [2, 3])
def test_criteo_dlrm_on_ranks(tmp_path: Path, world: int) -> None:
    assert criteo_dlrm(tmp_path, world=world) > 0.9
