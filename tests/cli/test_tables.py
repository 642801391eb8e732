"""``persia train`` and ``persia plan``: options of the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from persia import _core, admission, errors, eviction
from persia.cli.app import app
from persia.cli.plan import PlanConfig
from persia.train import load
from persia.train.config import TrainConfig, resolve
from persia.train.run import Run
from persia.train.saved import saved_options

SMALL = {"samples": 2000, "batch_size": 100, "dim": 2, "threads": 1}


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("lru", eviction.LRU()),
        ("lfu", eviction.LFU()),
        ("lfu:1000", eviction.LFU(1000)),
        ("norm", eviction.SmallestNorm()),
        ("ttl:500", eviction.TTL(updates=500)),
        ("ttl:7d", eviction.TTL(seconds=7 * 86_400)),
        ("ttl:1.5h", eviction.TTL(seconds=5400)),
        ("score:age / count", eviction.Score("age / count")),
    ],
)
def test_evictions_have_words(text: str, policy: eviction.Eviction) -> None:
    config = resolve({"eviction": text, "capacity": 9})
    assert config.table_options()["eviction"] == policy


@pytest.mark.parametrize(
    "text",
    [
        *("", "none", "fifo", "lru:3", "lfu:x", "lfu:0", "ttl", "ttl:"),
        *("ttl:-1", "ttl:x", "ttl:0s", "score:", "score:age +", "score:size"),
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="eviction"):
        resolve({"eviction": text, "capacity": 9})


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("all", admission.Probability(1.0)),
        ("0.25", admission.Probability(0.25)),
        (0.25, admission.Probability(0.25)),  # of a file
        ("sightings:3", admission.Sightings(3)),
    ],
)
def test_admissions_have_words(
    value: Any, policy: admission.Admission
) -> None:
    config = resolve({"admission": value})
    assert config.table_options()["admission"] == policy
    assert resolve(config.options()) == config


@pytest.mark.parametrize(
    "text",
    [
        *("", "none", "0", "1.5", "nan", "sightings", "sightings:1"),
        *("sightings:256", "sightings:x", "all:3"),
    ],
)
def test_other_admissions_are_refused(text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="admission"):
        resolve({"admission": text})


@pytest.mark.parametrize("text", ["lru", "lfu", "norm", "score:age"])
def test_what_goes_at_capacity_needs_one(text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="capacity"):
        resolve({"eviction": text})
    resolve({"eviction": "ttl:9"})


def test_tables_are_as_the_flags_say(tmp_path: Path) -> None:
    """Also those of a run that goes on, and of a model that is loaded."""
    folder = str(tmp_path)
    bounds = {"capacity": 20, "eviction": "lru", "admission": "sightings:2"}
    flags = SMALL | bounds | {"row_dtype": "int8", "save": folder}
    run = Run(resolve(flags))
    run.fit(lambda at: None)
    counts = run.store.stats()["tables"].values()
    assert sum(table["evicted"] for table in counts) > 0
    assert sum(table["refused"] for table in counts) > 0
    run.save()
    for store in (
        run.store,
        Run(resolve(saved_options(folder)), folder).store,
        load(folder).store,
    ):
        tables = store.stats()["tables"]
        assert max(table["rows"] for table in tables.values()) == 20
        for config in store.tables.values():
            assert config.data_type == "int8"
            assert config.admission == admission.Sightings(2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_narrow_rows_take_less(dtype: str) -> None:
    options = SMALL | {"dim": 16, "row_dtype": dtype}
    run = Run(resolve(options | {"optimizer": "rowwise_adagrad"}))
    row = next(iter(run.store.stats()["tables"].values()))["row_bytes"]
    assert row == {"fp32": 80, "bf16": 48, "int8": 36}[dtype]


def test_a_full_table_without_eviction_ends_the_run() -> None:
    run = Run(resolve(SMALL | {"capacity": 3}))
    with pytest.raises(errors.CapacityReached):
        run.fit(lambda at: None)


def test_plan_and_train_have_the_same_words() -> None:
    """An option of both has one meaning; that of a table's rows is a choice
    of the core."""
    common = set(PlanConfig.model_fields) & set(TrainConfig.model_fields)
    assert common >= {"dim", "optimizer", "row_dtype", "batch_size"}
    for name in common:
        mine, theirs = (
            model.model_fields[name] for model in (PlanConfig, TrainConfig)
        )
        assert mine.description == theirs.description
        assert mine.default == theirs.default
    assert set(_core.TABLE_OPTIONS["dtype"]) == {"fp32", "bf16", "int8"}


def test_flags_reach_the_run() -> None:
    flags = ["--capacity", "30", "--eviction", "score:age / count"]
    flags += ["--row-dtype", "bf16", "--admission", "0.5"]
    result = CliRunner().invoke(
        app,
        ["train", "--samples", "2000", "--threads", "1", *flags],
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0, result.output
    rows = next(x for x in result.output.splitlines() if "distinct ids" in x)
    assert 0 < int(rows.split("│")[2].replace(",", "")) <= 30 * 28
