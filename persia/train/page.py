"""A page about a model of ``persia train``: how it learned, how well it
predicts, and what its tables hold."""

from __future__ import annotations

import functools
import html
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from persia import errors
from persia.base.output import new_file
from persia.checkpoint import files
from persia.checkpoint.manifest import Table
from persia.checkpoint.rows import read_rows
from persia.data.batches.batch import Batch
from persia.metrics.clicks import (
    as_arrays,
    auc_of,
    cross_entropy,
    gauc_of,
    ratio,
    sigmoid,
)
from persia.serving.model import ExportedModel
from persia.train.charts import STYLE, Points, bars, lines
from persia.train.logs import read_csv
from persia.train.saved import Trained, load
from persia.train.sources import no_sample
from persia.train.tasks import matched

Array = npt.NDArray[Any]

_LARGEST = 8  # values of a slice, and tables with charts, that are shown
_BINS = 30
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;
padding:0 1rem}}figure{{display:inline-block;margin:.5rem 1rem .5rem 0}}
figcaption{{font-weight:600}}.wide{{overflow-x:auto}}
table{{border-collapse:collapse;margin:.5rem 0}}
td,th{{padding:.15rem .8rem .15rem 0;text-align:right}}
td:first-child,th:first-child{{text-align:left}}{style}</style>
<h1>{title}</h1>
{body}
</html>
"""


def report(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] = "report.html",
    *,
    step: int | None = None,
    curves: str | os.PathLike[str] | None = None,
    data: str | None = None,
    slices: Sequence[str] = (),
    batch_size: int = 1024,
    servers: str | None = None,
    namespace: str | None = None,
    device: str = "cpu",
    watch: Callable[[Any], Any] = lambda batches: batches,
) -> Path:
    """Writes one HTML file about what ``persia train --save`` has saved.

    It shows the scores, the calibration by deciles of the predictions and the
    AUC of slices, all of samples that the model was not trained on; of each
    table the norms of its rows and their ages, in updates; and, with
    ``curves``, loss, AUC, rows, unseen ids and staleness over the steps. The
    file loads nothing.

    Args:
        path: the checkpoint root, or the folder of a step.
        out: the file, which appears when it is complete; none that is read.
        step: of the checkpoint in the root; default: the latest.
        curves: the CSV file of ``persia train --curves``; None: no charts.
        data: a file, glob or URL of samples with labels; default: those that
            the training held out.
        slices: features with one id a sample; there is an AUC for each of
            their most frequent ids. Default: the feature with the fewest
            distinct ids.
        batch_size: samples a batch.
        servers, namespace, device: where the rows and the dense part are, as
            for :func:`persia.train.load`. Norms and ages are those of the
            checkpoint.
        watch: is called with the batches, and gives what is iterated over in
            their place, to show how far it is.

    Returns:
        The path of the file.

    Raises:
        InvalidArgument: the training held out no samples and ``data`` is
            None, a slice is no feature with one id a sample, or ``out`` is a
            file that is read.
        MalformedData: there is no well-formed sample.
        StorageError: something cannot be read or written.
    """
    charts = _charts(Path(curves)) if curves is not None else ""
    trained = load(
        path, step, servers=servers, namespace=namespace, device=device
    )
    batches = (
        trained.held_out() if data is None else trained.read(data, batch_size)
    )
    if batches is None:
        raise errors.InvalidArgument(
            f"the training of {path} held out no samples: name a file"
        )
    inputs = [*getattr(batches, "local_paths", ()), *files.local_files(path)]
    inputs += [] if curves is None else [curves]
    with new_file(out, inputs=inputs) as file:
        seen = watch(batches)
        file.write(_page(trained, seen, path, step, slices, charts))
    return Path(out)


def _page(
    trained: Trained,
    batches: Any,
    path: str | os.PathLike[str],
    step: int | None,
    slices: Sequence[str],
    charts: str,
) -> str:
    tasks = _samples_of(trained, batches)
    folder, about, tables = _origin(trained, path, step)
    body = [
        f"<p>{html.escape(about)}</p>",
        *(_of_task(name, one, slices) for name, one in tasks.items()),
        charts,
        "<h2>Tables</h2>" + _tables(tables),
    ]
    title = html.escape(f"Report of {folder}")
    return _PAGE.format(title=title, style=STYLE, body="\n".join(body))


class _Table(NamedTuple):
    """A table: its rows, bytes of its files, norms [rows] and, in updates,
    ages [rows]; an export has no ages."""

    name: str
    rows: int
    bytes: int
    measures: Callable[[], tuple[Array, Array]]


def _origin(
    trained: Trained, path: str | os.PathLike[str], step: int | None
) -> tuple[Path | str, str, list[_Table]]:
    """The folder that a model is of, what is known of it, its tables."""
    if isinstance(trained.model, ExportedModel):
        export = trained.model
        return export.place, _of_version(export), _exported_tables(export)
    assert trained.config is not None
    root = files.root_of(path)
    found = files.find(root, step)
    about = (
        f"Step {found.manifest.step:,}, saved {found.manifest.saved[:16]}; "
        f"{trained.config.model} of dim {trained.config.dim} on "
        f"{trained.config.data}."
    )
    tables = [
        _Table(
            one.name,
            one.rows,
            sum(file.bytes for file in one.files),
            functools.partial(_norms_and_ages, root, found, one),
        )
        for one in found.manifest.tables
    ]
    return found.folder, about, tables


def _of_version(model: ExportedModel) -> str:
    manifest = model.manifest
    return (
        f"Version {manifest.name}, made {manifest.made[:16]} of step "
        f"{manifest.step:,}."
    )


def _exported_tables(model: ExportedModel) -> list[_Table]:
    def measures(name: str) -> tuple[Array, Array]:
        norms = [np.linalg.norm(v, axis=1) for _, v in model.rows(name)]
        return np.concatenate([np.empty(0), *norms]), np.empty(0)

    return [
        _Table(
            one.options.name,
            one.rows,
            one.file.bytes,
            functools.partial(measures, one.options.name),
        )
        for one in model.manifest.tables
    ]


def _of_task(name: str, samples: _Samples, slices: Sequence[str]) -> str:
    of = f" of {html.escape(name)}" if name else ""
    parts = [
        f"<h2>Scores{of}</h2>{_scores(samples)}",
        f"<h2>Calibration{of}</h2>{_calibration(samples)}",
        f"<h2>AUC{of} by slice</h2>{_slices(samples, slices)}",
    ]
    return "\n".join(parts)


@dataclass(frozen=True)
class _Samples:
    """The logits and labels of a task, and what slices go by.

    Attributes:
        logits, labels, weights: float64 [n], of samples with the label.
        unseen: int64 [n], ids of a sample that have no row.
        features: the ids int64 [n] of features with one id a sample.
        groups: int64 [n], or None.
    """

    logits: Array
    labels: Array
    weights: Array
    unseen: Array
    features: Mapping[str, Array]
    groups: Array | None


def _samples_of(
    trained: Trained, batches: Iterable[Batch]
) -> dict[str, _Samples]:
    """The samples of each task, by its name; of one label it is empty."""
    found: list[tuple[Array, Array, Array]] = []
    unseen, groups = [], []
    features: dict[str, list[Array] | None] = defaultdict(list)
    for batch in batches:
        if batch.label is None:
            raise errors.InvalidArgument("the data have no label")
        found.append(_scored(trained, batch, batch.label))
        if batch.group is not None:
            groups.append(batch.group.numpy())
        missing = torch.zeros(len(batch), dtype=torch.int64)
        bags = torch.arange(len(batch))
        for key in batch.ids:
            ids, lengths = batch.ids[key]
            has = trained.has_rows(key, ids)
            missing.index_add_(
                0, bags.repeat_interleave(lengths), (~has).long()
            )
            kept = features[key]
            if not bool((lengths == 1).all()):
                features[key] = None
            elif kept is not None:
                kept.append(ids.numpy())
        unseen.append(missing.numpy())
    if not found:
        raise errors.MalformedData(no_sample(batches))
    logits, labels, weights = map(np.concatenate, zip(*found, strict=True))
    missing_ids = np.concatenate(unseen)
    known = {key: np.concatenate(ids) for key, ids in features.items() if ids}
    out = {}
    for task, name in enumerate(trained.tasks or [""]):
        label = labels[:, task]
        there = np.ones(len(label), bool)
        if trained.tasks:
            there = ~np.isnan(label)
        x, y, w = as_arrays(logits[there, task], label[there], weights[there])
        ids_of = {key: ids[there] for key, ids in known.items()}
        group = np.concatenate(groups)[there] if groups else None
        out[name] = _Samples(x, y, w, missing_ids[there], ids_of, group)
    return out


def _scored(
    trained: Trained, batch: Batch, label: torch.Tensor
) -> tuple[Array, Array, Array]:
    """Logits and labels [n, tasks], and weights [n]."""
    logits = matched(trained.logits(batch), label)
    n = len(batch)
    weights = batch.weight
    return (
        logits.double().reshape(n, -1).numpy(),
        label.double().reshape(n, -1).numpy(),
        np.ones(n) if weights is None else weights.double().numpy(),
    )


def _scores(samples: _Samples) -> str:
    x, y, w = samples.logits, samples.labels, samples.weights
    clicks = (w * y).sum()
    loss = ratio(cross_entropy(x, y, w), w.sum())
    rows = [
        ("samples", f"{len(y):,}"),
        ("clicks", f"{ratio(clicks, w.sum()):.2%}"),
        ("AUC", f"{auc_of(x, y, w):.4f}"),
        ("log loss", f"{loss:.5f}"),
        ("calibration", f"{ratio((w * sigmoid(x)).sum(), clicks):.3f}"),
    ]
    if samples.groups is not None:
        rows.append(("GAUC", f"{gauc_of(x, y, w, samples.groups):.4f}"))
    return _table(("", ""), rows)


def _calibration(samples: _Samples) -> str:
    """Clicks and predictions of ten groups of samples, by the prediction."""
    order = np.argsort(samples.logits, kind="stable")
    rows, points = [], []
    for i, group in enumerate(np.array_split(order, 10)):
        if not len(group):
            continue
        w = samples.weights[group]
        predicted = ratio((w * sigmoid(samples.logits[group])).sum(), w.sum())
        clicked = ratio((w * samples.labels[group]).sum(), w.sum())
        points.append((float(predicted), float(clicked)))
        rows.append(
            (
                f"{i + 1}",
                f"{len(group):,}",
                f"{predicted:.4f}",
                f"{clicked:.4f}",
                f"{ratio(predicted, clicked):.3f}",
            )
        )
    heads = ("decile", "samples", "predicted", "clicked", "ratio")
    chart = lines("clicked by predicted", {"": points}, square=True)
    return _table(heads, rows) + chart


def _slices(samples: _Samples, names: Sequence[str]) -> str:
    known = samples.features
    if wrong := set(names) - known.keys():
        raise errors.InvalidArgument(
            f"no slice by {sorted(wrong)}: features with one id a sample are "
            f"{sorted(known)}"
        )
    some = {key: len(np.unique(ids)) for key, ids in known.items()}
    some = {key: n for key, n in some.items() if n > 1}
    chosen = list(names) or sorted(some, key=lambda key: some[key])[:1]
    rows = []
    for name, which in _groups(samples, chosen):
        y, w = samples.labels[which], samples.weights[which]
        auc = auc_of(samples.logits[which], y, w)
        share = ratio((w * y).sum(), w.sum())
        rows.append((name, f"{len(y):,}", f"{share:.2%}", f"{auc:.4f}"))
    return _table(("samples with", "samples", "clicks", "AUC"), rows)


def _groups(
    samples: _Samples, chosen: Sequence[str]
) -> Iterator[tuple[str, Array]]:
    yield "all ids seen in training", samples.unseen == 0
    yield "one unseen id", samples.unseen == 1
    yield "more unseen ids", samples.unseen > 1
    for key in chosen:
        ids = samples.features[key]
        values, counts = np.unique(ids, return_counts=True)
        largest = values[np.argsort(-counts, kind="stable")[:_LARGEST]]
        for value in largest.tolist():
            yield f"{key} = {value}", ids == value
        if len(values) > len(largest):
            rest = ~np.isin(ids, largest)
            yield f"{key}: {len(values) - len(largest):,} others", rest


def _tables(tables: Sequence[_Table]) -> str:
    rows, charts = [], []
    largest = sorted(tables, key=lambda t: -t.rows)[:_LARGEST]
    for table in tables:
        norms, ages = table.measures()
        cells = [table.name, f"{table.rows:,}", f"{table.bytes:,}"]
        for values in norms, ages:
            cells += (
                f"{np.quantile(values, q):.4g}" if len(values) else "-"
                for q in (0.5, 0.95, 1)
            )
        rows.append(cells)
        if table in largest and len(norms):
            for what, values in ("norm", norms), ("age", ages):
                if not len(values):
                    continue
                counts, edges = np.histogram(values, _BINS)
                title = f"{table.name}: rows by {what}"
                charts.append(
                    bars(title, counts.tolist(), edges[0], edges[-1])
                )
    heads = ["table", "rows", "bytes", "norm: median", "95 %", "largest"]
    heads += ["age: median", "95 %", "largest"]
    note = "<p>An age is the number of updates since the row's last one.</p>"
    return _table(heads, rows) + note + "".join(charts)


def _norms_and_ages(
    root: Any, found: Any, table: Table
) -> tuple[Array, Array]:
    norms: list[Array] = [np.empty(0)]
    ages: list[Array] = [np.empty(0)]
    for rows in read_rows(root, found, table):
        norms.append(np.linalg.norm(rows.vectors, axis=1))
        ages.append(rows.age)
    return np.concatenate(norms), np.concatenate(ages)


def _charts(path: Path) -> str:
    values = read_csv(path)
    last = {name: points[-1][1] for name, points in values.items()}

    def chosen(*names: str) -> dict[str, Points]:
        return {name: values[name] for name in names if name in values}

    def by_table(what: str) -> dict[str, Points]:
        names = [name for name in values if name.endswith(f"/{what}")]
        names = sorted(names, key=lambda name: -last[name])[:5]
        return {name.removesuffix(f"/{what}"): values[name] for name in names}

    charts: Mapping[str, Mapping[str, Points]] = {
        "loss": chosen("train/loss", "eval/logloss"),
        "AUC": chosen("train/auc", "eval/auc"),
        "AUC by task": chosen(
            *(n for n in values if n.count("/") == 2 and n.endswith("/auc"))
        ),
        "rows of the five largest tables": by_table("rows"),
        "unseen share of looked-up ids, the five highest": by_table("unseen"),
        "staleness, in batches": chosen("staleness/mean", "staleness/max"),
    }
    made = (lines(title, series) for title, series in charts.items())
    return "<h2>Curves over steps</h2>" + "".join(made)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        made = (f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr>{''.join(made)}</tr>"

    top = line(heads, "th") if any(heads) else ""
    body = "".join(line(cells, "td") for cells in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'
