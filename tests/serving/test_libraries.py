"""Models of other libraries, converted and exported: the oracle is the
library's own model on torch's embeddings."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from benchmarks.libraries import MODELS
from tests.libraries import deepctr, installed, recbole, widedeep

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CASES = [
    *((make, n) for make, names in MODELS.values() for n in names),
    # Those that the benchmark leaves out: several tasks, attention, a library.
    *((deepctr, n) for n in "ESMM MMOE PLE SharedBottom".split()),
    *((widedeep, f"{n}AttentionMLP") for n in ("Context", "Self")),
    *((widedeep, n) for n in ("TabFastFormer", "TabPerceiver")),
    *((recbole, n) for n in "AFM AutoInt DCN DCNV2 DSSM DeepFM".split()),
    *((recbole, n) for n in "EulerNet FFM FM FNN FiGNN FwFM".split()),
    *((recbole, n) for n in "KD_DAGFM LR NFM PNN WideDeep xDeepFM".split()),
]


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize(
    ("make", "name"), CASES, ids=[f"{m.__name__}-{n}" for m, n in CASES]
)
def test_an_export_gives_what_torch_gives(
    make: Callable[[str, int], Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # recbole reads it
    torch.manual_seed(0)
    model, batches = make(name, 16)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lists that keep an old weight
        persia.convert(twin, optimizer=persia.optim.SGD(lr=0.05))
    persia.export(twin, tmp_path / "out", example=(batches[0][0],))
    loaded = persia.load_model(tmp_path / "out")
    for x, _ in batches[1:4]:
        with torch.no_grad():
            want = model.eval()(x)
        torch.testing.assert_close(loaded(x), want, rtol=1e-6, atol=1e-6)
