"""Models of other libraries, converted by one line.

The oracle is the library's own model on torch's embeddings: trained from the
same weights on the same batches, the losses are the same.  In a data loader
each batch is one lookup, ahead of its forward.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persia

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "libraries"
PACKAGES = ["deepctr-torch==0.3.0", "torch-rechub==0.9.0"]
ROWS, FIELDS, DENSE, BATCH, STEPS = 60, 6, 3, 64, 12
FEATURES = [f"c{i}" for i in range(FIELDS)]
NUMBERS = [f"n{i}" for i in range(DENSE)]


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> Iterator[None]:
    if not FOLDER.is_dir():
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "-q", "--no-deps"),
                *("--target", str(FOLDER), *PACKAGES),
            ],
            check=False,
        )
        if done.returncode:
            pytest.skip("pip cannot install the libraries")
    sys.path.append(str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def numbers() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids [BATCH, FIELDS], dense [BATCH, DENSE] and labels [BATCH]."""
    g = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        yield (
            torch.randint(1, ROWS, (BATCH, FIELDS), generator=g),
            torch.rand(BATCH, DENSE, generator=g),
            torch.randint(2, (BATCH,), generator=g).float(),
        )


def deepctr(name: str) -> tuple[nn.Module, list[Any]]:
    inputs = importlib.import_module("deepctr_torch.inputs")
    models = importlib.import_module("deepctr_torch.models")
    columns = [
        *(inputs.SparseFeat(f, ROWS, embedding_dim=8) for f in FEATURES),
        *(inputs.DenseFeat(n, 1) for n in NUMBERS),
    ]
    layers = {} if name == "MLR" else {"dnn_hidden_units": (16,)}
    model = getattr(models, name)(columns, columns, device="cpu", **layers)
    # Its input: all columns side by side, as floats.
    return model, [(torch.cat([i, d], 1), y) for i, d, y in numbers()]


def rechub(name: str) -> tuple[nn.Module, list[Any]]:
    basic = importlib.import_module("torch_rechub.basic.features")
    ranking = importlib.import_module("torch_rechub.models.ranking")
    sparse = [basic.SparseFeature(f, ROWS, embed_dim=8) for f in FEATURES]
    dense = [basic.DenseFeature(n) for n in NUMBERS]
    mlp = {"dims": [16], "dropout": 0.0, "activation": "relu"}
    if name == "DCN":
        model = ranking.DCN(dense + sparse, 2, mlp)
    elif name == "WideDeep":
        model = ranking.WideDeep(sparse, dense + sparse, mlp)
    else:
        model = getattr(ranking, name)(dense + sparse, sparse, mlp)
    batches = []
    for ids, numeric, y in numbers():
        x = {f: ids[:, i] for i, f in enumerate(FEATURES)}
        x |= {n: numeric[:, i] for i, n in enumerate(NUMBERS)}
        batches.append((x, y))
    return model, batches


def train(model: nn.Module, batches: Iterable[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches:
        out = model(x).reshape(-1)
        loss = nn.functional.binary_cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((deepctr, n) for n in ("DeepFM", "DCN", "AutoInt", "WDL")),
        *((deepctr, n) for n in ("FiBiNET", "NFM", "MLR")),
        *((rechub, n) for n in ("DeepFM", "WideDeep", "DCN")),
    ],
)
def test_losses_are_those_of_the_library(
    make: Callable[[str], tuple[nn.Module, list[Any]]], name: str
) -> None:
    torch.manual_seed(0)
    model, batches = make(name)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lists that keep an old weight
        persia.convert(twin, optimizer=persia.optim.SGD(lr=0.05))
    expected = train(model, batches)
    loader = persia.DataLoader(batches, twin, staleness=0)
    assert train(twin, loader) == pytest.approx(expected, rel=1e-5)
    tables = [m for m in twin.modules() if hasattr(m, "rows")]
    stats = tables[0].rows.store.stats()["loader"]
    assert stats["prefetched"] == STEPS - 1
    # Those of the first batch, where a forward may ask a module twice.
    assert stats["not_prefetched"] <= 2 * len(tables)


def trains_deepctr(model: Any) -> tuple[float, float]:
    """The best score, and that of the weights which the trainer leaves."""
    callbacks = importlib.import_module("deepctr_torch.callbacks")
    metrics = importlib.import_module("sklearn.metrics")
    batches = list(numbers())
    x = torch.cat([torch.cat([i, d], 1) for i, d, _ in batches]).numpy()
    y = torch.cat([y for _, _, y in batches]).numpy()
    names = [*FEATURES, *NUMBERS]
    data = {name: x[:, i] for i, name in enumerate(names)}
    stop = callbacks.EarlyStopping(
        "val_auc", patience=2, mode="max", restore_best_weights=True
    )
    model.compile("adam", "binary_crossentropy", metrics=["auc"])
    history = model.fit(
        *(data, y),
        batch_size=BATCH,
        epochs=12,
        verbose=0,
        validation_split=0.25,
        callbacks=[stop],
    ).history
    n = int(len(y) * 0.75)
    held = {name: column[n:] for name, column in data.items()}
    score = metrics.roc_auc_score(y[n:], model.predict(held, BATCH))
    return max(history["val_auc"]), float(score)


def trains_rechub(model: Any) -> tuple[float, float]:
    trainers = importlib.import_module("torch_rechub.trainers")
    sparse = [f"c{i}" for i in range(FIELDS)]
    batches = [
        (
            {f: ids[:, i] for i, f in enumerate(sparse)}
            | {n: dense[:, i] for i, n in enumerate(NUMBERS)},
            y,
        )
        for ids, dense, y in numbers()
    ]
    trainer = trainers.CTRTrainer(
        *(model, torch.optim.Adam, {"lr": 0.01}),
        n_epoch=12,
        earlystop_patience=2,
        device="cpu",
        model_path=str(FOLDER),
    )
    trainer.fit(batches[:8], batches[8:])
    best = trainer.early_stopper.best_auc
    return best, trainer.evaluate(trainer.model, batches[8:])


@pytest.mark.parametrize(
    ("make", "name", "train"),
    [(deepctr, "DeepFM", trains_deepctr), (rechub, "DCN", trains_rechub)],
)
def test_trainers_bring_the_best_weights_back_with_their_rows(
    make: Callable[[str], tuple[nn.Module, list[Any]]],
    name: str,
    train: Callable[[nn.Module], tuple[float, float]],
) -> None:
    torch.manual_seed(0)
    model, _ = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        persia.convert(model, optimizer=persia.optim.Adagrad(lr=0.1))
        persia.keep_rows(model)
        best, left = train(model)
    assert left == pytest.approx(best)
