from collections.abc import Iterator
from queue import Queue
from typing import Any

import pyarrow as pa
import pytest
import torch

from persia import errors
from persia.data import Records, Schema, Table
from persia.data.base import read_ahead
from tests.sources.test_files import SCHEMA, rows
from tests.sources.test_table import same

pandas = pytest.importorskip("pandas")

DATA = rows(50)
ROWS = pa.table(DATA).to_pylist()


class Dicts(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[dict]:
        yield from ROWS


def batches() -> list[pa.RecordBatch]:
    return pa.table(DATA).to_batches(max_chunksize=7)


@pytest.mark.parametrize(
    "source",
    [
        ROWS,
        Dicts(),
        batches(),
        list(pandas.DataFrame(DATA).astype({"x": object}).itertuples()),
        [pandas.DataFrame(DATA)],
        lambda epoch: iter(ROWS),
        lambda epoch: iter(batches()),
    ],
)
def test_iterables_give_the_batches_of_the_table(source: object) -> None:
    expected = list(Table(DATA, SCHEMA, 16))
    data = Records(source, SCHEMA, 16)
    for _ in range(2):
        for a, b in zip(data, expected, strict=True):
            assert same(a, b)
    shards = [
        list(Records(source, SCHEMA, 16, rank=r, world_size=2)) for r in (0, 1)
    ]
    for i, b in enumerate(expected):
        assert same(shards[i % 2][i // 2], b)
    mixed = Records(source, SCHEMA, 16, shuffle=32)
    every = list(mixed)
    for stop in range(len(every) + 1):
        again = iter(mixed)
        for _ in range(stop):
            next(again)
        state = mixed.state_dict()
        resumed = Records(source, SCHEMA, 16, shuffle=32)
        resumed.load_state_dict(state)
        for a, b in zip(resumed, every[stop:], strict=True):
            assert same(a, b)


def test_a_generator_is_read_once() -> None:
    data = Records((row for row in ROWS), batch_size=16)
    assert sum(map(len, data)) == 50  # those of the sample, too
    with pytest.raises(errors.InvalidArgument, match="source"):
        list(data)


def test_wrong_rows() -> None:
    schema = Schema(label="y", categorical=["c"])
    for source in (3, "text", {"y": [1]}):
        with pytest.raises(errors.InvalidArgument):
            Records(source, schema)
    with pytest.raises(errors.InvalidArgument):
        list(Records([1, 2], schema))
    with pytest.raises(errors.InvalidArgument):
        list(Records([{"y": 1, "c": 2}, 3], schema))
    with pytest.raises(errors.SchemaMismatch, match="'c'"):
        list(Records([{"y": 1}], schema))
    with pytest.raises(errors.SchemaMismatch, match="no rows"):
        Records([])
    with pytest.raises(errors.SchemaMismatch, match="row 1"):
        list(Records([{"y": 1, "c": 2}, {"y": 2, "c": 2}], schema))
    data = Records([{"y": 1, "c": 2}, {"y": None, "c": 2}, {"y": 0}], schema)
    (b,) = data
    assert b.label.tolist() == [1, 0]
    assert data.malformed_lines[0].startswith("row 1: column 'y'")


def test_hugging_face_datasets() -> None:
    """The real classes; the table's tests have a stand-in for the first."""
    reason = "Hugging Face datasets is not installed: pip install datasets"
    hugging = pytest.importorskip("datasets", reason=reason)
    held = hugging.Dataset.from_list(ROWS)
    expected = list(Table(DATA, SCHEMA, 16))
    stream = held.to_iterable_dataset()
    for data in (
        Table(held, SCHEMA, 16),
        Records(stream, SCHEMA, 16),
        Records(stream.with_format("arrow"), SCHEMA, 16),
    ):
        for a, b in zip(data, expected, strict=True):
            assert same(a, b)
    few = held.filter(lambda row: row["k"] < 25, keep_in_memory=True)
    assert Table(few, SCHEMA).samples == sum(k < 25 for k in DATA["k"])


def test_an_iterator_may_be_collected_in_its_own_thread() -> None:
    given: Queue[Any] = Queue()
    ended: Queue[BaseException | None] = Queue()

    def source() -> Iterator[int]:
        yield 0
        try:
            given.get().close()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    ahead = read_ahead(source)
    assert next(ahead) == 0
    given.put(ahead)
    assert ended.get(timeout=60) is None
