"""One value has one id, whatever brought it."""

from __future__ import annotations

import datetime as dt
import io
import json
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

from persia import errors, hash_ids
from persia.data import Files, Records, Schema, Table
from persia.data.kafka.values import Values, Written
from persia.data.schema.canonical import texts
from persia.datasets import value_hash

pandas = pytest.importorskip("pandas")

UTC = dt.UTC
BERLIN = dt.timezone(dt.timedelta(hours=2))
NOON = dt.datetime(2024, 1, 2, 12, 0, 0, 500_000)
DAY = dt.date(2024, 1, 2)
ONE = uuid.UUID("123e4567-e89b-12d3-a456-426614174000")
S = Schema(categorical=["x"])

# text: the arrays of Arrow that hold the value.
ARRAYS: dict[str, list[pa.Array]] = {
    "7": [
        *(pa.array([7], kind) for kind in (pa.int8(), pa.uint64())),
        *(pa.array([7.0], kind) for kind in (pa.float32(), pa.float64())),
        pa.array([np.float16(7)], pa.float16()),
        pa.array([Decimal(7)], pa.decimal128(38, 0)),
        pa.array([Decimal("7.00")], pa.decimal128(9, 2)),
        pa.array([Decimal("7.00")], pa.decimal32(9, 2)),
        pa.array(["7"], pa.string_view()),
        pa.array([7]).dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays([1], pa.array([7])),
    ],
    "700": [pa.array([Decimal(700)], pa.decimal128(5, -2))],
    "-9223372036854775808": [pa.array([-(2**63)])],
    "18446744073709551615": [
        pa.array([2**64 - 1], pa.uint64()),
        pa.array([Decimal(2**64 - 1)], pa.decimal256(40, 0)),
    ],
    "10000000000000000000000": [
        pa.array([1e22]),
        pa.array([Decimal(10**22)], pa.decimal128(30, 0)),
    ],
    "1.5": [
        pa.array([1.5]),
        pa.array([1.5], pa.float32()),
        pa.array([Decimal("1.50")], pa.decimal64(9, 2)),
    ],
    "0.0000001": [
        pa.array([1e-7]),
        pa.array([Decimal("1e-7")], pa.decimal128(20, 10)),
    ],
    "0": [pa.array([-0.0]), pa.array([Decimal("-0.00")])],
    "true": [
        pa.array([True]),
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8())),
    ],
    "2024-01-02": [pa.array([DAY]), pa.array([DAY], pa.date64())],
    "2024-01-02 12:00:00.5": [
        *(
            pa.array([NOON], pa.timestamp(unit, zone))
            for unit in ("ms", "us", "ns")
            for zone in (None, "UTC", "America/New_York")
        ),
    ],
    "2024-01-02 12:00:00": [
        pa.array([1704196800 * n], pa.timestamp(unit))
        for unit, n in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9))
    ],
    "12:00:00.5": [
        pa.array([NOON.time()], kind)
        for kind in (pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
    ],
    "90": [
        pa.array([90 * n], pa.duration(unit))
        for unit, n in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9))
    ],
    str(ONE): [pa.array([ONE]), pa.array([str(ONE)])],
    "2024-01": [
        pa.array(
            pandas.Series(pandas.period_range("2024-01", periods=1, freq="M"))
        )
    ],
    "é": [pa.array(["é".encode()], pa.binary_view()), pa.array(["é"])],
    "e\u0301": [pa.array(["e\u0301"], pa.large_string())],
    "": [pa.array([None]), pa.array([float("nan")]), pa.array([""])],
}


def files(name: str, write: Callable[[Path], object], tmp_path: Path) -> Any:
    path = tmp_path / name
    write(path)
    return Files(path, S)


def ids_of(data: Any) -> list[int]:
    (batch,) = data
    assert data.malformed == 0
    return list(batch.ids.values().tolist())


def ipc(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)


