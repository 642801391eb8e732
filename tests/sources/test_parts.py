"""Parts of a data set, which loaders share; partitions of topics among
them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from persia import errors
from persia.cli.app import app
from persia.data import Files, Table
from persia.data.feeding import parts_of
from persia.datasets import SyntheticCTR
from tests.kafka import PARTITIONS, Cluster, cluster
from tests.sources.test_files import SCHEMA, contents, rows, write
from tests.sources.test_kafka import (
    left_out,
    numbers,
    open_,
    texts,
)
from tests.sources.test_kafka import rows as messages

__all__ = ["cluster"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_parts_have_all_rows(tmp_path: Path, suffix: str) -> None:
    for i in range(5):
        write(tmp_path / f"part_{i}.{suffix}", rows(9 + i, i))
    whole = Files(str(tmp_path / "part_*"), SCHEMA, 4)
    every = contents(list(whole))
    for n in (1, 2, 5, 7):
        parts = whole.parts(n)
        assert len(parts) == n
        assert contents([b for part in parts for b in part]) == every
        files = [name for part in parts for name in part.files]
        assert n > 5 or sorted(files) == whole.files  # each in one part
    train, _ = whole.split(0.3)
    parts = train.parts(2)
    assert contents([b for p in parts for b in p]) == contents(list(train))
    with pytest.raises(errors.InvalidArgument):
        parts[0].parts(2)
    with pytest.raises(errors.InvalidArgument):
        whole.parts(0)


def test_parts_of_what_is_made_or_in_memory() -> None:
    made = SyntheticCTR(100, 8)
    assert sum(len(b) for p in made.parts(3) for b in p) == 100
    table = Table(messages(50), batch_size=8)
    assert sum(len(b) for p in table.parts(3) for b in p) == 50


def test_partitions_by_number(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same under the same number, from wherever one begins."""
    left_out(monkeypatch, {*range(16), 20})
    cluster.produce("t", texts(messages(44)))  # 5 whole batches
    cluster.produce("t", texts(messages(9)), 1)
    parts = list(open_(cluster, 8).partitions().values())
    assert len(parts) == PARTITIONS
    first = [(n, numbers(b)) for n, b in parts[0].numbered(0)]
    assert [n for n, _ in first] == [3, 4, 5]
    assert first[0][1] == [16, 17, 18, 19, 21, 22, 23]
    assert first[2][1] == list(range(32, 40))
    again = [(n, numbers(b)) for n, b in parts[0].numbered(4)]
    assert again == first[2:]
    assert list(parts[0].numbered(5)) == []
    assert [n for n, _ in parts[1].numbered(0)] == [1]
    assert list(parts[2].numbered(0)) == []
    with pytest.raises(errors.InvalidArgument):
        parts_of(open_(cluster, 8), PARTITIONS - 1)
    assert len(parts_of(open_(cluster, 8), PARTITIONS)) == PARTITIONS


def test_parts_need_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_RUN_ID", raising=False)
    command = ["feed", "synthetic", "--parts", "2", "--workers", "x:1"]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, errors.InvalidArgument)
    done = CliRunner().invoke(app, [*command, "--job", "a", "--follow"])
    assert isinstance(done.exception, errors.InvalidArgument)
