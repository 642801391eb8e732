"""The trainers of five libraries, on converted models.

Each keeps the weights of its best epoch and brings them back at the end: with
``persia.keep_rows`` the rows of that epoch are there too, so the score of the
model that the trainer leaves is the best one.  Without it the rows are those
of the last epoch, and the trainer's ``load_state_dict`` raises.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia import errors
from tests.docs.pages import DOCS
from tests.docs.test_examples import PRINTS, play
from tests.libraries import (
    BATCH,
    DENSE,
    FEATURES,
    FIELDS,
    NUMBERS,
    ROWS,
    columns,
    deepctr,
    installed,
    recbole_config,
    rechub,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

EPOCHS = 12
#: Makes rows of a model, between the model and its trainer.
Convert = Callable[[Any], None]


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> Iterator[None]:
    with installed():
        yield


def held(y: Any) -> int:
    """The first sample of those that are not trained."""
    return int(len(y) * 0.75)


def trains_deepctr(convert: Convert) -> tuple[float, float]:
    """The best score, and that of the weights which the trainer leaves."""
    callbacks = importlib.import_module("deepctr_torch.callbacks")
    metrics = importlib.import_module("sklearn.metrics")
    data, y = columns()
    model, _ = deepctr("DeepFM")
    convert(model)
    stop = callbacks.EarlyStopping(
        "val_auc", patience=2, mode="max", restore_best_weights=True
    )
    model.compile("adam", "binary_crossentropy", metrics=["auc"])
    history = model.fit(
        *(data, y),
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        validation_split=0.25,
        callbacks=[stop],
    ).history
    n = held(y)
    rest = {name: column[n:] for name, column in data.items()}
    score = metrics.roc_auc_score(y[n:], model.predict(rest, BATCH))
    return max(history["val_auc"]), float(score)


def trains_rechub(convert: Convert) -> tuple[float, float]:
    trainers = importlib.import_module("torch_rechub.trainers")
    model, batches = rechub("DCN")
    convert(model)
    trainer = trainers.CTRTrainer(
        *(model, torch.optim.Adam, {"lr": 0.01}),
        n_epoch=EPOCHS,
        earlystop_patience=2,
        device="cpu",
        model_path=".",
    )
    trainer.fit(batches[:8], batches[8:])
    best = trainer.early_stopper.best_auc
    return best, trainer.evaluate(trainer.model, batches[8:])


def trains_widedeep(convert: Convert) -> tuple[float, float]:
    models = importlib.import_module("pytorch_widedeep.models")
    training = importlib.import_module("pytorch_widedeep.training")
    callbacks = importlib.import_module("pytorch_widedeep.callbacks")
    functional = torch.nn.functional
    data, y = columns()
    x = np.stack([*data.values()], 1)
    deep = models.TabMlp(
        column_idx={name: i for i, name in enumerate(data)},
        cat_embed_input=[(name, ROWS, 8) for name in FEATURES],
        continuous_cols=NUMBERS,
        mlp_hidden_dims=[16],
    )
    model = models.WideDeep(deeptabular=deep)
    convert(model)
    stop = callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    trainer = training.Trainer(
        model, objective="binary", callbacks=[stop], verbose=0
    )
    n = held(y)
    trainer.fit(
        X_train={"X_tab": x[:n], "target": y[:n]},
        X_val={"X_tab": x[n:], "target": y[n:]},
        n_epochs=EPOCHS,
        batch_size=BATCH,
    )
    with torch.no_grad():
        model.eval()
        out = model({"deeptabular": torch.from_numpy(x[n:]).float()})
    loss = functional.binary_cross_entropy_with_logits(
        out[:, 0], torch.from_numpy(y[n:])
    )
    return stop.best, loss.item()


def trains_recbole(convert: Convert) -> tuple[float, float]:
    data_of = importlib.import_module("recbole.data")
    models = importlib.import_module("recbole.utils")
    config = recbole_config(
        "DeepFM", checkpoint_dir="saved", epochs=EPOCHS, stopping_step=2
    )
    train, valid, _ = data_of.data_preparation(
        config, data_of.create_dataset(config)
    )
    model = models.get_model("DeepFM")(config, train.dataset)
    convert(model)
    trainer = models.get_trainer(config["MODEL_TYPE"], "DeepFM")(config, model)
    best, _ = trainer.fit(train, valid, verbose=False)
    return best, trainer.evaluate(valid)["auc"]


def trains_fuxictr(convert: Convert) -> tuple[float, float]:
    maps = importlib.import_module("fuxictr.features")
    loaders = importlib.import_module(
        "fuxictr.pytorch.dataloaders.npz_dataloader"
    )
    layers = importlib.import_module("fuxictr.pytorch.layers")
    models = importlib.import_module("fuxictr.pytorch.models")

    class Deep(models.BaseModel):
        """As the models of the library's model zoo are written."""

        def __init__(self, feature_map: Any, **options: Any) -> None:
            super().__init__(feature_map, **options)
            self.embedding_layer = layers.FeatureEmbedding(feature_map, 8)
            self.mlp = layers.MLP_Block(
                (FIELDS + DENSE) * 8, [16], output_dim=1
            )
            self.compile("adam", "binary_crossentropy", 0.01)
            self.reset_parameters()

        def forward(self, inputs: Any) -> dict[str, Any]:
            rows = self.embedding_layer(self.get_inputs(inputs))
            out = self.mlp(rows.flatten(start_dim=1))
            return {"y_pred": self.output_activation(out)}

    data, y = columns()
    n = held(y)
    np.savez("train.npz", y=y[:n], **{k: v[:n] for k, v in data.items()})
    np.savez("valid.npz", y=y[n:], **{k: v[n:] for k, v in data.items()})
    features = [
        {name: {"type": "categorical", "source": "", "vocab_size": ROWS}}
        for name in FEATURES
    ] + [{name: {"type": "numeric", "source": ""}} for name in NUMBERS]
    Path("map.json").write_text(
        json.dumps(
            {
                "dataset_id": "clicks",
                "features": features,
                "labels": ["y"],
                "total_features": FIELDS * ROWS,
            }
        )
    )
    feature_map = maps.FeatureMap("clicks", ".")
    feature_map.load("map.json", {"embedding_dim": 8})
    train, valid = (
        loaders.NpzDataLoader(feature_map, name, BATCH, num_workers=0)
        for name in ("train.npz", "valid.npz")
    )
    Path("saved/clicks").mkdir(parents=True)
    options: dict[str, Any] = {"model_root": "saved", "metrics": ["AUC"]}
    model = Deep(feature_map, verbose=0, **options)
    convert(model)
    model.compile("adam", "binary_crossentropy", 0.01)
    model.fit(train, epochs=EPOCHS, validation_data=valid)
    return model._best_metric, model.evaluate(valid)["AUC"]