@pytest.mark.parametrize("text", ARRAYS)
def test_types_of_arrow(text: str, tmp_path: Path) -> None:
    expected = [value_hash(text)]
    for array in ARRAYS[text]:
        assert texts(array).to_pylist()[0] in (text, text.encode())
        assert hash_ids(array).tolist() == expected, array.type
        table = pa.table({"x": array})
        assert ids_of(Table(table, S)) == expected, array.type
        assert ids_of(Records([table], S)) == expected, array.type
        made = [files("x.arrow", lambda p, t=table: ipc(p, t), tmp_path)]
        try:
            pq.write_table(table, io.BytesIO())
        except (pa.ArrowException, OSError):
            pass  # a type that Parquet has not
        else:
            made.append(
                files(
                    "x.parquet",
                    lambda p, t=table: pq.write_table(t, p),
                    tmp_path,
                )
            )
        for data in made:
            assert ids_of(data) == expected, array.type
        if text:
            plain = pa.array([0, len(array)], pa.int32())
            try:
                many = pa.ListArray.from_arrays(plain, array)
            except pa.ArrowException:
                continue
            bags = Schema(multivalued=["x"])
            (batch,) = Table(pa.table({"x": many}), bags)
            assert batch.ids.values().tolist() == expected, many.type


VALUES: dict[str, list[Any]] = {
    "7": [
        [7],
        [7.0],
        [Decimal("7.00")],
        np.array([7], np.int8),
        np.array([7], np.float16),
        torch.tensor([7], dtype=torch.int16),
        torch.tensor([7.0], dtype=torch.bfloat16),
        pandas.Series([7.0]),
        pandas.Series([7], dtype="Int64"),
        ["7"],
        [b"7"],
        [np.array(7)],
        [torch.tensor(7)],
        [torch.tensor(7, dtype=torch.bfloat16)],
    ],
    "18446744073709551615": [
        [2**64 - 1],
        np.array([2**64 - 1], np.uint64),
        ["18446744073709551615"],
    ],
    "2024-01-02 12:00:00.5": [
        [NOON],
        [NOON.replace(tzinfo=UTC)],
        [(NOON + dt.timedelta(hours=2)).replace(tzinfo=BERLIN)],
        np.array([NOON], "M8[ms]"),
        pandas.Series([NOON]),
        pandas.Series([NOON]).dt.as_unit("ns"),
        pandas.Series([NOON]).dt.tz_localize("UTC"),
        [pandas.Timestamp(NOON)],
        [pandas.Timestamp(NOON, tz="Asia/Tokyo").tz_localize(None)],
    ],
    "2024-01-02 12:00:00.000000001": [
        [pandas.Timestamp(1704196800_000000001)],
        [pandas.Timestamp(1704196800_000000001, tz="Asia/Tokyo")],
        [np.datetime64(1704196800_000000001, "ns")],
        pandas.Series([pandas.Timestamp(1704196800_000000001)], dtype=object),
    ],
    "0.000000001": [[pandas.Timedelta(1)], np.array([1], "m8[ns]")],
    "0.1": [[np.float32(0.1)], [0.1], torch.tensor([0.1])],
    "2024-01-02 12:00:00": [
        np.array(["2024-01-02T12"], "M8[h]"),
        [NOON.replace(microsecond=0)],
    ],
    "2024-01-02": [[DAY], np.array([DAY], "M8[D]")],
    "90": [
        [dt.timedelta(seconds=90)],
        np.array([90], "m8[s]"),
        pandas.Series([dt.timedelta(seconds=90)]),
    ],
    "true": [
        [True],
        np.array([True]),
        torch.tensor([True]),
        pandas.Series([True], dtype="boolean"),
    ],
    str(ONE): [[ONE], pandas.Series([ONE]), [str(ONE)]],
    "2024-01": [
        [pandas.Period("2024-01", "M")],
        pandas.Series([pandas.Period("2024-01", "M")]),
    ],
    "inf": [[float("inf")], [Decimal("Infinity")], np.array([np.inf])],
    "": [
        *([None], [float("nan")], [pandas.NaT], [Decimal("NaN")]),
        *([np.datetime64("NaT")], [np.timedelta64("NaT")]),
        pandas.Series([pandas.NA], dtype="Int64"),
    ],
}


