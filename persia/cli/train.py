"""``persia train``: reads options, shows progress, prints the result."""

from __future__ import annotations

import dataclasses
import gc
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persia.base.environment import variable
from persia.base.logs import describe, say
from persia.base.memory import keep_memory
from persia.base.signals import Ended, Ending
from persia.cli.bars import progress
from persia.cli.flags import positional, with_flags
from persia.cli.options import DryRun, Json, print_json, would
from persia.cli.shared import begin, layers
from persia.errors import InvalidArgument, PersiaError
from persia.train.config import TrainConfig, check_used, give_way, resolve

if TYPE_CHECKING:  # importing them takes seconds that no other command needs
    from rich.table import Table

    from persia.train.run import Result, Run
    from persia.train.trainer import Progress as Position

_SKEW = 5.0  # seconds between the signals of ranks that end together
_NAMES = {"auc": "AUC", "logloss": "log loss", "gauc": "GAUC"}


_PANELS = {  # the first option of each group
    "data": "Data",
    "model": "Model",
    "row_dtype": "Tables",
    "batch_size": "Training",
    "servers": "Where the tables are",
    "save": "Checkpoints, scores and logs",
    "device": "This machine",
}


@with_flags(TrainConfig, _PANELS)
def command(
    file: Annotated[
        str | None,
        typer.Argument(help="The same as --data.", metavar="data"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint root, or the folder of a step, to continue from; "
            "all of its options hold where none is given. auto: that of "
            "--save if there is one, else begin."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Remove the checkpoints of an earlier run in --save, at the "
            "first save of this one; without it they are an error.",
        ),
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
    **flags: Any,
) -> None:
    """Train a click model, then score it on samples it has not seen.

    Under torchrun each rank trains on its share of the data.

    persia train clicks.parquet --save out

    persia train clicks.parquet --save out --resume auto

    torchrun --nproc-per-node 2 -m persia train clicks.parquet
    """
    from persia.distributed.ranks import lost_rank
    from persia.train.roots import newest
    from persia.train.run import Run
    from persia.train.saved import saved_options

    flags |= positional(file, flags)
    given = layers(flags)
    lines: list[str] = []
    if auto := resume == "auto":
        root = resolve(*given).save
        if root is None or overwrite:
            raise InvalidArgument(
                "--resume auto goes with --save, and without --overwrite"
            )
        resume = newest(root)
        there = "no checkpoint in" if resume is None else "continues from"
        lines.append(f"--resume auto: {there} {resume or root}")
    saved: dict[str, Any] = {}
    if resume is not None:
        resume = newest(resume) or resume  # the folder of a step has none
        saved, more = give_way(saved_options(resume), flags)
        lines += more
    settings = resolve(saved, *given)
    begin(_printed(settings, resume, overwrite))
    # A file that --print-config has made names every option.
    file_, *others = given
    named = {*file_} & settings.changed() | {*others[0], *others[1]}
    if dry_run:
        from persia.train.check import check_run

        servers = settings.servers or variable("PERSIA_SERVERS")
        check_used(settings, named, servers not in (None, "embedded"))
        would(f"train {check_run(settings, resume, overwrite)}", json)
        return
    keep_memory()
    describe(role="trainer")
    with Ending(settings.grace, patient=(signal.SIGINT,)) as ending:
        ending.what = "it had not begun to train"
        try:
            run = Run(settings, resume, overwrite)
            describe(rank=run.rank)
            _train(run, named, ending, lines, auto and resume is None, json)
        except RuntimeError as error:
            if (lost := lost_rank(error)) is not None:
                raise lost from error
            raise


def _printed(
    config: TrainConfig, resume: str | None, overwrite: bool
) -> dict[str, Any]:
    """All options of a run, for --print-config."""
    more = {"resume": resume, "overwrite": overwrite or None}
    return {k: v for k, v in more.items() if v is not None} | config.options()


def _train(
    run: Run,
    given: Iterable[str],
    ending: Ending,
    lines: list[str],
    first: bool,
    json: bool,
) -> None:
    """The first Ctrl-C or SIGTERM ends the training after its batch; the
    model is saved then.

    Args:
        run: the run.
        given: names of its options that were given.
        ending: of this process.
        lines: are printed before.
        first: it found no checkpoint to continue from.
        json: whether the result is printed so.
    """
    check_used(run.config, given, run.may_be_remote)
    told = say if run.rank == 0 else _silent
    told(run.describe())
    for line in [*lines, *run.roots.lines()]:
        told(line)
    for line in run.continued.lines() if run.continued else []:
        told(line)
    if first and run.outlived and run.continued is None:
        # What is started again after a failure finds the rows changed.
        told(f"saved to {run.save()}")
    gc.freeze()  # what was imported need not be searched for garbage again
    was_finished = run.finished
    ending.what = "its batch did not end; nothing was saved"
    at_once, ending.first = ending.first, lambda _: run.trainer.interrupt()
    with _progress(run) as show:
        finished = run.fit(show, told)
    if finished and not was_finished and not run.trainer.samples:
        told("nothing was left to train: the data end before that")
    if not finished and run.elastic is not None:
        run.elastic.write()
        told(f"step {run.trainer.step}: ranks that start again continue here")
    failed: PersiaError | None = None
    if run.must_save:
        ending.what = f"the model was not saved to {run.config.save}"
        try:
            run.save()
            told(f"saved to {run.config.save}")
        except PersiaError as error:
            if not finished:
                raise
            failed = error  # the result is printed all the same
    if finished and failed is None and run.config.export_to is not None:
        ending.what = "all was saved, and nothing was exported"
        told(f"exported to {run.export()}")
    for line in run.losses():
        told(line)
    ending.what = "all was saved; the scores were not computed"
    if not finished and run.config.save is not None:
        told(f"continue: persia train --resume {run.config.save}")
    if not finished or ending.number is not None:
        if failed is not None:
            raise failed
        if run.trainer.stopped_by_others:
            # To torchrun a rank that ends by itself has failed.
            ending.wait(_SKEW)
        raise Ended(ending.number or signal.SIGINT)
    ending.first = at_once
    result = run.result()
    if run.rank == 0 and json:
        print_json(_values(result))
    elif run.rank == 0:
        from rich.console import Console

        # Paths are shown as they are: neither markup nor emoji.
        console = Console(emoji=False, highlight=False, markup=False)
        console.print(_table(result))
    run.close()
    if failed is not None:
        raise failed


def _silent(text: str) -> None:
    """What another rank than the first says."""


@contextmanager
def _progress(run: Run) -> Iterator[Callable[[Position], object]]:
    if run.rank > 0:
        yield _silent_at
        return
    with progress("training", run.batches) as tell:
        yield lambda at: tell(
            at.batch,
            f"{at.rows_per_second:,.0f} samples/s, loss {at.loss:.4f}, "
            f"AUC {at.auc:.4f}",
            f"epoch {at.epoch + 1}, batch {at.batch}",
        )


def _silent_at(at: Position) -> None:
    """The progress of another rank than the first."""


def _values(result: Result) -> dict[str, Any]:
    """A result as JSON has it."""
    found: dict[str, Any] = {
        "scores": result.scores and dataclasses.asdict(result.scores),
        "progressive_auc": result.auc,
        "planted_auc": result.planted_auc,
        "windows": [dataclasses.asdict(one) for one in result.windows],
        "malformed": result.malformed,
        "rows": result.rows,
        "bytes_a_row": result.bytes_a_row,
        "samples_per_second": result.samples_per_second,
    }
    if result.target is not None:
        auc, step = result.target
        found["target"] = {"auc": auc, "step": step}
    if result.best is not None and result.best.value is not None:
        one = result.best
        found["best"] = {one.metric: one.value, "step": one.step}
    return found


def _table(result: Result) -> Table:
    from rich.table import Table

    table = Table(title="result", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def row(name: str, value: str, note: str = "") -> None:
        table.add_row(name, value, note)

    scores = result.scores
    if result.windows:
        aucs = [window.auc for window in result.windows]
        note = f"mean of {len(aucs)} windows, each scored before its training"
        row("AUC", f"{sum(aucs) / len(aucs):.4f}", note)
    elif scores is None and result.auc is not None:
        note = "of the last epoch, scored before it was trained on"
        row("AUC", f"{result.auc:.4f}", note)
    if scores is not None:
        note = f"{scores.samples:,} samples held out"
        if scores.tasks:
            note += f", mean of {len(scores.tasks)} tasks"
        if math.isnan(scores.auc):
            note += ", all of one label: is the file sorted by it?"
        row("AUC", f"{scores.auc:.4f}", note)
        if result.planted_auc is not None:
            note = "of the model that made the data, same samples"
            row("planted AUC", f"{result.planted_auc:.4f}", note)
        row("log loss", f"{scores.logloss:.5f}")
        row(
            "normalised entropy",
            f"{scores.normalized_entropy:.4f}",
            "below 1: better than the base rate",
        )
        row(
            "calibration",
            f"{scores.calibration:.3f}",
            "predicted clicks / clicks",
        )
        if scores.gauc is not None:
            row("GAUC", f"{scores.gauc:.4f}", "mean over the groups")
        for name, one in scores.tasks.items():
            note = f"log loss {one.logloss:.5f}, {one.positives:,} positive"
            if one.gauc is not None:
                note = f"GAUC {one.gauc:.4f}, {note}"
            row(f"AUC of {name}", f"{one.auc:.4f}", note)
    if result.target is not None:
        target, step = result.target
        note = "not reached" if step is None else f"reached at step {step:,}"
        row("target AUC", f"{target:g}", note)
    if result.best is not None and result.best.value is not None:
        name = _NAMES[result.best.metric]
        note = f"at step {result.best.step:,}"
        row(f"best {name}", f"{result.best.value:.5f}", note)
    if result.malformed:
        row("malformed", f"{result.malformed:,}", "lines left out")
    row("rows", f"{result.rows:,}", "distinct ids with an embedding")
    row("bytes a row", f"{result.bytes_a_row:.0f}", "vector, state and index")
    clock = result.clock
    total = clock.total
    if not total:  # nothing was left to train
        return table
    row("samples/s", f"{result.samples_per_second:,.0f}")
    row("time in data", f"{clock.data / total:.1%}")
    if result.compiled:
        row("in compiled code", f"{clock.dense / total:.1%}", "all the rest")
    else:
        row("time in lookup", f"{clock.lookup / total:.1%}")
        row("time in dense", f"{clock.dense / total:.1%}")
        row("time in update", f"{clock.update / total:.1%}")
    return table