TRAINERS = {
    "deepctr-torch": trains_deepctr,
    "torch-rechub": trains_rechub,
    "pytorch-widedeep": trains_widedeep,
    "recbole": trains_recbole,
    "fuxictr": trains_fuxictr,
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # recbole reads it
    # Its checkpoints hold its configuration, which torch.load refuses.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.manual_seed(0)


@pytest.mark.parametrize("library", TRAINERS)
def test_the_best_weights_are_back_with_their_rows(library: str) -> None:
    def convert(model: Any) -> None:
        persia.convert(model, optimizer=persia.optim.Adagrad(lr=0.1))
        persia.keep_rows(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best, left = TRAINERS[library](convert)
    assert left == pytest.approx(best)


@pytest.mark.parametrize("library", TRAINERS)
def test_rows_of_another_epoch_are_not_taken_for_the_best(
    library: str,
) -> None:
    def convert(model: Any) -> None:
        persia.convert(model, optimizer=persia.optim.Adagrad(lr=0.1))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(errors.RowsMissing):
            TRAINERS[library](convert)


def test_the_page_runs(tmp_path: Path) -> None:
    page = "docs/howto/libraries.md"
    printed = play(DOCS / "howto" / "libraries.md", tmp_path)
    assert re.search(PRINTS[page], printed, re.MULTILINE)