@pytest.mark.parametrize("text", VALUES)
def test_values_in_memory(text: str) -> None:
    expected = [value_hash(text)]
    for values in VALUES[text]:
        assert hash_ids(values).tolist() == expected, values
        assert ids_of(Table({"x": values}, S)) == expected, values
        rows = [{"x": values[0]}]
        if isinstance(values, list):
            assert ids_of(Records(rows, S)) == expected, values
            # Beside values of other types, and in other pieces.
            mixed = [*values, "a", 1, None, DAY, True]
            assert hash_ids(mixed).tolist()[0] == expected[0], values
            assert hash_ids(mixed[::-1]).tolist()[-1] == expected[0], values


def test_objects_of_polars() -> None:
    """Which Arrow has as addresses."""
    polars = pytest.importorskip("polars")
    column = polars.Series("x", [ONE, DAY, None], dtype=polars.Object)
    expected = [value_hash(t) for t in (str(ONE), "2024-01-02", "")]
    assert hash_ids(column).tolist() == expected
    assert ids_of(Table(polars.DataFrame([column]), S)) == expected


def test_lists_of_tensors() -> None:
    bags = Schema(multivalued=["x"])
    lists: list[Any] = [[1, 2], [], [3]]
    for make in (torch.tensor, np.array, tuple):
        rows = [{"x": make(one)} for one in lists]
        (batch,) = Records(rows, bags)
        assert batch.ids.values().tolist() == hash_ids([1, 2, 3]).tolist()
        assert batch.ids.lengths().tolist() == [2, 0, 1]
    with pytest.raises(errors.DtypeError):
        Table({"x": [[[1], [2]]]}, bags)


def test_what_a_piece_holds_does_not_matter() -> None:
    for values in (
        [Decimal("1.50"), Decimal("1.125")],
        [DAY, NOON],
        [True, 2],
        [1, True],
        [1.5, 2**60],
        [0.5, True],
        [np.float32(0.1), 0.5],
        [NOON, pandas.Timestamp(1704196800_000000001)],
        [dt.timedelta(1), pandas.Timedelta(1)],
    ):
        alone = [hash_ids([v]).item() for v in values]
        assert hash_ids(values).tolist() == alone
        assert hash_ids(np.array(values, object)).tolist() == alone
        assert hash_ids(pandas.Series(values, dtype=object)).tolist() == alone
        for lists in [values], [values[:1], values[1:]]:
            (batch,) = Records(
                [{"x": one} for one in lists], Schema(multivalued=["x"])
            )
            assert batch.ids.values().tolist() == alone, lists


@pytest.mark.parametrize(
    ("kind", "said", "written"),
    [
        ("number", "7", ["7", "7.0", "7.00", "7e0", " 7", "+7"]),
        ("boolean", "true", ["true", "True", "TRUE", "1", "yes"]),
        (
            "time",
            "2024-01-02 12:00:00.5",
            [
                "2024-01-02T12:00:00.500",
                "2024-01-02 12:00:00.5Z",
                "2024-01-02 14:00:00.500000+02:00",
                "2024-01-02 14:00:00.5+02",
                "2024-01-02 12:00:00,5 UTC",
            ],
        ),
    ],
)
def test_texts_of_a_declared_type(
    kind: str, said: str, written: list[str], tmp_path: Path
) -> None:
    schema = Schema(
        categorical=[{"column": "x", "type": kind}, "y"], delimiter=";"
    )
    path = tmp_path / "a.csv"
    lines = [f"{one};a\n" for one in [*written, "", "NA", "odd"]]
    path.write_text("x;y\n" + "".join(lines))
    data = Files(path, schema)
    (batch,) = data
    expected = [value_hash(said)] * len(written) + [value_hash("")] * 2
    assert batch.ids["x"][0].tolist() == expected
    assert data.malformed == 1


LISTS = [
    *("a,b", "a, b", " a ,b", "[a, b]", "['a', 'b']", '["a", "b"]', "{a,b}"),
    *('{"a","b"}', "['a' 'b']", '[ "a" , null, "b" ]', "a,,b", "[a, b, None]"),
    *("['\\x61', 'b']", '["\\u0061","b"]'),
]


