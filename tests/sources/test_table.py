from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import persia
from persia import errors, hash_ids
from persia.data import Schema, Table, infer
from persia.datasets import value_hash
from persia.train import Trainer

pandas = pytest.importorskip("pandas")


def frame(n: int = 50) -> "pandas.DataFrame":
    i = np.arange(n)
    return pandas.DataFrame(
        {
            "user_id": i % 7,
            "item": [f"i{k % 5}" for k in i],
            "price": i / 3,
            "tags": [[f"t{j}" for j in range(k % 4)] for k in i],
            "click": i % 3 == 0,
        }
    )


SCHEMA = Schema.model_validate(
    {
        "label": "click",
        "dense": ["price"],
        "categorical": ["user_id", "item"],
        "multivalued": ["tags"],
    }
)


def same(a: persia.Batch, b: persia.Batch) -> bool:
    def equal(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return torch.equal(x, y)

    return (
        a.ids.keys() == b.ids.keys()
        and torch.equal(a.ids.values(), b.ids.values())
        and torch.equal(a.ids.lengths(), b.ids.lengths())
        and equal(a.dense, b.dense)
        and equal(a.label, b.label)
        and equal(a.weight, b.weight)
        and equal(a.timestamp, b.timestamp)
    )


def check(batches: list, data: "pandas.DataFrame") -> None:
    """The batches hold the rows of the frame in their order."""
    at = 0
    for batch in batches:
        part = data.iloc[at : at + len(batch)]
        at += len(batch)
        for name in ("user_id", "item"):
            texts = [str(v) for v in part[name]]
            ids, lengths = batch.ids[name]
            assert torch.equal(ids, hash_ids(texts))
            assert (lengths == 1).all()
        ids, lengths = batch.ids["tags"]
        assert lengths.tolist() == [len(v) for v in part["tags"]]
        assert torch.equal(ids, hash_ids([x for v in part["tags"] for x in v]))
        np.testing.assert_allclose(batch.dense[:, 0], part["price"], rtol=1e-6)
        assert batch.label.tolist() == part["click"].astype(float).tolist()
    assert at == len(data)


def test_a_frame() -> None:
    table = Table(frame(), SCHEMA, 16)
    assert table.keys == ["user_id", "item", "tags"]
    assert table.dense_names == ["price"]
    assert len(table) == 4
    assert [len(b) for b in table] == [16, 16, 16, 2]
    check(list(table), frame())
    assert len(Table(frame(), SCHEMA, 16, drop_last=True)) == 3
    assert "samples=50" in repr(table)


def test_containers_agree() -> None:
    data = frame()
    arrow = pa.Table.from_pandas(data, preserve_index=False)
    columns = {name: data[name].tolist() for name in data}

    class HuggingFace:  # what datasets.Dataset has
        column_names = arrow.column_names

        def with_format(self, kind: str) -> pa.Table:
            assert kind == "arrow"
            return arrow

    class Stream:  # DuckDB, and whatever else speaks Arrow
        def __arrow_c_stream__(self, requested: object = None) -> object:
            return arrow.__arrow_c_stream__(requested)

    arrow_like = arrow.slice(0)
    assert arrow_like[:] is not None
    for held in (
        arrow,
        pa.concat_tables([arrow.slice(0, 9), arrow.slice(9)]),
        arrow.combine_chunks().to_batches()[0],
        columns,
        columns | {"price": torch.tensor(columns["price"])},
        data.to_dict("records"),
        HuggingFace(),
        Stream(),
    ):
        table = Table(held, SCHEMA, 16)
        for a, b in zip(table, Table(data, SCHEMA, 16), strict=True):
            assert same(a, b)


def test_polars() -> None:
    polars = pytest.importorskip("polars")
    table = Table(polars.from_pandas(frame()), SCHEMA, 16)
    check(list(table), frame())


def test_every_field_of_a_schema() -> None:
    data = {
        "y": [1, 5, 3, 4],
        "w": [1.0, 2.0, 0.0, 0.5],
        "t": pa.array([0, 1, 2, 3], pa.timestamp("s")),
        "a": ["x", "y", "x", None],
        "b": [1, 2, None, 4],
        "n": [1.0, 2.0, 3.0, None],
        "s": ["p|q|r", "", "q||p", None],
        "ids": [5, -6, 7, 8],
        "lists": [[1, 2], [], [3], [4, 5]],
    }
    schema = Schema.model_validate(
        {
            "label": {"column": "y", "threshold": 4},
            "weight": "w",
            "timestamp": "t",
            "dense": [
                {"column": "n", "missing": 2, "standardise": True},
                {"column": "b", "log": True, "scale": 2, "missing": -1},
            ],
            "categorical": [
                {"column": "ids", "hash": False},
                {"column": "n", "name": "bucket", "buckets": [2, 3]},
                {"column": "n", "name": "quantile", "buckets": 2},
            ],
            "crosses": [{"columns": ["a", "b"]}],
            "multivalued": [
                {"column": "s", "separator": "|", "max_length": 2},
                {"column": "lists", "hash": False, "hash_salt": 0},
            ],
            "sequences": [
                {
                    "column": "s",
                    "name": "last",
                    "separator": "|",
                    "max_length": 2,
                }
            ],
        }
    )
    table = Table(data, schema)
    (b,) = table
    assert b.label.tolist() == [0, 1, 0, 1]
    assert b.weight.tolist() == [1, 2, 0, 0.5]
    assert b.timestamp.tolist() == [0, 1, 2, 3]
    std = np.std([1, 2, 3])
    np.testing.assert_allclose(
        b.dense[:, 0], (np.array([1, 2, 3, 2]) - 2) / std, rtol=1e-6
    )
    np.testing.assert_allclose(
        b.dense[:, 1], 2 * np.log1p([1, 2, 0, 4]), rtol=1e-6
    )

    def ids(name: str) -> list:
        return b.ids[name][0].tolist()

    assert ids("ids") == [5, -6, 7, 8]
    assert ids("bucket") == hash_ids([0, 1, 2, None]).tolist()
    assert ids("quantile") == hash_ids([0, 1, 1, None]).tolist()
    pairs = ["x\x1f1", "y\x1f2", "x\x1f", "\x1f4"]
    assert ids("a_x_b") == hash_ids(pairs).tolist()
    assert ids("s") == hash_ids(["p", "q", "q", "p"]).tolist()
    assert ids("last") == hash_ids(["q", "r", "q", "p"]).tolist()
    assert b.ids["last"][1].tolist() == [2, 0, 2, 0]
    assert ids("lists") == [1, 2, 3, 4, 5]
    assert same(b.to("cpu"), b)
    # What was measured is part of the schema: the same for other rows.
    (again,) = Table({k: v[:2] for k, v in data.items()}, table.schema)
    assert torch.equal(again.dense, b.dense[:2])


@pytest.mark.parametrize(
    ("label", "values", "expected"),
    [
        ("y", ["yes", "No", "YES"], [1, 0, 1]),
        ("y", [True, False, True], [1, 0, 1]),
        ("y", ["true", "False", "1"], [1, 0, 1]),
        ("y", [1.0, 0.0, 1.0], [1, 0, 1]),
        (
            {"column": "y", "values": {True: 1, False: 0}},
            ["True", "False"],
            [1, 0],
        ),
        ({"column": "y", "values": {1: 0, 5: 1}}, [5, 1], [1, 0]),
        ({"column": "y", "number": True}, [1.5, -2], [1.5, -2]),
        ({"column": "y", "threshold": 4}, ["4", "3.5"], [1, 0]),
    ],
)
def test_labels(label: object, values: list, expected: list) -> None:
    data = {"y": values, "c": ["a"] * len(values)}
    schema = Schema(label=label, categorical=["c"])
    (b,) = Table(data, schema)
    assert b.label.tolist() == expected


def test_labels_are_checked() -> None:
    schema = Schema(label="y", categorical=["c"])
    for wrong, where in ((3, "row 1, column 'y'"), (0.5, "row 1, column")):
        with pytest.raises(errors.SchemaMismatch, match=where):
            Table({"y": [1, wrong], "c": ["a", "b"]}, schema)
    for wrong in (None, float("nan"), float("inf")):
        data = {"y": [1, wrong], "c": ["a", "b"]}
        with pytest.raises(errors.MalformedData, match="row 1: column 'y'"):
            Table(data, schema, strict=True)
        with pytest.raises(errors.LimitReached, match="row 1: column 'y'"):
            Table(data, schema)
    data = {"y": ["yes", "maybe"], "c": ["a", "b"]}
    with pytest.raises(errors.MalformedData, match=r"row 1: .*'maybe'"):
        Table(data, schema, strict=True)
    table = Table(
        {"y": ["yes", "maybe"], "c": ["a", "b"]}, schema, malformed_limit=1
    )
    assert table.malformed == 1
    assert len(table.malformed_lines) == 1
    assert table.samples == 1


def test_yaml_booleans_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "label: {column: y, values: {yes: 1, no: 0}}\ncategorical: [c]\n"
    )
    (b,) = Table({"y": ["no", "yes"], "c": ["a", "b"]}, path)
    assert b.label.tolist() == [0, 1]


