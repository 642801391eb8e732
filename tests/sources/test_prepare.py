"""Logs in time order: the oracle is pandas' stable sort."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq
from typer.testing import CliRunner

from persia import errors, hash_ids
from persia.cli.app import app
from persia.data import Files, Schema, prepare
from persia.datasets import Avazu, Taobao, prepare_taobao

pandas = pytest.importorskip("pandas")

SCHEMA = Schema.model_validate(
    {
        "label": {"column": "y", "values": {"yes": 1, "no": 0}},
        "dense": ["x", "k"],
        "categorical": ["k", "c"],
        "multivalued": [{"column": "m", "separator": "|"}],
        "timestamp": "t",
        "strip": True,
    }
)


def log(n: int, seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    return pandas.DataFrame(
        {
            "t": rng.integers(0, n // 3, n),  # with ties
            "y": rng.choice(["yes", "no"], n),
            "x": [v if v < 90 else None for v in rng.integers(0, 99, n)],
            "k": rng.integers(0, 50, n),
            "c": [f" c{v}" for v in rng.integers(0, 9, n)],
            "m": ["|".join(f"m{j}" for j in range(v % 4)) for v in range(n)],
        }
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("chunk", [7, 100, 10_000])
def test_rows_in_the_order_of_time(
    tmp_path: Path, suffix: str, chunk: int
) -> None:
    frame = log(500)
    path = tmp_path / f"log.{suffix}"
    if suffix == "csv":
        frame.to_csv(path, index=False)
    elif suffix == "parquet":
        frame.to_parquet(path, row_group_size=60)
    else:
        frame.to_json(path, orient="records", lines=True)
    out = tmp_path / "out"
    made = prepare(path, SCHEMA, out, chunk_samples=chunk, file_samples=120)
    assert made.samples == 500
    assert made.malformed == 0
    assert [pq.read_metadata(f).num_rows for f in made.files] == [
        *[120] * 4,
        20,
    ]
    # Nothing is left of the sorting.
    names = [file.name for file in made.files]
    assert sorted(p.name for p in out.iterdir()) == [*names, "schema.yaml"]
    data = Files(str(out / "*.parquet"), str(made.schema), 500)
    (batch,) = list(data)
    want = frame.sort_values("t", kind="stable").reset_index()
    assert batch.timestamp is not None
    assert batch.timestamp.tolist() == want["t"].tolist()
    assert batch.label is not None
    assert batch.label.tolist() == (want["y"] == "yes").tolist()
    assert batch.dense is not None
    assert batch.dense[:, 0].tolist() == want["x"].fillna(0).tolist()
    assert batch.dense[:, 1].tolist() == want["k"].tolist()
    assert torch.equal(batch.ids["k"][0], hash_ids(want["k"]))
    assert torch.equal(batch.ids["c"][0], hash_ids(want["c"].str.strip()))
    lists = [part.split("|") if part else [] for part in want["m"]]
    assert batch.ids["m"][1].tolist() == list(map(len, lists))
    every = [value for part in lists for value in part]
    assert torch.equal(batch.ids["m"][0], hash_ids(every))


def test_many_runs_are_merged_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persia.data.sorting.FAN_IN", 3)
    monkeypatch.setattr("persia.data.sorting.GROUP_ROWS", 4)
    frame = log(400, 1)
    frame.to_parquet(tmp_path / "a.parquet")
    prepare(tmp_path / "a.parquet", SCHEMA, tmp_path / "o", chunk_samples=11)
    found = pq.read_table(tmp_path / "o" / "part-00000.parquet")
    want = frame.sort_values("t", kind="stable")
    assert found["m"].to_pylist() == want["m"].tolist()


def test_malformed_rows_are_left_out(tmp_path: Path) -> None:
    frame = log(100)
    text = frame.to_csv(index=False).splitlines(True)
    text[5] = "too,few\n"
    text[9] = text[9].replace("yes", "maybe").replace("no", "maybe")
    (tmp_path / "a.csv").write_text("".join(text))
    made = prepare(tmp_path / "a.csv", SCHEMA, tmp_path / "out")
    assert (made.samples, made.malformed) == (98, 2)
    places = [line.partition(": ")[0] for line in made.malformed_lines]
    assert places == [f"{tmp_path / 'a.csv'}:{line}" for line in (6, 10)]
    with pytest.raises(errors.InvalidArgument, match="timestamp"):
        prepare(
            tmp_path / "a.csv",
            SCHEMA.model_copy(update={"timestamp": None}),
            tmp_path / "out",
        )
    with pytest.raises(errors.StorageError):
        prepare(tmp_path / "none.csv", SCHEMA, tmp_path / "out")


def avazu(path: Path, n: int) -> list[int]:
    """A made file of Avazu's format; the hours."""
    names = Schema.load("avazu").columns
    assert names is not None
    rng = np.random.default_rng(5)
    hours = sorted(14102100 + int(h) for h in rng.integers(0, 24, n))
    lines = [",".join(names)]
    for i, hour in enumerate(hours):
        values = [f"{v:08x}" for v in rng.integers(0, 99, len(names) - 3)]
        lines.append(",".join(map(str, [i, i % 2, hour, *values])))
    path.write_text("\n".join(lines) + "\n")
    return hours