def test_lists_as_texts(tmp_path: Path) -> None:
    table = pa.table({"m": LISTS})
    schema = Schema(multivalued=["m"], delimiter=";")
    (batch,) = Table(table, schema)
    expected = hash_ids(["a", "b"]).tolist() * len(LISTS)
    assert batch.ids.values().tolist() == expected
    path = tmp_path / "a.csv"
    pandas.DataFrame({"m": LISTS}).to_csv(path, index=False, sep=";")
    (batch,) = Files(path, schema)
    assert batch.ids.values().tolist() == expected
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"m": v}) + "\n" for v in LISTS))
    (batch,) = Files(path, schema)
    assert batch.ids.values().tolist() == expected
    numbers = Table({"m": ["1,2", "[1, 2]", "[1.0, 2.0]", "[1 2]"]}, schema)
    assert next(iter(numbers)).ids.values().tolist() == (
        hash_ids([1, 2]).tolist() * 4
    )


@pytest.mark.parametrize("odd", ["['a]", "[[a]]", "{'a': 1}", "[a]x]", "[a']"])
def test_malformed_lists(odd: str) -> None:
    data = Table(
        {"m": ["a", odd]}, Schema(multivalued=["m"]), malformed_limit=1
    )
    assert (data.samples, data.malformed) == (1, 1)


IDS = [5, 2**63, 2**64 - 1, -(2**63)]
AS_IDS = [5, -(2**63), -1, -(2**63)]


def test_ids_as_they_are(tmp_path: Path) -> None:
    schema = Schema(
        categorical=[{"column": "x", "hash": False}],
        multivalued=[{"column": "m", "hash": False, "separator": "|"}],
    )
    columns = {
        "unsigned": pa.array(IDS[:3], pa.uint64()),
        "decimals": pa.array(map(Decimal, IDS), pa.decimal128(20, 0)),
        "texts": pa.array(map(str, IDS)),
        "codes": pa.array(map(str, IDS)).dictionary_encode(),
        "bytes": pa.array([str(v).encode() for v in IDS]),
    }
    for name, column in columns.items():
        bags = (
            pa.ListArray.from_arrays(range(len(column) + 1), column)
            if (name != "codes")
            else [[v] for v in column.to_pylist()]
        )
        table = pa.table({"x": column, "m": bags})
        (batch,) = Table(table, schema)
        n = len(column)
        assert batch.ids["x"][0].tolist() == AS_IDS[:n], name
        assert batch.ids["m"][0].tolist() == AS_IDS[:n], name
        pq.write_table(table, tmp_path / "a.parquet")
        (batch,) = Files(tmp_path / "a.parquet", schema)
        assert batch.ids["x"][0].tolist() == AS_IDS[:n], name
    rows = [{"x": v, "m": [v]} for v in IDS]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl").write_text(text + "[]\n")  # line by line
    lines = "".join(f"{v},{v}\n" for v in IDS)
    (tmp_path / "a.csv").write_text("x,m\n" + lines)
    for data in (
        *(Files(tmp_path / n, schema) for n in ("a.jsonl", "b.jsonl")),
        Files(tmp_path / "a.csv", schema),
        Records(rows, schema),
        Table(rows, schema),
    ):
        (batch,) = data
        assert batch.ids["x"][0].tolist() == AS_IDS, data
        assert batch.ids["m"][0].tolist() == AS_IDS, data


@pytest.mark.parametrize(
    "odd", ["a", "1.5", "0x10", "1_0", str(2**64), "", None, "٣"]
)
def test_what_is_no_id_is_malformed(odd: Any, tmp_path: Path) -> None:
    schema = Schema(categorical=[{"column": "x", "hash": False}, "y"])
    rows = [{"x": "7", "y": 1}, {"x": odd, "y": 1}]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    for data in (
        Table(rows, schema, malformed_limit=1),
        Records(rows, schema),
        Files(tmp_path / "a.jsonl", schema),
        Files(tmp_path / "a.csv", schema),
    ):
        (batch,) = data
        assert batch.ids["x"][0].tolist() == [7]
        assert data.malformed == 1
    bags = Schema(multivalued=[{"column": "x", "hash": False}])
    if odd:
        data = Table({"x": ["7,8", f"7,{odd}"]}, bags, malformed_limit=1)
        assert next(iter(data)).ids.values().tolist() == [7, 8]
        assert data.malformed == 1


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}],
        [[[1]]],
        [1j],
        pa.array([{"a": 1}]),
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        np.array([1j]),
        np.zeros(1, [("a", int)]),
        pandas.Series(pandas.interval_range(0, 1)),
        [object()],
    ],
)
def test_values_without_a_text(values: Any) -> None:
    with pytest.raises(errors.PersiaError):
        hash_ids(values)
    with pytest.raises(errors.PersiaError):
        Table({"x": values}, S)


