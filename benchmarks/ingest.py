"""From files to ready batches: ``python -m benchmarks.ingest``.

Reads Criteo's TSV into batches of 4,096 (ids hashed, dense features
transformed) and compares with pyarrow reading the same columns and casting
them (numbers to float32, texts to codes), which makes no batches and hashes
nothing; its faster mode of one thread and many counts. Then a DLRM is trained
from the same file, and the time that it waits for data is reported. The same
rows in a Parquet file are compared with pyarrow, with pandas and, where it is
installed, with polars.

``--data`` names a Criteo TSV file (.gz or not), such as Criteo's own; without
it, and without ../shared/data, a file of that format is made.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv as pa_csv
from pyarrow import parquet as pq
from torch.nn.functional import binary_cross_entropy_with_logits

import persia
from benchmarks.common import (
    BATCH,
    alternate,
    arguments,
    print_machine,
    report,
    timed,
)
from persia.base.memory import keep_memory
from persia.data import Files, Schema
from persia.data.batches.batch import Batch
from persia.datasets import Criteo, SyntheticCTR
from persia.models.dlrm import DLRM

try:
    import polars
except ImportError:  # one comparison less
    polars = None

BENCH = "ingest"
SAME_RUN = "same run"
AHEAD = 128  # batches: more than are read ahead
DATA = "criteo_tb_80k.tsv.gz"
DENSE = [f"I{i + 1}" for i in range(13)]
KEYS = [f"C{i + 1}" for i in range(26)]
GROUPS = 8  # row groups of the Parquet file


def find_data(folder: Path, rows: int) -> tuple[Path, str]:
    """(a gzipped Criteo file, what it is)."""
    default = Path(__file__).resolve().parents[1] / "../shared/data"
    known = Path(os.environ.get("PERSIA_TEST_DATA", default)) / DATA
    if known.exists():
        return known, DATA
    path = folder / "made.tsv.gz"
    with gzip.open(path, "wb", compresslevel=6) as out:
        for batch in SyntheticCTR(rows, multis=0):
            out.write(criteo_lines(batch))
    return path, f"made, {rows} rows"


def criteo_lines(batch: Batch) -> bytes:
    """A batch as Criteo lines: counts, and ids of 32 bits in hex."""
    assert batch.dense is not None
    assert batch.label is not None
    counts = (batch.dense.clamp(-0.5, 3).exp() * 5 - 3).long().tolist()
    labels = batch.label.long().tolist()
    ids = (batch.ids.values().view(26, -1).T & 0xFFFFFFFF).tolist()
    return b"".join(
        b"%d\t%s\t%s\n"
        % (
            label,
            b"\t".join(b"%d" % x for x in row),
            b"\t".join(b"%08x" % x for x in values),
        )
        for label, row, values in zip(labels, counts, ids)
    )


def read_persia(path: Path) -> int:
    return sum(len(batch) for batch in Criteo(path, BATCH))


def read_pyarrow(path: Path, threads: bool) -> int:
    names = [f"c{i}" for i in range(40)]
    types = {n: pa.int32() for n in names[:14]}
    types |= {n: pa.string() for n in names[14:]}
    table = pa_csv.read_csv(
        path,
        read_options=pa_csv.ReadOptions(
            column_names=names, use_threads=threads
        ),
        parse_options=pa_csv.ParseOptions(delimiter="\t"),
        convert_options=pa_csv.ConvertOptions(column_types=types),
    )
    return cast(table)


def columns() -> list[str]:
    """The names of Criteo's columns in its Parquet file."""
    return ["label", *DENSE, *KEYS]


def write_parquet(path: Path, target: Path) -> None:
    """The same rows as Parquet, ``GROUPS`` times, each a row group: integers
    of 32 bits, and texts."""
    types = {n: pa.int32() for n in columns()[:14]}
    types |= {n: pa.string() for n in columns()[14:]}
    table = pa_csv.read_csv(
        path,
        read_options=pa_csv.ReadOptions(column_names=columns()),
        parse_options=pa_csv.ParseOptions(delimiter="\t"),
        convert_options=pa_csv.ConvertOptions(column_types=types),
    )
    with pq.ParquetWriter(target, table.schema) as writer:
        for _ in range(GROUPS):
            writer.write_table(table, row_group_size=1 << 17)