def test_avazu(tmp_path: Path) -> None:
    hours = avazu(tmp_path / "train.csv", 60)
    (batch,) = list(Avazu(tmp_path / "train.csv"))
    assert len(batch.ids.keys()) == 22
    assert batch.timestamp is not None
    texts = pandas.Series(list(map(str, hours)))
    days = pandas.to_datetime(texts, format="%y%m%d%H")
    seconds = [int(day.timestamp()) for day in days]
    assert batch.timestamp.tolist() == seconds
    assert torch.equal(batch.ids["hour"][0], hash_ids(hours))
    out = str(tmp_path / "out")
    runner = CliRunner()
    done = runner.invoke(
        app, ["prepare", f"avazu:{tmp_path / 'train.csv'}", out]
    )
    assert done.exit_code == 0, done.output
    (again,) = list(
        Files(f"{out}/part-00000.parquet", f"{out}/schema.yaml", 4096)
    )
    assert torch.equal(again.ids.values(), batch.ids.values())
    assert again.timestamp is not None
    assert again.timestamp.tolist() == seconds


def test_taobao(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    n = 200
    raw = pandas.DataFrame(
        {
            "user": rng.integers(0, 30, n),
            "time_stamp": rng.integers(1494000000, 1494600000, n),
            "adgroup_id": rng.integers(0, 20, n),
            "pid": "430548_1007",
            "nonclk": 0,
            "clk": rng.integers(0, 2, n),
        }
    )
    raw["nonclk"] = 1 - raw["clk"]
    ads = pandas.DataFrame({"adgroup_id": range(19)})  # one is not known
    for name in ("cate_id", "campaign_id", "customer", "brand"):
        ads[name] = rng.integers(0, 9, len(ads))
    ads["price"] = rng.integers(1, 999, len(ads)) / 2
    users = pandas.DataFrame({"userid": range(29)})
    names = ["cms_segid", "cms_group_id", "final_gender_code", "age_level"]
    names += ["pvalue_level", "shopping_level", "occupation"]
    for name in [*names, "new_user_class_level "]:
        users[name] = rng.integers(0, 5, len(users))
    raw.to_csv(tmp_path / "raw_sample.csv", index=False)
    ads.to_csv(tmp_path / "ad_feature.csv", index=False)
    users.to_csv(tmp_path / "user_profile.csv", index=False)
    out = tmp_path / "out"
    made = prepare_taobao(tmp_path, out, chunk_samples=64)
    assert made.samples == n
    (batch,) = list(Taobao(str(out / "*.parquet")))
    want = raw.sort_values("time_stamp", kind="stable")
    want = want.merge(ads, "left", on="adgroup_id")
    want = want.merge(users, "left", left_on="user", right_on="userid")
    assert batch.label is not None
    assert batch.label.tolist() == want["clk"].tolist()
    assert batch.timestamp is not None
    assert batch.timestamp.tolist() == want["time_stamp"].tolist()
    for name in ("user", "pid", "brand", "occupation"):
        assert torch.equal(batch.ids[name][0], hash_ids(want[name]))
    level = want["new_user_class_level "]
    assert torch.equal(batch.ids["new_user_class_level"][0], hash_ids(level))
    price = np.log1p(want["price"].fillna(0).to_numpy(np.float32))
    assert batch.dense is not None
    np.testing.assert_allclose(batch.dense[:, 0].numpy(), price, rtol=1e-6)
    (tmp_path / "ad_feature.csv").unlink()
    with pytest.raises(errors.StorageError):
        prepare_taobao(tmp_path, out)


def test_texts_of_a_time(tmp_path: Path) -> None:
    table = pa.table({"t": ["21/10/14", "bad"], "c": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    schema = Schema(categorical=["c"], timestamp="t", time_format="%d/%m/%y")
    data = Files(tmp_path / "a.parquet", schema)
    (batch,) = list(data)
    assert batch.timestamp is not None
    assert batch.timestamp.tolist() == [1413849600.0]
    assert data.malformed == 1
    with pytest.raises(errors.InvalidArgument):
        Schema(categorical=["c"], time_format="%y")