def test_half_a_character() -> None:
    with pytest.raises(errors.MalformedData):
        hash_ids(["\ud83d"])
    with pytest.raises(errors.PersiaError):
        Table({"x": ["a", "\ud83d"]}, S)


def test_version_1_keeps_its_ids() -> None:
    old = Schema(categorical=["x"], hash_version=1)
    stamp = pa.array([NOON], pa.timestamp("us", "UTC"))
    for array, text in (
        (stamp, "2024-01-02 12:00:00.500000Z"),
        (pa.array([Decimal("7.00")]), "7.00"),
        (pa.array([90], pa.duration("s")), "90"),
        (pa.array([1e-7]), "1e-7"),
        (pa.array([NOON.time()]), "12:00:00.500000"),
    ):
        assert ids_of(Table(pa.table({"x": array}), old)) == [value_hash(text)]
        assert hash_ids(array, hash_version=1).tolist() == [value_hash(text)]
    (batch,) = Table(pa.table({"x": pa.array([ONE])}), old)
    assert batch.ids.values().tolist() == hash_ids([ONE.bytes]).tolist()
    bags = Schema(multivalued=["m"], hash_version=1)
    (batch,) = Table({"m": ["a, b"]}, bags)
    assert batch.ids.values().tolist() == hash_ids(["a", " b"]).tolist()


def test_a_checkpoint_decides_the_version(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([NOON, NOON], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet")
    data = Files(tmp_path / "a.parquet", S, 1)
    new, _ = (batch.ids.values() for batch in data)
    state = data.state_dict(1)
    assert state["hash_version"] == 2
    old = {name: v for name, v in state.items() if name != "hash_version"}
    again = Files(tmp_path / "a.parquet", S, 1)
    again.load_state_dict(old)
    assert again.schema.hash_version == 1
    (batch,) = again
    assert batch.ids.values().tolist() == [
        value_hash("2024-01-02 12:00:00.500000")
    ]
    again.load_state_dict(state)
    (batch,) = again
    assert torch.equal(batch.ids.values(), new)
    held = Table(table, S, 1)
    with pytest.raises(errors.InvalidArgument):
        held.load_state_dict(old)
    held = Table({"x": ["a", "b"]}, S, 1)
    held.load_state_dict(old)  # texts have the same ids
    assert Schema.of_checkpoint('{"categorical": ["x"]}').hash_version == 1
    assert Schema.of_checkpoint(S.model_dump_json()).hash_version == 2


# ---- carriers that read messages and records


def of_messages(form: str, values: list[bytes], **more: Any) -> list[int]:
    written = Written.checked(
        form, more.get("path"), more.get("message"), None
    )
    rows, wrong = Values(S, written, False).rows(values)
    assert rows is not None
    assert not wrong
    return list(rows.batch(["x"]).ids.values().tolist())


def test_messages_that_spoil_a_block() -> None:
    for value, text in (
        (7, "7"),
        (2**64 - 1, str(2**64 - 1)),
        (1e-7, "0.0000001"),
        (True, "true"),
        (None, ""),
        ("e\u0301", "e\u0301"),
    ):
        one = json.dumps({"x": value}).encode()
        found = of_messages("json", [one, b' {"x":\n"a"} ', b'{"x": 1.5}'])
        assert found[0] == value_hash(text)


def test_uuids_of_avro(tmp_path: Path) -> None:
    """Of a fixed size, which fastavro writes as bytes."""
    fastavro = pytest.importorskip("fastavro")
    fixed = {"type": "fixed", "name": "U", "size": 16}
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "x", "type": fixed}],
    }
    out = io.BytesIO()
    fastavro.schemaless_writer(
        out, fastavro.parse_schema(schema), {"x": ONE.bytes}
    )
    fixed["logicalType"] = "uuid"
    path = tmp_path / "r.avsc"
    path.write_text(json.dumps(schema))
    found = of_messages("avro", [out.getvalue()], path=path)
    assert found == [value_hash(str(ONE))]