def criteo_schema() -> Schema:
    return Schema.model_validate(
        {
            "label": "label",
            "dense": [{"column": n, "log": True} for n in DENSE],
            "categorical": KEYS,
        }
    )


def read_files(path: Path) -> int:
    schema = criteo_schema()
    return sum(len(batch) for batch in Files(path, schema, BATCH))


def read_cast(path: Path) -> int:
    """pyarrow reads the columns and casts them: numbers to float32, texts to
    codes."""
    return cast(pq.read_table(path))


def cast(table: pa.Table) -> int:
    """Numbers to float32, texts to codes; the number of rows."""
    for column in table.columns:
        if pa.types.is_string(column.type):
            pc.dictionary_encode(column)
        else:
            pc.fill_null(column, 0).cast(pa.float32())
    return int(table.num_rows)


def read_pandas(path: Path) -> int:
    """pandas to the same tensors: log of numbers, hashes of texts."""
    frame = pandas.read_parquet(path)
    torch.from_numpy(
        np.log(frame[DENSE].fillna(0).clip(lower=0).to_numpy("float32") + 1)
    )
    for name in KEYS:
        texts = frame[name].fillna("").to_numpy(object)
        torch.from_numpy(pandas.util.hash_array(texts).view("int64"))
    return len(frame)


def read_polars(path: Path) -> int:
    """polars to the same tensors: log of numbers, hashes of texts."""
    frame = polars.read_parquet(path)
    dense = frame.select(
        polars.col(DENSE).fill_null(0).clip(0).cast(polars.Float32).log1p()
    )
    torch.from_numpy(dense.to_numpy())
    for name in KEYS:
        ids = frame[name].fill_null("").hash().to_numpy()
        torch.from_numpy(ids.view("int64"))
    return len(frame)


def reading_parquet(path: Path, rounds: int) -> None:
    rows = read_files(path)
    assert rows == read_cast(path) == read_pandas(path)
    readers = {
        "persia": timed(lambda _: read_files(path)),
        "cast": timed(lambda _: read_cast(path)),
        "pandas": timed(lambda _: read_pandas(path)),
    }
    bases = [
        ("cast", "pyarrow.parquet, reading and casting", 0.6),
        ("pandas", "pandas to the same tensors", 3.0),
    ]
    if polars is not None:
        readers["polars"] = timed(lambda _: read_polars(path))
        bases.append(("polars", "polars to the same tensors", 1.5))
    times = alternate(readers, rounds)
    for base, what, target in bases:
        report(
            BENCH,
            f"parquet_{base}",
            times.rate("persia", rows),
            "M rows/s",
            baseline=what,
            baseline_value=times.rate(base, rows),
            baseline_source=SAME_RUN,
            ratio=times.ratio("persia", base),
            target=target,
            rows=rows,
        )


def reading(name: str, path: Path, rounds: int, target: float | None) -> None:
    rows = read_persia(path)
    assert rows == read_pyarrow(path, True)
    times = alternate(
        {
            "persia": timed(lambda _: read_persia(path)),
            "one": timed(lambda _: read_pyarrow(path, False)),
            "many": timed(lambda _: read_pyarrow(path, True)),
        },
        rounds,
    )
    best = max(("one", "many"), key=lambda mode: times.rate(mode, rows))
    report(
        BENCH,
        name,
        times.rate("persia", rows),
        "M rows/s",
        baseline=f"pyarrow.csv, reading and casting, {best} thread(s)",
        baseline_value=times.rate(best, rows),
        baseline_source=SAME_RUN,
        ratio=times.ratio("persia", best),
        target=target,
        rows=rows,
        megabytes=round(path.stat().st_size / 1e6, 1),
    )


@dataclass(frozen=True)
class Trainer:
    """Tables, and what trains on a batch."""

    store: persia.Store
    train: Callable[[Batch], None]


