"""Files of Spark: those that are kept here, and those that it writes now."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from persia import errors
from persia.data import Files, Schema
from persia.datasets import value_hash
from tests import spark
from tests.sources.test_carriers import check
from tests.sources.test_one_id import ids_of

KEPT = Path(__file__).parent / "spark"

#: Instants of any year, and those that nanoseconds have room for.
FIRST, LAST = -62135596800_000_000, 253402300799_000_000


@pytest.mark.parametrize("name", ["int96", "legacy"])
def test_kept_files(name: str) -> None:
    path = KEPT / f"{name}.parquet"
    check(lambda s: Files(path, s), set(spark.expressions()), set())


@pytest.mark.long
def test_files_of_today(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pip install pyspark; needs Java 17")
    spark.write(tmp_path)
    for name in spark.WRITERS:
        path = tmp_path / f"{name}.parquet"
        check(lambda s, p=path: Files(p, s), set(spark.expressions()), set())


def int96(path: Path, columns: dict[str, pa.Array]) -> Path:
    pq.write_table(
        pa.table(columns),
        path,
        use_deprecated_int96_timestamps=True,
        store_schema=False,
        row_group_size=2,
    )
    return path


def test_nanoseconds_of_int96(tmp_path: Path) -> None:
    ticks = [1, None, -1, 0]
    path = int96(
        tmp_path / "a.parquet", {"x": pa.array(ticks, pa.timestamp("ns"))}
    )
    texts = [
        "1970-01-01 00:00:00.000000001",
        "",
        "1969-12-31 23:59:59.999999999",
        "1970-01-01 00:00:00",
    ]
    data = Files(path, Schema(categorical=["x"]), 8)
    assert ids_of(data) == [value_hash(text) for text in texts]


def test_int96_is_resumed_within_a_group(tmp_path: Path) -> None:
    ticks = pa.array([FIRST, 0, LAST, None], pa.timestamp("us"))
    path = int96(tmp_path / "a.parquet", {"t": ticks, "x": ticks})
    data = Files(path, Schema(categorical=["x"], timestamp="t"), 1)
    before = list(Files(path, data.schema, 1))
    assert [b.timestamp.tolist()[0] for b in before[:3]] == [
        FIRST / 1e6,
        0,
        LAST / 1e6,
    ]
    next(iter(data))
    again = Files(path, data.schema, 1)
    again.load_state_dict(data.state_dict(1))
    after = [b.ids.values().tolist() for b in again]
    assert after == [b.ids.values().tolist() for b in before[1:]]


def test_version_1_reads_int96_as_before(tmp_path: Path) -> None:
    ticks = pa.array([LAST], pa.timestamp("us"))
    path = int96(tmp_path / "a.parquet", {"x": ticks})
    old = pq.read_table(path).column("x").cast(pa.string()).to_pylist()
    data = Files(path, Schema(categorical=["x"], hash_version=1))
    assert ids_of(data) == [value_hash(old[0])]


def test_no_unit_for_all_of_int96(tmp_path: Path) -> None:
    """Fine ones beside far ones."""
    import struct

    path = int96(
        tmp_path / "a.parquet",
        {"x": pa.array([LAST, 0], pa.timestamp("us"))},
    )
    # The second is at noon of the Julian day 2440588: give it 1 ns.
    data = bytearray(path.read_bytes())
    plain = struct.pack("<qi", 0, 2440588)
    assert data.count(plain) == 1
    at = data.index(plain)
    data[at : at + 12] = struct.pack("<qi", 1, 2440588)
    path.write_bytes(data)
    with pytest.raises(errors.DtypeError):
        list(Files(path, Schema(categorical=["x"])))


def test_intervals_of_parquet(tmp_path: Path) -> None:
    """DuckDB writes the type of Parquet, which has months."""
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "a.parquet"
    duckdb.sql(
        "select interval 90 second as x, [interval 90 second] as m, 1 as y"
    ).write_parquet(str(path))
    for schema in (
        Schema(categorical=["x"]),
        Schema(multivalued=["m"]),
    ):
        with pytest.raises(errors.DtypeError):
            list(Files(path, schema))
    assert ids_of(Files(path, Schema(categorical=["y"]))) == [value_hash("1")]
