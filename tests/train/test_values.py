"""Ids lead back to the values that they are hashes of."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import persia
from persia import errors
from persia.cli.app import app
from persia.data import Schema
from persia.train.values import ids_of, values_of

SCHEMA = Schema.model_validate(
    {
        "categorical": ["user", {"column": "age", "buckets": [18, 65]}],
        "multivalued": [{"column": "genres", "separator": "|"}],
        "sequences": ["seen"],
        "crosses": [{"columns": ["user", "age"]}],
        "label": "click",
        "weight": "times",
        "timestamp": "when",
    }
)


@pytest.fixture
def data(tmp_path: Path) -> str:
    frame = pd.DataFrame(
        {
            "user": ["ann", "bob", "ann", "cid"],
            "age": [17, 40, 17, 70],
            "genres": ["drama|war", "", "war", "jazz|drama|war"],
            "seen": [[3, 1], [], [2], [1, 4]],
            "click": [0, 1, 0, 1],
            "times": [1.0, 2.0, 1.0, 0.5],
            "when": [1, 2, 3, 4],
        }
    )
    path = tmp_path / "data.parquet"
    frame.to_parquet(path)
    return str(path)


def test_values_of_each_kind_of_feature(data: str) -> None:
    users = ["ann", "bob", "cid"]
    ids = persia.hash_ids(users).tolist()
    assert values_of(data, SCHEMA, "user", [*ids, 5]) == dict(zip(ids, users))
    genres = ["war", "jazz"]
    ids = persia.hash_ids(genres).tolist()
    assert values_of(data, SCHEMA, "genres", ids) == dict(zip(ids, genres))
    ids = persia.hash_ids([4, 2]).tolist()
    found = values_of(data, SCHEMA, "seen", ids)
    assert found == {ids[0]: "4", ids[1]: "2"}
    (id,) = persia.hash_ids(["bob\x1f40"]).tolist()
    assert values_of(data, SCHEMA, "user_x_age", [id]) == {id: "bob x 40"}
    with pytest.raises(errors.InvalidArgument):
        values_of(data, SCHEMA, "item", ids)


def test_rows_are_printed_with_values(data: str, tmp_path: Path) -> None:
    frame = pd.read_parquet(data)[["user", "age", "click"]]
    path, out = tmp_path / "clicks.parquet", tmp_path / "out"
    pd.concat([frame] * 20).to_parquet(path)
    words = ["train", str(path), "--save", str(out), "--batch-size", "8"]
    assert CliRunner().invoke(app, words).exit_code == 0
    words = ["rows", "top", "user", "--checkpoint", str(out), "--json"]
    done = CliRunner().invoke(app, [*words, "--values", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {r["id"]: r["value"] for r in rows} == {
        int(id): name
        for name, id in zip(
            ["ann", "bob", "cid"],
            persia.hash_ids(["ann", "bob", "cid"]).tolist(),
        )
    }
    id = str(rows[0]["id"])
    words = ["rows", "explain", "user", "--checkpoint", str(out), "--json"]
    done = CliRunner().invoke(app, [*words, "--values", data, "--", id])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["value"] == rows[0]["value"]
    # The other way: by a value, with the schema of the training.
    for more in ([], ["--values", str(path)]):
        done = CliRunner().invoke(app, [*words, *more, "cid", "5"])
        assert done.exit_code == 0, done.output
        cid, other = json.loads(done.stdout)
        assert cid["id"] == persia.hash_ids(["cid"]).item()
        assert cid["present"] and other["id"] == 5
    for table, servers in (("user", "a:1"), ("nothing", None)):
        wrong = ["rows", "get", table, "cid"]
        place = ["--servers", servers] if servers else words[3:5]
        done = CliRunner().invoke(app, [*wrong, *place])
        assert isinstance(done.exception, errors.InvalidArgument)


def test_ids_of_values(data: str) -> None:
    """They are those of the batches that have the values."""
    for feature, texts in (("user", ["ann", "cid"]), ("genres", ["war"])):
        ids = ids_of(SCHEMA, feature, texts)
        assert ids == persia.hash_ids(texts).tolist()
        assert values_of(data, SCHEMA, feature, ids) == dict(zip(ids, texts))
    with pytest.raises(errors.InvalidArgument):
        ids_of(SCHEMA, "user_x_age", ["bob"])
    with pytest.raises(errors.MalformedData):
        ids_of(SCHEMA, "age", ["old"])