def test_wrong_tables() -> None:
    data = frame()
    with pytest.raises(errors.SchemaMismatch, match="item"):
        Table(data.drop(columns="item"), SCHEMA)
    with pytest.raises(errors.SchemaMismatch, match="price"):
        Table(data.assign(price=[[1]] * 50), SCHEMA)
    with pytest.raises(errors.SchemaMismatch, match="item"):
        Table(data.assign(item=[[1]] * 50), SCHEMA)
    with pytest.raises(errors.DtypeError):
        Table(pa.table({"c": [{"x": 1}]}), Schema(categorical=["c"]))
    with pytest.raises(errors.ShapeError):
        Table({"a": [1], "b": [1, 2]}, SCHEMA)
    with pytest.raises(errors.InvalidArgument, match=r"persia\.data\.Files"):
        Table("clicks.parquet")
    with pytest.raises(errors.InvalidArgument, match="DataFrame"):
        Table(3)
    twice = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(errors.InvalidArgument, match="'a'"):
        Table(twice, Schema(categorical=["a"]))
    with pytest.raises(errors.InvalidArgument, match="'categorical'"):
        Schema(categoricals=["a"])


def test_shards_split_and_shuffle() -> None:
    table = Table(frame(), SCHEMA, 8)
    every = list(table)
    for r in range(3):
        part = Table(frame(), SCHEMA, 8, rank=r, world_size=3)
        assert len(part) == len(every[r::3])
        for a, b in zip(part, every[r::3], strict=True):
            assert same(a, b)
    train, test = table.split(0.2)
    check(list(train), frame().iloc[:40])
    check(list(test), frame().iloc[40:])
    train, test = table.split(10, seed=1)
    assert (train.samples, test.samples) == (40, 10)
    assert not same(next(iter(test)), next(iter(table.split(10)[1])))
    ordered = frame().sort_values("click")
    with pytest.raises(errors.InvalidArgument, match="sorted"):
        Table(ordered, SCHEMA).split(0.2)
    Table(ordered, SCHEMA).split(0.2, seed=1)

    def prices(data: Table) -> list:
        return [x for b in data for x in b.dense[:, 0].tolist()]

    mixed = Table(frame(), SCHEMA, 8, shuffle=True, seed=3)
    first = prices(mixed)
    assert prices(mixed) == first != prices(table)
    assert sorted(first) == prices(table)
    mixed.epoch = 1
    assert prices(mixed) != first


