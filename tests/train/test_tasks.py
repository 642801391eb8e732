"""Several labels: losses against loops, scores against scikit-learn, and an
MMoE against the same model of plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from typer.testing import CliRunner

import persia
from persia import Batch, JaggedBatch, errors, models
from persia.cli.app import app
from persia.data import Files
from persia.metrics import TaskMetrics
from persia.train import Progress, Trainer, load
from persia.train.tasks import task_loss
from tests import twins

TASKS = ["click", "buy"]
N = 8000


def call(*words: object) -> str:
    result = CliRunner().invoke(
        app, [str(word) for word in words], env={"COLUMNS": "200"}
    )
    if isinstance(result.exception, errors.PersiaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Clicks of users on items, and whether clicks became a purchase: of
    what was not clicked there is no such label."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 200, N), rng.integers(0, 300, N)
    u, v, w = rng.normal(size=200), rng.normal(size=300), rng.normal(size=300)
    price = rng.normal(size=N)
    click = rng.random(N) < 1 / (1 + np.exp(-u[user] - v[item] - price))
    buy = rng.random(N) < 1 / (1 + np.exp(-w[item] - u[user]))
    table = pd.DataFrame(
        {
            "user": [f"u{i}" for i in user],
            "item": item,
            "price": price,
            "click": click.astype(int),
            "buy": np.where(click, buy.astype(float), np.nan),
        }
    )
    path = tmp_path_factory.mktemp("tasks") / "clicks.parquet"
    table.to_parquet(path)
    return str(path)


def files(data: str) -> Files:
    return Files(data, None, 250, label=TASKS, group="user")


def scores_of(
    logits: np.ndarray, labels: np.ndarray, groups: np.ndarray
) -> dict[str, tuple[float, float, float]]:
    """AUC, log loss and GAUC of each task, by scikit-learn."""
    found = {}
    for i, name in enumerate(TASKS):
        has = ~np.isnan(labels[:, i])
        x, y, g = logits[has, i], labels[has, i], groups[has]
        total = samples = 0.0
        for one in np.unique(g):
            mine = g == one
            if 0 < y[mine].sum() < mine.sum():
                total += roc_auc_score(y[mine], x[mine]) * mine.sum()
                samples += mine.sum()
        chances = 1 / (1 + np.exp(-x.astype(np.float64)))
        found[name] = (
            float(roc_auc_score(y, x)),
            float(log_loss(y, chances)),
            total / samples,
        )
    return found


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_a_loop(weighted: bool) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 3, generator=g, requires_grad=True)
    label = torch.randint(0, 2, (50, 3), generator=g).float()
    label[torch.rand(50, 3, generator=g) < 0.4] = torch.nan
    label[:, 2] = torch.nan  # a task without any label
    weight = torch.rand(50, generator=g) if weighted else None
    loss = task_loss(logits, label, weight)
    expected = torch.zeros(())
    for i in range(2):
        has = ~label[:, i].isnan()
        expected = expected + binary_cross_entropy_with_logits(
            logits[has, i],
            label[has, i],
            weight=None if weight is None else weight[has],
        )
    torch.testing.assert_close(loss, expected)
    found, other = (
        torch.autograd.grad(one, logits)[0] for one in (loss, expected)
    )
    torch.testing.assert_close(found, other)
    alone = task_loss(logits[:, 0], label[:, 0].nan_to_num(), weight)
    assert torch.equal(
        alone,
        binary_cross_entropy_with_logits(
            logits[:, 0], label[:, 0].nan_to_num(), weight=weight
        ),
    )


def test_scores_of_tasks_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(900, 2)).round(1)
    labels = (rng.random((900, 2)) < 0.4).astype(float)
    labels[rng.random((900, 2)) < 0.3] = np.nan
    groups = rng.integers(0, 60, 900)
    metrics = TaskMetrics(TASKS)
    for part in np.array_split(np.arange(900), 7):
        metrics.update(logits[part], labels[part], groups=groups[part])
    scores = metrics.compute()
    expected = scores_of(logits, labels, groups)
    for name, one in scores.tasks.items():
        found = one.auc, one.logloss, one.gauc
        assert found == pytest.approx(expected[name], rel=1e-6)
    means = np.mean(list(expected.values()), 0)
    found = scores.auc, scores.logloss, scores.gauc
    assert found == pytest.approx(means, rel=1e-6)
    assert scores.samples == 900
    has = (~np.isnan(labels)).sum(0)
    assert [one.samples for one in scores.tasks.values()] == list(has)
    with pytest.raises(errors.ShapeError):
        metrics.update(logits, labels[:, 0])
    with pytest.raises(errors.ShapeError):
        TaskMetrics(["click"]).update(logits, labels)
    with pytest.raises(errors.InvalidArgument):
        TaskMetrics().update(logits[:, 0], labels[:, 0])
    labels[3, 1] = 0.5
    with pytest.raises(errors.InvalidArgument):
        TaskMetrics().update(logits, labels)


def test_a_shared_bottom_gives_a_logit_a_task() -> None:
    bags = persia.EmbeddingBagCollection(
        store=twins.store(),
        tables=[persia.EmbeddingBagConfig("item", 4, ["item"])],
    )
    ids = JaggedBatch(["item"], torch.arange(5))
    for dense in 0, 3:
        model = models.SharedBottom(bags, dense, 3, (8, 6), (4,))
        inputs = torch.rand(5, dense) if dense else None
        logits = model(inputs, ids)
        assert logits.shape == (5, 3)
        x = bags(ids).values()
        if inputs is not None:
            assert model.scale is not None
            model.scale.eval()
            x = torch.cat([model.scale(inputs), x], 1)
        x = model.bottom(x)
        expected = [tower(x) for tower in model.towers]
        torch.testing.assert_close(logits, torch.cat(expected, 1))


def mmoe_of(bags: Any, tasks: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return models.MMoE(bags, 1, tasks, experts=3, expert=(32, 16))


def test_an_mmoe_is_as_good_as_one_of_torch(data: str) -> None:
    """The same weights and batches: the same losses and scores."""
    train, test = files(data).split(0.25)
    batches, held = list(train), list(test)
    bags = persia.EmbeddingBagCollection(
        store=twins.store(),
        tables=[
            persia.EmbeddingBagConfig(key, 8, [key]) for key in train.keys
        ],
    )
    twin = mmoe_of(twins.TorchBags(bags, [b.ids for b in batches + held]))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        assert batch.label is not None
        logits, loss = model(batch.dense, batch.ids), torch.zeros(())
        for i in range(2):
            has = ~batch.label[:, i].isnan()
            loss = loss + binary_cross_entropy_with_logits(
                logits[has, i], batch.label[has, i]
            )
        return loss

    expected = twins.train(twin, batches, loss_of, epochs=2)
    ours = mmoe_of(bags)
    losses: dict[tuple[int, int], float] = {}
    trainer = Trainer(
        ours,
        torch.optim.Adam(ours.parameters(), lr=2e-3),
        staleness=0,
        tasks=TASKS,
    )

    def note(at: Progress) -> None:
        losses[at.epoch, at.batch] = at.loss

    trainer.fit(batches, 2, note, every=0)
    np.testing.assert_allclose(list(losses.values()), expected, rtol=2e-3)
    scores = trainer.evaluate(held)
    logits = torch.cat([twin(b.dense, b.ids) for b in held]).detach().numpy()
    labels, groups = (
        torch.cat([b[name] for b in held]).numpy()
        for name in ("label", "group")
    )
    for name, (auc, loss, gauc) in scores_of(logits, labels, groups).items():
        one = scores.tasks[name]
        assert auc > 0.6
        assert abs(one.auc - auc) < 5e-4
        assert abs(one.logloss - loss) < 5e-4
        assert one.gauc is not None and abs(one.gauc - gauc) < 2e-3


def test_tasks_from_the_command_line(data: str, tmp_path: Path) -> None:
    root, log = tmp_path / "out", tmp_path / "log.csv"
    said = call(
        *("train", data, "--model", "mmoe", "--label", "click, buy"),
        *("--group", "user", "--save", root, "--batch-size", 250),
        *("--eval-every", 20, "--curves", log, "--curves-every", 20),
    )
    assert "AUC of click" in said and "AUC of buy" in said and "GAUC" in said
    found = json.loads(call("evaluate", root, "--json"))
    trained = load(root)
    assert list(trained.tasks) == TASKS
    held = list(trained.held_out())
    with torch.no_grad():
        logits = torch.cat([trained.model(b.dense, b.ids) for b in held])
    labels, groups = (
        torch.cat([b[name] for b in held]).numpy()
        for name in ("label", "group")
    )
    expected = scores_of(logits.numpy(), labels, groups)
    for name, (auc, loss, gauc) in expected.items():
        one = found["tasks"][name]
        assert (one["auc"], one["logloss"], one["gauc"]) == pytest.approx(
            (auc, loss, gauc), rel=1e-5
        )
        assert auc > 0.6
    text = call("evaluate", root)
    assert "\nclick\n" in text and "\nbuy\n" in text
    names = set(pd.read_csv(log)["name"])
    assert {"eval/auc", "eval/buy/gauc", "train/click/auc"} <= names
    # Predictions need neither labels nor the group.
    bare = pd.read_parquet(data).drop(columns=TASKS)
    bare.to_parquet(tmp_path / "bare.parquet")
    call("predict", root, tmp_path / "bare.parquet", "--out", tmp_path / "p")
    chances = np.loadtxt(tmp_path / "p", delimiter=",")
    assert chances.shape == (N, 2)
    np.testing.assert_allclose(
        chances[-len(logits) :], torch.sigmoid(logits), rtol=1e-4
    )
    page = tmp_path / "report.html"
    call("report", root, "--curves", log, "--out", page)
    for name, (auc, _, gauc) in expected.items():
        html = page.read_text()
        assert f"<h2>Scores of {name}</h2>" in html
        assert f"<td>{auc:.4f}</td>" in html
        assert f"<td>{gauc:.4f}</td>" in html


def test_a_run_of_tasks_goes_on_where_it_was(
    data: str, tmp_path: Path
) -> None:
    words = ["train", data, "--model", "mmoe", "--label", "click,buy"]
    words += ["--batch-size", "250", "--staleness", "0", "--threads", "1"]
    once, twice = tmp_path / "once", tmp_path / "twice"
    call(*words, "--epochs", 2, "--save", once)
    call(*words, "--save", twice)
    call("train", "--resume", twice, "--epochs", 2)
    a, b = (json.loads(call("evaluate", r, "--json")) for r in (once, twice))
    assert a == b


def test_what_goes_with_several_labels(data: str, tmp_path: Path) -> None:
    for words in (
        ["--label", "click,buy"],  # with dlrm
        ["--label", "click,click"],
        ["--label", "click,", "--model", "mmoe"],
        ["--label", "price,click", "--model", "mmoe"],
        ["--label", "nothing"],
        ["--group", "nothing"],
    ):
        with pytest.raises((errors.InvalidArgument, errors.SchemaMismatch)):
            call("train", data, *words)
    for words in (["--label", "click"], ["--group", "user"]):
        with pytest.raises(errors.InvalidArgument):
            call("train", "synthetic", "--samples", 100, *words)
    best = ["--keep-best", "--best-by", "gauc", "--save", tmp_path / "best"]
    with pytest.raises(errors.InvalidArgument):
        call("train", data, "--label", "click", *best)
    said = call("train", data, "--label", "click", "--group", "user", *best)
    assert "best GAUC" in said
    yaml = call("schema", data, "--label", "click,buy", "--group", "user")
    schema = tmp_path / "schema.yaml"
    schema.write_text(yaml)
    assert persia.data.Schema.load(schema) == files(data).schema
    # Of one label any model may be.
    root = tmp_path / "one"
    call("train", data, "--label", "click", "--model", "mmoe", "--save", root)
    trained = load(root)
    assert list(trained.tasks) == []
    batch = next(iter(trained.held_out()))
    assert batch.label.shape == trained.predict(batch).shape == (len(batch),)


def test_logits_that_fit_no_label_are_refused(data: str) -> None:
    bags = persia.EmbeddingBagCollection(
        store=twins.store(),
        tables=[persia.EmbeddingBagConfig("item", 4, ["item"])],
    )
    model = mmoe_of(bags, tasks=3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = JaggedBatch(["item"], torch.arange(4))
    for label in (torch.zeros(4, 2), torch.zeros(4)):
        with pytest.raises(errors.ShapeError):
            trainer.fit([Batch(torch.zeros(4, 1), ids, label)])
