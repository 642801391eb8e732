"""persia.report and ``persia report``: what the page says, by scikit-learn."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from typer.testing import CliRunner

import persia
from persia import errors
from persia.cli.app import app
from persia.train import load

SAMPLES = 4000


class Cells(HTMLParser):
    """The cells of all rows of a page's tables; its links and SVG."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.links: list[str] = []

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True
        self.links += [v or "" for k, v in attrs if k in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, errors.PersiaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a click log, and the log of its training."""
    place = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 300, SAMPLES), rng.integers(0, 4, SAMPLES)
    tags = [f"t{a}|t{b}" for a, b in rng.integers(0, 9, (SAMPLES, 2))]
    click = (rng.random(SAMPLES) < 0.1 + 0.2 * (user % 4)).astype(int)
    columns = {"user": user, "item": item, "tags": tags, "click": click}
    pd.DataFrame(columns).to_csv(place / "clicks.csv", index=False)
    (place / "schema.yaml").write_text(
        "label: click\ncategorical: [user, item]\n"
        "multivalued: [{column: tags, separator: '|'}]\n"
    )
    call(
        *("train", place / "clicks.csv", "--schema", place / "schema.yaml"),
        *("--batch-size", 200, "--threads", 1, "--save", place / "out"),
        *("--curves", place / "curves.csv", "--curves-every", 3),
        *("--eval-every", 6),
    )
    return place


def page_of(path: Path) -> Cells:
    text = path.read_text(encoding="utf-8")
    for svg in text.split("<svg")[1:]:  # each is well-formed
        ElementTree.fromstring("<svg" + svg[: svg.index("</svg>")] + "</svg>")
    cells = Cells()
    cells.feed(text)
    assert not cells.links  # it loads nothing
    return cells


def test_the_page_says_what_scikit_learn_says(place: Path) -> None:
    out, curves = place / "report.html", place / "curves.csv"
    call("report", place / "out", "--out", out, "--curves", curves)
    rows = page_of(out).rows
    trained = load(place / "out")
    batches = list(trained.held_out())
    y = torch.cat([b.label for b in batches]).numpy()
    p = torch.cat([trained.predict(b) for b in batches]).double().numpy()
    found = {row[0]: row[1:] for row in rows}
    assert found["samples"] == [f"{len(y):,}"] and len(y) == SAMPLES // 10
    assert found["AUC"] == [f"{roc_auc_score(y, p):.4f}"]
    assert float(found["log loss"][0]) == pytest.approx(
        log_loss(y, p), abs=1e-5
    )
    # Deciles, by pandas.
    frame = pd.DataFrame({"p": p, "y": y})
    frame["decile"] = pd.qcut(frame["p"].rank(method="first"), 10, range(10))
    means = frame.groupby("decile", observed=True).mean()
    for i, (predicted, clicked) in enumerate(means.to_numpy().tolist()):
        assert float(found[f"{i + 1}"][1]) == pytest.approx(
            predicted, abs=1e-4
        )
        assert float(found[f"{i + 1}"][2]) == pytest.approx(clicked, abs=1e-4)
    # Slices: by the feature with the fewest ids, and by unseen ids.
    ids = torch.cat([b.ids["item"][0] for b in batches]).numpy()
    values = np.unique(ids)
    assert len(values) == 4
    for value in values:
        n, share, auc = found[f"item = {value}"]
        where = ids == value
        assert n == f"{where.sum():,}"
        assert share == f"{y[where].mean():.2%}"
        assert auc == f"{roc_auc_score(y[where], p[where]):.4f}"
    users = torch.cat([b.ids["user"][0] for b in batches])
    unseen = (~trained.store.contains("user", users)).sum()
    assert int(found["one unseen id"][0]) == unseen
    # Tables.
    ids = trained.store.ids("user")
    norms = trained.store.rows("user", ids).norm(dim=1).numpy()
    (user,) = (row for row in rows if row[0] == "user")
    assert user[1] == f"{len(ids):,}"
    assert [float(cell) for cell in user[3:6]] == pytest.approx(
        [np.quantile(norms, q) for q in (0.5, 0.95, 1)], rel=1e-3
    )
    assert "Curves over steps" in out.read_text(encoding="utf-8")


def test_other_samples_and_slices(place: Path) -> None:
    some = pd.read_csv(place / "clicks.csv").head(500)
    some.to_csv(place / "day.csv", index=False)
    out = persia.report(
        place / "out",
        place / "day.html",
        data=str(place / "day.csv"),
        slices=["user"],
        batch_size=77,
    )
    found = {row[0]: row[1:] for row in page_of(out).rows}
    assert found["samples"] == ["500"]
    (rest,) = (name for name in found if name.startswith("user: "))
    assert rest == f"user: {some['user'].nunique() - 8} others"
    assert "Curves" not in out.read_text(encoding="utf-8")


def test_what_cannot_be_reported(place: Path) -> None:
    for name in ("tags", "nothing"):  # tags has several ids a sample
        with pytest.raises(errors.InvalidArgument, match=r"\['item', 'user'"):
            persia.report(place / "out", place / "x.html", slices=[name])
    with pytest.raises(errors.StorageError):
        persia.report(place / "out", place / "no" / "x.html")
    for name in ("absent.csv", "clicks.csv"):
        with pytest.raises(errors.StorageError, match=name):
            persia.report(place / "out", place / "x.html", curves=place / name)
    assert not (place / "x.html").exists()