def test_resume() -> None:
    for shard in ((0, 1), (1, 2)):
        whole = Table(
            frame(),
            SCHEMA,
            4,
            shuffle=True,
            rank=shard[0],
            world_size=shard[1],
        )
        whole.epoch = 2
        every = list(whole)
        for stop in range(len(every) + 1):
            data = Table(
                frame(),
                SCHEMA,
                4,
                shuffle=True,
                rank=shard[0],
                world_size=shard[1],
            )
            data.epoch = 2
            batches = iter(data)
            for _ in range(stop):
                next(batches)
            state = data.state_dict()
            again = Table(
                frame(),
                SCHEMA,
                4,
                shuffle=True,
                rank=shard[0],
                world_size=shard[1],
            )
            again.load_state_dict(state)
            rest = list(again)
            assert len(rest) == len(every) - stop
            for a, b in zip(rest, every[stop:], strict=True):
                assert same(a, b)
            assert len(list(again)) == len(every)  # from the first one
    with pytest.raises(errors.InvalidArgument):
        whole.load_state_dict({})


@pytest.mark.slow
def test_workers_and_the_loader() -> None:
    table = Table(frame(), SCHEMA, 8)
    workers = torch.utils.data.DataLoader(
        table,
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    check(list(workers), frame())
    store = persia.Store(persia.optim.SGD(lr=0.1))
    bags = persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig(key, 4, [key]) for key in table.keys],
        store=store,
    )
    for batch in persia.DataLoader(table, bags):
        assert bags(batch.ids).values().shape == (len(batch), 12)


