"""One training, exported, for the tests of who serves it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from persia import errors
from persia.cli.app import app

SAMPLES = 2000


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, errors.PersiaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """What a process says until it serves."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("serving "):
            return lines
    raise AssertionError(lines)


def until(holds: Callable[[], bool]) -> None:
    """Waits until it holds."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """clicks.csv, schema.yaml, the checkpoints ck, and the exports out: fp32,
    then int8."""
    place = tmp_path_factory.mktemp("serving")
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 300, SAMPLES), rng.integers(0, 40, SAMPLES)
    tags = [
        "|".join(f"t{i}" for i in rng.integers(0, 9, rng.integers(0, 4)))
        for _ in range(SAMPLES)
    ]
    click = (rng.random(SAMPLES) < 0.1 + 0.2 * (user % 4)).astype(int)
    columns = {
        "user": [f"u{i}" for i in user],
        "item": item,
        "age": rng.normal(40, 9, SAMPLES).round(2),
        "tags": tags,
        "click": click,
    }
    pd.DataFrame(columns).to_csv(place / "clicks.csv", index=False)
    (place / "schema.yaml").write_text(
        "label: click\ndense: [{column: age, standardise: true}]\n"
        "categorical: [user, {column: item, type: number}]\n"
        "multivalued: [{column: tags, separator: '|'}]\n"
    )
    call(
        *("train", place / "clicks.csv", "--schema", place / "schema.yaml"),
        *("--batch-size", 200, "--threads", 1, "--save", place / "ck"),
        *("--export-to", place / "out"),
    )
    call("export", place / "ck", place / "out", "--row-dtype", "int8")
    return place
