"""benchmarks.train runs and prints what it promises; times decide nothing."""

import json
import math

import pytest

from benchmarks import train

NEEDED = [
    "bench",
    "case",
    "value",
    "unit",
    "baseline",
    "baseline_value",
    "baseline_source",
    "ratio",
    "target",
    "ok",
]


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    out = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert out[0]["case"] == "machine"
    for line in out[1:]:
        assert set(NEEDED) <= set(line)
        assert math.isfinite(line["value"])
        assert (line["ok"] is None) == (line["target"] is None)
    return {line["case"]: line for line in out[1:]}


@pytest.mark.long
def test_synthetic(capsys: pytest.CaptureFixture[str]) -> None:
    train.main(["--quick", "--only", "synthetic"])
    found = lines(capsys)
    shown = found["synthetic-auc-difference"]
    low, high = shown["interval_95"]
    assert low <= shown["ours_minus_torch"] <= high
    assert shown["value"] == pytest.approx(
        abs(shown["ours_minus_torch"]), rel=1e-3
    )
    assert abs(shown["ours_minus_torch"]) < 0.02
    share = found["synthetic-share-of-planted"]
    assert 0 < share["value"] < 1


@pytest.mark.long
@pytest.mark.skipif(
    not (train.DATA / "criteo_tb_80k.tsv.gz").exists(),
    reason=f"no real data in {train.DATA} (set PERSIA_TEST_DATA)",
)
def test_criteo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.client, "available", lambda: False)
    train.main(["--quick", "--only", "criteo"])
    found = lines(capsys)
    assert set(found) == {
        "criteo-eager-free",
        "criteo-eager-torch",
        "criteo-auc",
    }
    assert found["criteo-auc"]["ok"]
    for case in ("criteo-eager-free", "criteo-eager-torch"):
        assert found[case]["ratio"] > 0
