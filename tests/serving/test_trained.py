"""Exports of ``persia train``: the same answers, from raw values, as the
checkpoint gives; and the commands that look at them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import persia
from persia import errors
from persia.train import load
from tests.serving.conftest import call

pytestmark = pytest.mark.slow


def frame(place: Path) -> pd.DataFrame:
    return pd.read_csv(place / "clicks.csv", keep_default_na=False)


def test_raw_values_give_what_the_checkpoint_gives(place: Path) -> None:
    trained = load(place / "ck")
    want = trained.predict(frame(place))
    exact = persia.load_model(place / "out", "v-000001")
    rows = frame(place).drop(columns="click")
    torch.testing.assert_close(exact.predict(rows), want, rtol=1e-6, atol=0)
    # int8: an element is half a scale away at most.
    near = persia.load_model(place / "out").predict(rows)
    assert (near - want).abs().max() < 1e-3
    assert not torch.equal(near, want)


def test_a_malformed_row_is_an_error(place: Path) -> None:
    """Left out, as in a training, it would leave an answer too few."""
    rows = frame(place)[:300].astype({"age": object})
    rows.loc[7, "age"] = "old"
    with pytest.raises(errors.MalformedData):
        persia.load_model(place / "out").predict(rows)


def test_what_an_export_costs_is_printed(place: Path, tmp_path: Path) -> None:
    """The oracle is persia evaluate, of the checkpoint and of the export."""
    data = place / "clicks.csv"
    found = json.loads(
        call(
            *("export", place / "ck", tmp_path / "out", "--row-dtype", "int4"),
            *("--eval-data", data, "--json"),
        )
    )
    for which, path in (
        ("checkpoint", place / "ck"),
        ("export", found["path"]),
    ):
        scores = json.loads(call("evaluate", path, data, "--json"))
        for name in ("auc", "logloss"):
            assert found["scores"][which][name] == scores[name]
    assert found["scores"]["export"] != found["scores"]["checkpoint"]
    with pytest.raises(errors.StorageError):
        call(
            "export", place / "ck", tmp_path / "no", "--eval-data", "none.csv"
        )
    assert not (tmp_path / "no").exists()


@pytest.fixture(scope="module")
def exact(place: Path) -> Any:
    return persia.load_model(place / "out", "v-000001")


VALUES = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"),
    max_size=9,
)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            VALUES,
            st.integers(-(2**63), 2**64 - 1),
            st.floats(-1e6, 1e6),
            st.lists(VALUES.filter(lambda v: "|" not in v), max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_values_have_the_ids_of_the_training(
    tmp_path: Path, place: Path, exact: Any, samples: list[Any]
) -> None:
    """Whatever a value is: the files of the training are the oracle."""
    user, item, age, tags = map(list, zip(*samples, strict=True))
    texts = ["|".join(one) for one in tags]
    table = {"user": user, "item": item, "age": age, "tags": texts}
    lines = [
        json.dumps(dict(zip(table, row, strict=True)))
        for row in zip(*table.values(), strict=True)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    trained = load(place / "ck")
    (want,) = trained.read(str(path), labels=False)
    (got,) = exact.batches_of(table)
    assert got.ids.keys() == want.ids.keys()
    assert torch.equal(got.ids.values(), want.ids.values())
    assert torch.equal(got.ids.lengths(), want.ids.lengths())
    torch.testing.assert_close(got.dense, want.dense)


def test_commands_take_an_export(place: Path, tmp_path: Path) -> None:
    data = place / "clicks.csv"
    found = [
        json.loads(call("evaluate", root, data, "--json"))
        for root in (place / "ck", place / "out" / "v-000001", place / "out")
    ]
    # Scores that differ in the last bit may change the order of two samples.
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0]["auc"] == pytest.approx(found[2]["auc"], abs=5e-4)
    scores = [
        [float(line) for line in call("predict", root, data).split()]
        for root in (place / "ck", place / "out" / "v-000001")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=2e-6)
    call("report", place / "out", data, "--out", tmp_path / "page.html")
    assert "v-000002" in (tmp_path / "page.html").read_text()
    for words in (
        ("evaluate", place / "out"),
        ("evaluate", place / "out", data, "--step", 3),
        ("evaluate", place / "out", data, "--servers", "localhost:1"),
    ):
        with pytest.raises(errors.InvalidArgument):
            call(*words)


def test_an_export_needs_a_checkpoint_of_persia_train(
    place: Path, tmp_path: Path
) -> None:
    store = persia.Store()
    persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["t"])]
    )
    store.save(tmp_path / "other")
    with pytest.raises(errors.SchemaMismatch):
        call("export", tmp_path / "other", tmp_path / "out")
    with pytest.raises(errors.StorageError):
        call("export", tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(errors.InvalidArgument):
        call("export", place / "ck", place / "ck")
    call("export", place / "ck", tmp_path / "out", "--dry-run")
    assert not (tmp_path / "out").exists()


def test_a_training_that_cannot_export_does_not_begin(
    place: Path, tmp_path: Path
) -> None:
    data, schema = place / "clicks.csv", place / "schema.yaml"
    words = ("train", data, "--schema", schema, "--export-to")
    with pytest.raises(errors.InvalidArgument):
        call(*words, tmp_path / "out")  # no --save
    with pytest.raises(errors.InvalidArgument):
        call(*words, tmp_path / "same", "--save", tmp_path / "same")
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError):
        call(*words, tmp_path / "file" / "out", "--save", tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_persia_model_looks_and_chooses(place: Path, tmp_path: Path) -> None:
    root = tmp_path / "out"
    shutil.copytree(place / "out", root)

    def current() -> list[str]:
        found = json.loads(call("model", "ls", root, "--json"))
        assert [one["version"] for one in found] == ["v-000001", "v-000002"]
        return [one["version"] for one in found if one["current"]]

    assert current() == ["v-000002"]
    call("model", "use", root, "v-000001", "--dry-run")
    assert current() == ["v-000002"]
    call("model", "use", root, "v-000001")
    assert current() == ["v-000001"]
    with pytest.raises(errors.StorageError):
        call("model", "use", root, "v-000003")
    about = json.loads(call("model", "inspect", root, "--json"))
    assert about["version"] == "v-000001"
    kinds = {one["name"]: one["datatype"] for one in about["inputs"]}
    assert kinds == {  # what requests hold, not what the graph takes
        "age": "FP32",
        "user": "BYTES",
        "item": "BYTES",
        "tags": "BYTES",
        "tags.lengths": "INT32",
    }
    assert [one["name"] for one in about["outputs"]] == ["score"]
    rows = {t["name"]: t["rows"] for t in about["tables"]}
    found = json.loads(
        call("model", "diff", root, "v-000001", "v-000002", "--json")
    )
    for one in found:
        assert one["changed"] + one["same"] == rows[one["table"]]
        assert one["only_a"] == one["only_b"] == 0
        assert 0 < one["mean_move"] <= one["largest_move"] < 0.01
    call("model", "verify", root)
    path = root / "v-000001" / "rows-0000.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-30] ^= 1
    path.write_bytes(damaged)
    persia.load_model(root)  # whose bytes are not read
    with pytest.raises(errors.CorruptFile):
        call("model", "verify", root)
    call("model", "verify", root / "v-000002")


def test_the_nearest_rows_are_found(place: Path) -> None:
    """The oracle is scikit-learn."""
    from sklearn.metrics.pairwise import cosine_similarity, linear_kernel

    schema = ("near", "user", "--json", "--count", 7)
    model = persia.load_model(place / "out", "v-000001")
    parts = list(model.rows("user", 64))
    ids = torch.cat([torch.from_numpy(one) for one, _ in parts])
    vectors = torch.cat([torch.from_numpy(one) for _, one in parts]).double()
    id = int(ids[11])
    for by, oracle in (("cosine", cosine_similarity), ("dot", linear_kernel)):
        scores = oracle(vectors[11:12].numpy(), vectors.numpy())[0]
        want = sorted(
            (-score, one)
            for score, one in zip(scores.tolist(), ids.tolist(), strict=True)
            if one != id
        )[:7]
        for where in (
            ("--checkpoint", place / "ck"),
            ("--export", place / "out" / "v-000001"),
        ):
            found = json.loads(
                call("rows", *schema, *where, "--score", by, "--", id)
            )
            assert [one["id"] for one in found] == [one for _, one in want]
            assert [one[by] for one in found] == pytest.approx(
                [-score for score, _ in want]
            )
    data = ("--values", place / "clicks.csv")
    found = json.loads(
        call("rows", *schema, "u7", "--export", place / "out", *data)
    )
    texts = [one["value"] for one in found]
    assert len(set(texts)) == 7 and "u7" not in texts
    assert all(text.startswith("u") for text in texts)
    for wrong in (
        ("u7",),
        ("u7", "--export", place / "out", "--checkpoint", place / "ck"),
        ("u7", "--export", place / "out", "--step", 1),
        ("never seen", "--export", place / "out"),
    ):
        with pytest.raises(errors.InvalidArgument):
            call("rows", "near", "user", *wrong)
    with pytest.raises(errors.InvalidArgument):
        call("rows", "near", "nothing", "1", "--export", place / "out")


def test_ids_without_a_row_are_counted(place: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [
        {"user": "u1", "item": 3, "age": 4.0, "tags": "t1|t2|new"},
        {"user": "nobody", "item": 3, "age": 4.0, "tags": ""},
        {"user": "nobody", "item": 4, "age": 4.0, "tags": "t1"},
    ]
    log.write_text("".join(json.dumps(one) + "\n" for one in lines))
    words = ("model", "coverage", place / "out", "--data", log)
    assert json.loads(call(*words, "--json")) == [
        {"feature": "user", "ids": 3, "unknown": 2},
        {"feature": "item", "ids": 3, "unknown": 0},
        {"feature": "tags", "ids": 4, "unknown": 1},
    ]
    assert "66.67%" in call(*words)