class Waited:
    """Batches, and the seconds that their consumer waited for them."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.batches)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch


def make_trainer(keys: list[str]) -> Trainer:
    """A DLRM and its tables."""
    torch.manual_seed(1)
    store = persia.Store(optimizer=persia.optim.RowWiseAdagrad(lr=0.05))
    tables = [
        persia.EmbeddingBagConfig(key, embedding_dim=16, feature_names=[key])
        for key in keys
    ]
    bags = persia.EmbeddingBagCollection(store=store, tables=tables)
    model = DLRM(bags, 13)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train(batch: Batch) -> None:
        dense_optimizer.zero_grad()
        logits = model(batch.dense, batch.ids)
        binary_cross_entropy_with_logits(logits, batch.label).backward()
        dense_optimizer.step()

    return Trainer(store, train)


def training(name: str, source: Iterable[Batch], keys: list[str]) -> None:
    """Trains DLRM on one pass and reports the share of time it waited."""
    trainer = make_trainer(keys)
    waited, rows = Waited(source), 0
    start = time.perf_counter()
    for batch in waited:
        trainer.train(batch)
        rows += len(batch)
    seconds = time.perf_counter() - start
    report(
        BENCH,
        name,
        waited.seconds / seconds,
        "share of the time",
        target=0.02,
        at_most=True,
        batch=BATCH,
        rows=rows,
        rows_per_second=round(rows / seconds),
        threads=torch.get_num_threads(),
    )


def resident(store: persia.Store) -> int:
    """Bytes of this process in memory, without those of the tables."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    tables = store.stats()["tables"].values()
    return int(
        pages * os.sysconf("SC_PAGE_SIZE") - sum(t["bytes"] for t in tables)
    )


def memory(path: Path, rows: int) -> None:
    """Trains on files of so many rows together: the same one many times. By
    how much does the memory beside the tables vary, from a tenth of it to the
    last files, which are read ahead?"""
    keep_memory()  # as persia train does
    passes = -(-rows // pq.read_metadata(path).num_rows)
    schema = criteo_schema()
    trainer = make_trainer(KEYS)
    samples: list[int] = []
    done, start = 0, time.perf_counter()
    for batch in Files([path] * passes, schema, BATCH, samples=(0, rows)):
        trainer.train(batch)
        done += len(batch)
        if done * 50 // rows > len(samples):
            samples.append(resident(trainer.store))
    end = max(0, rows - AHEAD * BATCH) * len(samples) // rows
    late = samples[len(samples) // 10 : end]
    if not late:
        raise SystemExit(f"--rows {rows}: need more than {2 * AHEAD * BATCH}")
    report(
        BENCH,
        "memory",
        (max(late) - min(late)) / max(late),
        "share of the memory beside the tables",
        target=0.05,
        at_most=True,
        rows=done,
        megabytes=[round(size / 1e6) for size in late[:: len(late) // 9]],
        rows_per_second=round(done / (time.perf_counter() - start)),
    )


class Repeated:
    """Several passes over a data set; each begins with nothing read ahead."""

    def __init__(self, data: Criteo, passes: int) -> None:
        self.data = data
        self.passes = passes

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.passes):
            yield from self.data


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, help="a Criteo TSV file")
    parser.add_argument(
        "--rows",
        type=int,
        default=0,
        help="rows to train on in the part 'memory', which needs it: "
        "200000000 takes an hour or more",
    )
    options = parser.parse_args(argv)
    rounds = 1 if options.quick else 7
    with tempfile.TemporaryDirectory() as folder:
        if options.data:
            path, what = options.data, options.data.name
        else:
            path, what = find_data(
                Path(folder), 20_000 if options.quick else 200_000
            )
        print_machine(BENCH, data=what, torch=torch.__version__)
        packed = path.suffix == ".gz"
        if packed and "criteo_gz".startswith(options.only):
            reading("criteo_gz", path, rounds, 0.95)
        if packed and "criteo_plain".startswith(options.only):
            plain = Path(folder) / "plain.tsv"
            with gzip.open(path) as source, plain.open("wb") as out:
                shutil.copyfileobj(source, out)
            reading("criteo_plain", plain, rounds, None)
        if not packed and "criteo_plain".startswith(options.only):
            reading("criteo_plain", path, rounds, None)
        parquet = Path(folder) / "rows.parquet"
        if "parquet".startswith(options.only):
            write_parquet(path, parquet)
            reading_parquet(parquet, rounds)
        if "memory".startswith(options.only) and options.rows:
            write_parquet(path, parquet)
            memory(parquet, options.rows)
        if "train_criteo_waits".startswith(options.only):
            data = Criteo(path, BATCH)
            passes = 1 if options.quick else 3
            training("train_criteo_waits", Repeated(data, passes), data.keys)
        if "train_synthetic_waits".startswith(options.only):
            made = SyntheticCTR(
                20_000 if options.quick else 400_000, BATCH, options.seed
            )
            training("train_synthetic_waits", made, made.keys)


if __name__ == "__main__":
    main()
