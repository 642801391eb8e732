"""Every benchmark runs and prints well-formed lines; times decide nothing."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import common

BENCHMARKS = Path(common.__file__).parent


def lines(capsys):
    out = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert out[0]["case"] == "machine"
    needed = "bench case value unit baseline baseline_value baseline_source"
    for line in out[1:]:
        assert set(f"{needed} ratio target ok".split()) <= set(line)
        assert math.isfinite(line["value"])
        assert (line["ok"] is None) == (line["target"] is None)
        if line["baseline"]:
            assert line["baseline_value"] > 0
            assert line["baseline_source"]
            assert line["ratio"] > 0
    return out[1:]


@pytest.mark.parametrize(
    "part",
    [
        "known16",
        *(
            pytest.param(part, marks=pytest.mark.long)
            for part in ("known64", "inserts", "far")
        ),
    ],
)
def test_table_runs(capsys, part):
    from benchmarks import table

    table.main(["--quick", "--only", part])
    assert lines(capsys)


@pytest.mark.parametrize(
    "part",
    [
        "rowwise_adagrad-16-1",
        pytest.param("adam-64-2", marks=pytest.mark.long),
    ],
)
def test_module_runs(capsys, monkeypatch, part):
    from benchmarks import module

    monkeypatch.setattr(module.client, "available", lambda: False)
    module.main(["--quick", "--only", part])
    found = lines(capsys)
    # Without the peers only torch is there to compare with.
    assert len(found) == (2 if part.startswith("adam") else 0)


@pytest.mark.long
def test_module_memory_and_unseen(capsys, monkeypatch):
    from benchmarks import module

    monkeypatch.setattr(module.client, "available", lambda: False)
    module.main(["--quick", "--only", "unseen"])
    assert len(lines(capsys)) == 2
    module.main(["--quick", "--only", "memory"])
    for line in lines(capsys):
        # What a row's vector alone takes.
        (vector,) = (
            size
            for dtype, size in (("int8", 20), ("bf16", 32), ("fp32", 64))
            if dtype in line["case"]
        )
        assert line["rows"] > 0
        assert line["value"] > vector


@pytest.mark.long
def test_pairs_of_one_build(capsys):
    from benchmarks import pairs

    pairs.main([str(pairs.ROOT), "--quick", "--only", "embedded, 1"])
    (line,) = [x for x in lines(capsys) if x["case"] != "machine"]
    assert 0 < line["lowest"] <= line["value"] <= line["highest"]
    assert len(line["starts"]) == 2


@pytest.mark.long
def test_windows_prints_both_aucs(capsys):
    from benchmarks import windows

    windows.main(["--quick"])
    (line,) = [x for x in lines(capsys) if x["case"] == "unbounded"]
    assert 0 < line["value"] < 1
    assert 0 < line["baseline_value"] < 1
    assert line["table_rows"] <= line["hashed_rows"]


@pytest.mark.long
def test_ingest_runs_on_a_file_that_it_makes(capsys, monkeypatch, tmp_path):
    from benchmarks import ingest

    monkeypatch.setenv("PERSIA_TEST_DATA", str(tmp_path))
    ingest.main(["--quick"])
    found = {line["case"]: line for line in lines(capsys)}
    assert found["criteo_gz"]["rows"] == 20_000
    assert found["criteo_plain"]["rows"] == 20_000
    for case in ("train_criteo_waits", "train_synthetic_waits"):
        assert 0 < found[case]["value"] < 1


@pytest.mark.long
def test_kafka_runs(capsys):
    pytest.importorskip("confluent_kafka", reason="persia[kafka]")
    from benchmarks import kafka

    kafka.main(["--quick"])
    assert [line["rows"] for line in lines(capsys)] == [32_000] * 3


def test_zipf_has_the_frequencies_of_its_formula():
    n = 1000
    ranks = common.Ranks("zipf", n).draw((200_000,), seed=3)
    expected = np.arange(1, n + 1) ** -common.ZIPF
    expected /= expected.sum()
    counts = np.bincount(ranks, minlength=n)[:10] / len(ranks)
    np.testing.assert_allclose(counts, expected[:10], rtol=0.05)
    assert ranks.max() < n


def test_streams_repeat_with_their_seed():
    one = common.feature_batches("uniform", 100, 2, seed=5, batch=7)
    np.testing.assert_array_equal(
        one, common.feature_batches("uniform", 100, 2, seed=5, batch=7)
    )
    assert one.shape == (2, common.FEATURES, 7)


def test_scatter_is_a_bijection_that_keeps_features_apart():
    ranks = np.broadcast_to(np.arange(1000), (1, common.FEATURES, 1000))
    assert len(np.unique(common.feature_ids(ranks))) == 1000 * common.FEATURES


def test_ratio_is_the_median_of_the_rounds_ratios():
    theirs = iter([9.0, 2.0, 30.0, 4.0])
    ours = iter([9.0, 1.0, 10.0, 1.0])
    order = []

    def run(name, times):
        def one(k):
            order.append((k, name))
            return next(times)

        return one

    times = common.alternate(
        {"ours": run("ours", ours), "theirs": run("theirs", theirs)}, rounds=3
    )
    assert times.ratio("ours", "theirs") == 3.0  # of 2, 3, 4
    assert times.median("theirs") == 4.0
    assert order[:4] == [
        (0, "theirs"),
        (0, "ours"),
        (1, "ours"),
        (1, "theirs"),
    ]


def test_report_says_ok_by_ratio_and_by_value(capsys):
    assert common.report(
        "b", "c", 3, "x", baseline="y", baseline_value=2, target=1.5
    )
    assert not common.report("b", "c", 3, "x", target=2, at_most=True)
    assert common.report("b", "c", 3, "x") is None
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["ratio"] == 1.5
    assert first["target_on"] == "ratio"


def test_gpu_says_that_there_is_none(capsys, monkeypatch):
    from benchmarks import gpu

    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--quick"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1


def test_gpu_runs_with_the_cpu_in_its_place(capsys):
    from benchmarks import gpu

    assert gpu.main(["--quick", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "torchrec" in err and len(err.splitlines()) == 1
    (line,) = map(json.loads, out.splitlines())
    assert line.pop("device") == "cpu" and line.pop("ids_copied") == 0
    assert all(x > 0 and math.isfinite(x) for x in line.values())
    assert "torchrec_ms" not in line


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in BENCHMARKS.glob("[!_]*.py"))
)
def test_a_benchmark_can_be_imported(name):
    """Those that are long run in make test-long alone."""
    importlib.import_module(f"benchmarks.{name}")
