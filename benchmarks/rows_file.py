"""Rows of an export: ``python -m benchmarks.rows_file``.

A file of 10^7 rows (int8, dim 16) is written once. One thread:

- ``look_up``: 1,313 ids from all over the file: 13 of a user, and 13 for each
  of 100 candidates.
- ``batch``: the same as a request has it: 26 features of 100 samples, pooled
  into the input of the dense part.
- ``history``: a feature of 200 ids of the user, the same for each candidate.
- ``open``: mapping a file of 10 GB, with holes in the place of its rows: it
  needs no such disk, and no page of it was read before.
- ``bytes``: of a vector with its scale, and of the whole file, beside fp32.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import persia
from benchmarks.common import arguments, print_machine, report
from persia import _core
from persia.checkpoint.manifest import Table
from persia.serving.folder import find_version
from persia.serving.rows import FORMAT, TYPES, open_rows

BENCH = "rows_file"
DIM, KEY = 16, 0x9E3779B97F4A7C15
CANDIDATES, USER, FEATURES, HISTORY = 100, 13, 26, 200
PIECE = 1 << 16


def absent_of(folder: str) -> Table:
    """A table as a manifest has it."""
    store = persia.Store(persia.optim.Adagrad(lr=0.1))
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[persia.EmbeddingBagConfig("f", DIM, ["f"])],
    )
    ids = np.zeros(3, np.int64)
    example = persia.JaggedBatch.from_dict({"f": _tensor(ids)})
    persia.export(bags, folder, example=example)
    store.close()
    return find_version(folder).manifest.tables[0].options


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


def metadata_of(rows: int) -> str:
    return json.dumps(
        {
            "format": FORMAT,
            "table": "f",
            "type": "int8",
            "dim": str(DIM),
            "key": str(KEY),
            "rows": str(rows),
            "missing": "init",
        }
    )


def write(folder: int, rows: int, rng: np.random.Generator) -> None:
    """A file with the ids below `rows`."""
    writer = _core.RowsWriter(
        *(folder, "rows", TYPES["int8"], DIM, KEY, rows, metadata_of(rows))
    )
    for first in range(0, rows, PIECE):
        ids = np.arange(first, min(first + PIECE, rows))
        writer.add(ids, rng.random((len(ids), DIM), np.float32))
    writer.finish()


def sparse(path: Path, size: int) -> None:
    """A file of so many bytes, most of which are holes."""
    stride = _core.rows_stride(TYPES["int8"], DIM)
    rows = int(size / (stride + 64 / 12 / 0.8))
    buckets = int(rows / 12 / 0.8)
    data = buckets * 64
    head = {
        "__metadata__": json.loads(metadata_of(rows)),
        "index": {
            "dtype": "U8",
            "shape": [buckets, 64],
            "data_offsets": [0, data],
        },
        "rows": {
            "dtype": "U8",
            "shape": [rows, stride],
            "data_offsets": [data, data + rows * stride],
        },
    }
    text = json.dumps(head).encode()
    text = text.ljust(4096 - 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(4096 + data + rows * stride)


def microseconds(call: Callable[[int], object], times: int) -> float:
    """Of processor time: the median of twenty rounds."""
    found = []
    for round_ in range(20):
        begin = time.process_time()
        for i in range(times):
            call(round_ * times + i)
        found.append((time.process_time() - begin) / times * 1e6)
    return statistics.median(found)


def look_ups(file: Any, rows: int, rng: np.random.Generator) -> None:
    """The two ways of a request's ids."""
    requests = 4000  # so that none is in the cache
    ids = rng.integers(0, rows, (requests, FEATURES, CANDIDATES))
    ids[:, :USER] = ids[:, :USER, :1]
    once = np.ascontiguousarray(
        np.concatenate(
            [ids[:, :USER, 0], ids[:, USER:].reshape(requests, -1)], 1
        )
    )
    flat = ids.reshape(requests, -1)
    out = np.empty((once.shape[1], DIM), np.float32)
    took = microseconds(
        lambda i: file.look_up(once[i % requests], out), requests // 20
    )
    report(BENCH, "look_up", took, "us", target=40, at_most=True)
    parts = [(file, i, _core.POOL_SUM, i * DIM) for i in range(FEATURES)]
    pooled = np.empty((CANDIDATES, FEATURES * DIM), np.float32)
    took = microseconds(
        lambda i: _core.rows_batch(
            *(parts, FEATURES, flat[i % requests], None, None),
            *(pooled, FEATURES * DIM),
        ),
        requests // 20,
    )
    report(BENCH, "batch", took, "us")
    history = rng.integers(0, rows, (requests // 20, 1, HISTORY))
    each = history.repeat(CANDIDATES, 1).reshape(len(history), -1)
    offsets = np.arange(CANDIDATES + 1) * HISTORY
    took = microseconds(
        lambda i: _core.rows_batch(
            *(parts[:1], 1, each[i % len(each)], offsets, None),
            *(pooled, FEATURES * DIM),
        ),
        requests // 200,
    )
    report(BENCH, "history", took, "us")


def main() -> None:
    args = arguments(str(__doc__).splitlines()[0]).parse_args()
    print_machine(BENCH)
    rng = np.random.default_rng(args.seed)
    rows = 100_000 if args.quick else 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        absent = absent_of(f"{folder}/model")
        place = Path(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        write(descriptor, rows, rng)
        os.close(descriptor)
        file = open_rows(place, "rows", "int8", KEY, absent)
        look_ups(file, rows, rng)
        sparse(place / "large", 10**8 if args.quick else 10**10)
        begin = time.perf_counter()
        open_rows(place, "large", "int8", KEY, absent)
        took = time.perf_counter() - begin
        report(BENCH, "open", took * 1e3, "ms", target=200, at_most=True)
        stride = [_core.rows_stride(TYPES[k], DIM) for k in ("int8", "fp32")]
        report(
            *(BENCH, "bytes", DIM + 4, "bytes"),
            baseline="fp32",
            baseline_value=4 * DIM,
            baseline_source="the format",
            target=0.35,
            at_most=True,
            row=stride[0],
            row_fp32=stride[1],
            file=round((place / "rows").stat().st_size / rows, 2),
        )


if __name__ == "__main__":
    main()
