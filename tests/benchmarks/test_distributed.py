"""The benchmarks of the distributed part run; times decide nothing."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import accuracy

pytestmark = pytest.mark.skipif(
    not Path("/usr/include/grpc/grpc.h").exists(),
    reason="no headers of gRPC",
)

NEEDED = "bench case value unit baseline baseline_value baseline_source ratio"


def lines(capsys):
    out = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert out[0]["case"] == "machine"
    for line in out[1:]:
        assert set(f"{NEEDED} target ok".split()) <= set(line)
        assert math.isfinite(line["value"])
        assert (line["ok"] is None) == (line["target"] is None)
        if line["baseline"]:
            assert line["baseline_value"] > 0
            assert line["baseline_source"]
            assert line["ratio"] > 0
    return out[1:]


def test_rpc(capsys):
    from benchmarks import rpc

    rpc.main(["--quick"])
    found = lines(capsys)
    for line in found[:4]:
        pull, push = line["messages"]
        # Ids of 8 bytes go both times, vectors of 64 come and go.
        ids = pull[0] / 8
        assert 50_000 < ids <= 106_496 * 1.01
        assert pull[1] > 64 * ids * 0.98
        assert push[0] > (64 + 8) * ids * 0.98
        assert push[1] < 100
        assert line["payload_bytes"] == sum(pull) + sum(push)
    assert [x["unit"] for x in found[4:]] == ["ms", "ms"]


@pytest.mark.long
def test_roles(capsys):
    from benchmarks import roles

    roles.main(["--quick"])
    found = lines(capsys)
    assert len(found) == 2 + 1 + 1 + 4
    for line in found[:2]:
        assert line["baseline_source"] == "same run"
        assert all(line[f"{r}_cpu_ms"] >= 0 for r in ("loader", "trainer"))
    assert found[2]["baseline_source"] == "same run"
    assert 1 <= found[3]["ratio"] <= 1.05
    assert [x["unit"] for x in found[4:]] == ["% of a core"] * 4


@pytest.mark.long
def test_cluster(capsys):
    from benchmarks import cluster

    cluster.main(["--quick"])
    found = lines(capsys)
    assert [x["baseline_value"] for x in found[:3]] == [56e3, 95e3, 36e3]
    assert found[0]["largest_staleness"] <= 8
    assert found[2]["largest_staleness"] == 0
    first, row, capacity = found[3:]
    assert first["value"] > first["serving_after_s"] > 0
    # The vector and the scalar of a row take 68 bytes.
    assert row["value"] > 68
    assert capacity["value"] < 1


@pytest.mark.long
def test_hybrid(capsys):
    from benchmarks import hybrid

    hybrid.main(["--quick"])
    found = lines(capsys)
    relay, fast, to_async, sync, to_sync, cost = found
    assert relay["unit"] == "ms"
    assert set(fast["bounds"]) == {
        "1 / dense",
        "server",
        "(staleness + 1) / (pull + dense + push)",
    }
    assert fast["largest_staleness"] <= 8
    assert sync["largest_staleness"] == 0
    # Two delays of 1 ms each for a pull and for a push.
    assert sync["baseline_value"] < 1000 / 4
    assert to_async["baseline_value"] > 0
    assert to_sync["bounds_ratio"] > 1
    assert cost["seconds_a_gb"] > 0


@pytest.mark.long
def test_scale(capsys):
    from benchmarks import scale

    scale.main(["--quick"])
    found = lines(capsys)
    assert [x["case"] for x in found[:2]] == [
        "1,000,000 parameters",
        "3,000,000 parameters",
    ]
    assert found[0]["rows"] >= 1e6 / 16
    assert found[2]["ratio"] <= found[2]["value"]


@pytest.mark.long
def test_accuracy_runs_a_job():
    result = accuracy.job(
        4, 1, {"samples": 10_240, "batch": 128, "test": 4096, "seed": 1}, 120
    )
    assert result["ranks"] == accuracy.RANKS
    assert result["steps"] == 10_240 // (2 * 128)
    assert 0.4 < result["auc"] < 1
    assert result["largest_staleness"] <= 4


def test_accuracy_goes_on_where_it_was_stopped(capsys, monkeypatch, tmp_path):
    ran = []

    def job(staleness, delay, options, timeout):
        if len(ran) == 5:
            raise KeyboardInterrupt
        ran.append((staleness, options["seed"]))
        loss = 0 if staleness == 0 else 1e-4 * options["seed"]
        return {
            "auc": 0.75 - loss,
            "steps": 10,
            "seconds": 1.0,
            "mean_staleness": staleness or 0,
            "largest_staleness": staleness or 0,
        }

    monkeypatch.setattr(accuracy, "job", job)
    path = tmp_path / "results.jsonl"
    asked = ["--quick", "--only", "jobs", "--results", str(path)]
    with pytest.raises(KeyboardInterrupt):
        accuracy.main(asked)
    assert len(path.read_text().splitlines()) == 5
    monkeypatch.setattr(
        accuracy, "job", lambda *a, f=job, r=ran: (r.clear(), f(*a))[1]
    )
    accuracy.main(asked)
    capsys.readouterr()
    assert len(path.read_text().splitlines()) == 8
    # All is there: nothing runs any more.
    monkeypatch.setattr(accuracy, "job", None)
    accuracy.main(asked)
    sync, four, sixteen, no_bound = lines(capsys)
    assert sync["value"] == 0.75
    # Losses of 0.0001 and 0.0002: Student's t of one degree is 12.706.
    half = 12.706 * 0.5e-4
    for line in (four, sixteen, no_bound):
        assert line["mean_loss"] == pytest.approx(1.5e-4)
        assert line["value"] == pytest.approx(1.5e-4 + half, rel=1e-3)
    assert four["ok"] is False
    assert sixteen["ok"] is True
    assert no_bound["ok"] is None


@pytest.mark.long
def test_overlap_grows_with_staleness(capsys):
    accuracy.main(["--quick", "--only", "overlap"])
    four, sixteen = lines(capsys)
    assert 0 < four["value"] < sixteen["value"] < 1
    assert four["batches_before"] == 9


def test_interval_of_a_mean():
    low, high = accuracy.interval([1.0, 2.0, 3.0, 4.0])
    # Student's t for 3 degrees of freedom is 3.182.
    half = 3.182 * math.sqrt(5 / 3) / 2
    assert low == pytest.approx(2.5 - half)
    assert high == pytest.approx(2.5 + half)