def test_inference() -> None:
    data = frame(200).assign(
        row=[f"unique {i}" for i in range(200)],
        when=pandas.date_range("2026-01-01", periods=200),
        weight=1.5,
        constant="same",
        genres=[f"a{i % 3}|b{i % 5}" for i in range(200)],
        age=np.arange(200) % 90,
        holes=[None if i % 2 else float(i) for i in range(200)],
    )
    found = infer(data)
    assert found.label is not None
    assert found.label.column == "click"
    assert [c.column for c in found.categorical] == ["user_id", "item"]
    assert [c.column for c in found.multivalued] == ["tags", "genres"]
    assert found.multivalued[1].separator == "|"
    assert [c.column for c in found.dense] == ["price", "age", "holes"]
    assert found.weight == "weight"
    assert found.timestamp == "when"
    ratings = infer({"rating": [1, 2, 3, 4, 5], "user_id": [1, 2, 3, 4, 5]})
    assert ratings.label is not None
    assert ratings.label.threshold == 3
    assert len(list(Table(data))) == 1
    with pytest.raises(errors.SchemaMismatch):
        infer({"y": [0, 1]})


def test_weights_weigh_the_loss() -> None:
    data = frame().assign(w=0.0)
    fields = SCHEMA.model_dump() | {"weight": "w"}
    table = Table(data, Schema.model_validate(fields), 8)
    store = persia.Store(persia.optim.SGD(lr=0.1))
    bags = persia.EmbeddingBagCollection(
        [persia.EmbeddingBagConfig(key, 4, [key]) for key in table.keys],
        store=store,
    )
    model = persia.models.DLRM(bags, table.dense_features)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    trainer.fit(table)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("strip", [True, False])
def test_bytes_that_are_no_utf8_are_hashed_as_they_are(strip: bool) -> None:
    values = [b"\xff\xfe", b" \xfe\t", b"ok"]
    expected = [v.strip(b" \t") if strip else v for v in values]
    schema = Schema.model_validate(
        {
            "categorical": ["a"],
            "crosses": [{"columns": ["a", "b"]}],
            "multivalued": ["l"],
            "strip": strip,
        }
    )
    data = {"a": values, "b": values, "l": [[v] for v in values]}
    (batch,) = Table(data, schema)
    crossed = [v + b"\x1f" + v for v in expected]
    got = batch.ids.values().tolist()
    want = [value_hash(v) for v in (*expected, *crossed, *expected)]
    assert got == want
