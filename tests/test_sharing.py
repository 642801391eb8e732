"""What ranks leave of a pass, for another number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from persia.data import Dataset, Files, Schema
from persia.data.sharing import Shared, Sharing
from persia.datasets import SyntheticCTR

LINES = 230


def made(rank: int, world: int, folder: Path) -> Dataset:
    return SyntheticCTR(LINES, 10, rank=rank, world_size=world)


def text(rank: int, world: int, folder: Path) -> Dataset:
    """Some lines are malformed, so that ranks do not have whole blocks."""
    path = folder / "a.csv"
    if not path.exists():
        lines = [
            f"{i % 2},{i},{'x' if i % 50 == 7 else i / 2}"
            for i in range(LINES)
        ]
        path.write_text("\n".join(["label,C1,I1", *lines]))
    return files(path, rank, world)


def groups(rank: int, world: int, folder: Path) -> Dataset:
    path = folder / "a.parquet"
    if not path.exists():
        table = pa.table(
            {
                "label": [i % 2 for i in range(LINES)],
                "C1": list(range(LINES)),
                "I1": [i / 2 for i in range(LINES)],
            }
        )
        pq.write_table(table, path, row_group_size=70)
    return files(path, rank, world)


def files(path: Path, rank: int, world: int) -> Files:
    schema = {"label": "label", "categorical": ["C1"], "dense": ["I1"]}
    return Files(
        str(path),
        Schema.model_validate(schema),
        10,
        malformed_limit=1.0,
        rank=rank,
        world_size=world,
    )


def names(batches: Iterable[Any]) -> list[tuple[int, ...]]:
    """A batch by its ids."""
    return [tuple(b.ids.values().tolist()) for b in batches]


@pytest.mark.parametrize("make", [made, text, groups])
def test_each_batch_is_given_to_one_rank(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    def data(rank: int, world: int) -> Shared:
        return Shared(make(rank, world, tmp_path))

    first = [names(data(rank, 2)) for rank in range(2)]
    # Rank 0 has trained 3 of its batches, rank 1 two and its last.
    last = len(first[1]) - 1
    began = Sharing.of((3, 2), ((), (last,)))
    left = [*first[0][3:], *first[1][2:last]]

    def of_three(*sharings: Sharing) -> list[list[tuple[int, ...]]]:
        found = []
        for rank in range(3):
            one = data(rank, 3)
            one.continues(0, sharings)
            found.append(names(one))
        return found

    second = of_three(began)
    assert sorted(itertools.chain(*second)) == sorted(left)
    assert max(map(len, second)) - min(map(len, second)) <= 1
    # Again: all have trained one more, and rank 2 its third.
    more = Sharing.of((1, 1, 1), ((), (), (2,)))
    third = of_three(began, more)
    trained = [*(one[0] for one in second), second[2][2]]
    assert sorted(itertools.chain(*third)) == sorted(set(left) - set(trained))


def test_another_pass_is_whole(tmp_path: Path) -> None:
    data = Shared(made(0, 1, tmp_path))
    whole = names(data)
    data.continues(2, [Sharing.even(1, 20)])
    data.set_epoch(2)
    assert len(names(data)) == len(whole) - 20
    data.set_epoch(3)
    assert names(data) == whole
