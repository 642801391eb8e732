"""What a configuration describes: data, model, store and trainer."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import persia
from persia import _core, checkpoint, errors, prometheus
from persia.base.environment import variable
from persia.base.options import seconds_of
from persia.base.torch_private import without_compiler
from persia.base.urls import Url
from persia.base.warning import warn
from persia.checkpoint import files, saving
from persia.data import Dataset, Files, Kafka, Schema
from persia.data.sharing import Shared
from persia.datasets import ClickStream, SyntheticCTR
from persia.metrics import Scores
from persia.serving.deltas.publisher import Publisher
from persia.serving.exporting import Trial
from persia.serving.trained import export_checkpoint
from persia.store.engine import engine_of
from persia.train import position
from persia.train.best import METRICS, Best
from persia.train.config import TrainConfig, resolve
from persia.train.elastic import (
    Continued,
    Elastic,
    check_begin,
    trained_before,
)
from persia.train.extra import Extra
from persia.train.logs import CSVLog, Log, TensorBoardLog, health
from persia.train.model import (
    device_of,
    make_model,
    make_optimizer,
    threads_of,
)
from persia.train.roots import Roots, agreed, best_root
from persia.train.sources import (
    check_best,
    check_test,
    no_sample,
    open_data,
    schema_of,
)
from persia.train.trainer import Clock, Every, Progress, Trainer
from persia.train.trials import check_export, trial_to_publish
from persia.train.windows import Windows

_PREFETCH: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}


@dataclass(frozen=True)
class Result:
    """What the end of a run reports."""

    scores: Scores | None
    """Of the samples held out; None if there are none."""
    auc: float | None
    """Of the last epoch, each batch scored before it was trained on; None if
    there was none."""
    planted_auc: float | None
    rows: int
    bytes_a_row: float
    samples_per_second: float
    clock: Clock
    compiled: bool
    malformed: int
    windows: Sequence[Scores] = ()
    """Of each window but the first, by the model of the windows before."""
    target: tuple[float, int | None] | None = None
    """The AUC to reach, and the step where it was; None: it was not."""
    best: Best | None = None
    """The best scores during the run, where they were looked for."""


class Run:
    """A run of ``persia train``, ready to :meth:`fit`.

    Args:
        config: what to do.
        resume: the folder of a checkpoint to continue from, or its URI.
        overwrite: the first save removes what the roots of ``config`` hold.

    Raises:
        StorageError: the roots hold checkpoints that this run does not
            continue, and ``overwrite`` is False.
    """

    def __init__(
        self,
        config: TrainConfig,
        resume: Path | str | None = None,
        overwrite: bool = False,
    ):
        if config.save == "":  # the save would find out after the training
            raise errors.InvalidArgument("`save`: the path is empty")
        self.config = config
        self.rank, self.ranks = join_ranks(config.device)
        from_ = None if resume is None else os.fspath(resume)
        self.roots = agreed(
            self.ranks, lambda: Roots.of(config, from_, overwrite)
        )
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.train, self.test = open_data(config, self.rank, self.ranks)
        check_test(config, self.test)
        check_best(config, self.train, self.test)
        self.store = persia.Store(
            make_optimizer(config),
            seed=config.seed,
            servers=config.servers,
            namespace=config.namespace,
            wire_dtype=config.wire_dtype,
            lost=config.lost,
            update="step" if config.accumulate > 1 else "backward",
        )
        prometheus.export(self.store)
        device = device_of(config.device)
        keys, dense = self.train.keys, self.train.dense_features
        tasks = self.train.tasks
        model = make_model(config, self.store, keys, dense, tasks)
        if config.export_to is not None:  # it would fail after the training
            check_export(config, self.train, model)
        self._trial: Trial | None = None
        if config.publish_to is not None:
            self._trial = trial_to_publish(config, self.train, model)
        ahead = True
        if config.threads is None:
            torch.set_num_threads(threads_of(model, config.batch_size))
            # The same bits on each machine.
            here = device.type == "cpu" and not self.store.remote
            ahead = not here or config.prefetch == "on"
        self.model = model.to(device)
        # Of earlier jobs; asked before any rank may train.
        self._found = self._rows() if self.store.remote else 0
        self._again = self.outlived and trained_before(self.store)
        if self.ranks > 1:
            self.model = DistributedDataParallel(self.model)
        adam = torch.optim.Adam
        if not config.compile:
            adam = without_compiler(adam)
        self.optimizer = adam(
            self.model.parameters(), lr=config.dense_lr, fused=True
        )
        self.trainer = Trainer(
            self.model,
            self.optimizer,
            staleness=config.staleness,
            compile=config.compile,
            prefetch=_PREFETCH[config.prefetch] if ahead else False,
            device=device,
            autocast=torch.bfloat16 if config.precision == "bf16" else None,
            accumulate=config.accumulate,
            tasks=tasks,
        )
        self._log = _open_log(config.curves) if self.rank == 0 else None
        workers = config.workers or variable("PERSIA_WORKERS")
        self.source: Dataset | persia.Stream = (
            persia.Stream(workers, job=config.job) if workers else self.train
        )
        self._shared = Shared(self.train)
        self.elastic: Elastic | None = None
        if config.dense_every is not None:
            self.elastic = Elastic(
                self.trainer,
                self.store,
                self.source,
                every=config.dense_every,
            )
            if isinstance(self.elastic.data, Shared):
                self._shared = self.elastic.data
        self._last: Progress | None = None
        self._windows: list[Scores] = []
        self._scored: tuple[int, Scores] | None = None  # and the step
        self._ended = False  # the last window was trained
        self._reached: int | None = None  # the step of the target AUC
        self._judged: int | None = None  # the step of the last score
        self._gave_up = False  # as no score was better
        self.best = Best(config.best_by, config.early_stop)
        self._resumed = resume
        self.continued = self._begin(resume)
        self.trainer.scheduler = self._scheduler()
        if self.must_save:
            saving.check(self.store, config.save or "")
        if config.keep_best:
            saving.check(self.store, best_root(config.save or ""))

    def _begin(self, resume: Path | str | None) -> Continued | None:
        """Continues where the ranks before were, or with a checkpoint."""
        elastic, continued = self.elastic, None
        if elastic is not None:
            elastic.extra = self.best.state_dict
            try:
                continued = elastic.begin(otherwise=resume is not None)
            except errors.UpdatesLost as error:
                if resume is None:
                    raise
                warn(f"{error}; continues from {resume}")
        if continued is not None:
            assert elastic is not None
            self.best.load_state_dict(elastic.found)
            return continued
        if resume is not None:
            self._load(resume)
        elif self._found and self.outlived:
            check_begin(self._found, self._again, self.rank)
        if elastic is not None:
            elastic.restart()
        return None

    @property
    def _given(self) -> Shared | Kafka | persia.Stream:
        """Where the batches come from."""
        if isinstance(self.source, Kafka | persia.Stream):
            return self.source
        return self._shared

    @property
    def batches(self) -> int | None:
        """Batches of an epoch, where known beforehand."""
        data = self.train
        if self.ranks > 1 and self.source is not data:
            return None  # the ranks share them in the order of their batches
        if self.config.window is not None:
            return None  # an epoch is a window there
        if isinstance(data, SyntheticCTR | ClickStream | Files):
            with contextlib.suppress(TypeError):
                return len(data)
        return None

    @property
    def may_be_remote(self) -> bool:
        """Whether the tables are not in this process, or would not be with
        more ranks."""
        return self.store.remote or self.config.servers == "ranks"

    @property
    def outlived(self) -> bool:
        """Whether the rows outlive this process, on servers."""
        return (
            self.store.remote
            and self.config.servers != "ranks"
            and (
                self.config.servers is not None
                or bool(variable("PERSIA_SERVERS"))
            )
        )

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        if self.config.window is not None:
            return self._ended
        return self.trainer.epoch >= self.config.epochs

    @property
    def must_save(self) -> bool:
        """Whether there is anything to save that is not there already."""
        config = self.config
        there = self._resumed is not None and str(self._resumed) == config.save
        return config.save is not None and not (
            there and self.finished and not self.trainer.samples
        )

    def describe(self) -> str:
        """What will be done, in a line."""
        config, data, at = self.config, self.train, self.trainer
        text = (
            f"{config.model} of dim {config.dim} on {config.data}: "
            f"{len(data.keys)} id features, {data.dense_features} dense"
        )
        if self.ranks > 1:
            text += f"; {self.ranks} ranks"
        if isinstance(self.source, persia.Stream):
            text += "; batches from embedding workers"
        if self.finished:
            epochs = f"{at.epoch} epoch{'s' if at.epoch > 1 else ''}"
            text += f"; {epochs} done, nothing left to train (see `epochs`)"
        elif at.epoch or at.batch:
            text += f"; from epoch {at.epoch + 1}, batch {at.batch}"
        if self._found and self._resumed is None and self.continued is None:
            text += f"; the servers hold {self._found:,} rows already"
        return text

    def fit(
        self,
        on_progress: Callable[[Progress], object],
        tell: Callable[[str], object] = print,
    ) -> bool:
        """Trains; False if it was stopped before the end.

        Args:
            on_progress: see :meth:`Trainer.fit`.
            tell: is called with a line for each save and score on the way.

        Raises:
            MalformedData: there is not one sample to train on.
        """
        begins = self.trainer.batch == self.trainer.offset == 0
        begins &= not (
            self.finished or self.continued or self._shared.sharings
        )

        def report(at: Progress) -> None:
            self._last = at
            on_progress(at)

        hooks = self.make_hooks(tell)
        kept: contextlib.AbstractContextManager[None]
        kept = contextlib.nullcontext()
        if self.elastic is not None:
            hooks.append(self.elastic.hook)
            kept = self.elastic.kept()
        with self._publishing(hooks, tell), kept:
            if self.config.window is not None:
                done = self._fit_windows(report, hooks, tell)
            elif not (done := self.trainer.epoch >= self.config.epochs):
                done = self.trainer.fit(
                    self._given, self.config.epochs, report, hooks=hooks
                )
        done |= self._reached is not None or self._gave_up
        if done and begins and not self.trainer.samples:
            raise errors.MalformedData(self._why_nothing())
        if done and self.trainer.samples and self.config.seeks_best:
            self._judge()  # the last model may be the best one
        return done

    @contextlib.contextmanager
    def _publishing(
        self, hooks: list[Every], tell: Callable[[str], object]
    ) -> Iterator[None]:
        """Within, the model is published as it trains."""
        config = self.config
        if self._trial is None or config.publish_to is None or self.finished:
            yield
            return
        trained = False
        try:
            with Publisher.of_trial(
                self._trial,
                self.model,
                self.store,
                config.publish_to,
                config.publish_every,
                config.publish_rows,
                config.export_row_dtype,
            ) as publisher:
                tell(f"published {publisher.version} to {config.publish_to}")
                hooks.append(
                    Every(publisher.publish, when=lambda: publisher.is_due)
                )
                yield
                trained = True
                publisher.flush()
                publisher.publish()
        except errors.PersiaError as error:
            if not trained:
                raise
            # What was trained can be saved all the same.
            warn(f"the end of the training was not published: {error}")

    def _fit_windows(
        self,
        report: Callable[[Progress], object],
        hooks: Sequence[Every],
        tell: Callable[[str], object],
    ) -> bool:
        """Trains on a window, scores the next one, goes to it."""
        assert self.config.window is not None
        assert isinstance(self.train, Dataset)
        seconds = seconds_of(self.config.window)
        share = self.rank, self.ranks
        here = Windows(self.train, seconds, share=share, even=True)
        # What is malformed counts where it is trained, not twice.
        (again,) = self.train.parts(1)
        ahead = Windows(again, seconds, share=share)
        with contextlib.closing(here), contextlib.closing(ahead):
            more = ahead.next()
            for _ in range(self.trainer.epoch):  # of the run before
                here.next()
                more = more and ahead.next()
            while more and here.next():
                at = self.trainer.epoch + 1
                if not self.trainer.fit(here, at, report, hooks=hooks):
                    return False
                more = ahead.next()
                if not more:
                    break
                scores = self.trainer.evaluate(ahead)
                self._windows.append(scores)
                self._tell(f"window {ahead.name}", scores, tell)
                if self._reached is not None:
                    return True
        self._ended = True
        return True

    def _tell(
        self, when: str, scores: Scores, tell: Callable[[str], object]
    ) -> None:
        """Reports scores, and stops at the AUC to reach."""
        tasks = ", ".join(
            f"{name} {one.auc:.4f}" for name, one in scores.tasks.items()
        )
        tell(
            f"{when}: AUC {scores.auc:.4f}{f' ({tasks})' if tasks else ''}, "
            f"log loss {scores.logloss:.5f} of {scores.samples:,} samples "
            "held out"
        )
        self._write(_values("eval", scores))
        for name, one in scores.tasks.items():
            self._write(_values(f"eval/{name}", one))
        target = self.config.target_auc
        if target is not None and scores.auc >= target:
            self._reached = self.trainer.step
            self.trainer.stop()

    def _score(self) -> Scores | None:
        """Of the samples held out, if there are any; once a step."""
        if self.test is None:
            return None
        step = self.trainer.step
        if self._scored is None or self._scored[0] != step:
            self._scored = step, self.trainer.evaluate(self.test)
        return self._scored[1]

    def _judge(self) -> None:
        """Notes whether the model is the best so far, and saves it then."""
        scores, step = self._score(), self.trainer.step
        if scores is None or step == self._judged:
            return
        self._judged = step
        if self.best.update(scores, step):
            if self.config.keep_best and self._is_best():
                root = best_root(self.config.save or "")
                self._save(root, 1, self._place())
        elif self.best.stalled:
            self._gave_up = True
            self.trainer.stop()

    def _is_best(self) -> bool:
        """Whether no checkpoint of the best model, of a life before this one
        that went further, has a better score."""
        there, now = self.roots.best, self.best.value
        if there is None or now is None:
            return True
        return METRICS[self.best.metric](there, now) == now

    def make_hooks(self, tell: Callable[[str], object]) -> list[Every]:
        config = self.config

        def save() -> None:
            tell(f"step {self.trainer.step}: saved to {self.save()}")

        def score() -> None:
            scores = self._score()
            assert scores is not None
            self._tell(f"step {self.trainer.step}", scores, tell)
            if config.seeks_best:
                self._judge()

        hooks = []
        if config.curves is not None:
            write = self._write_progress
            hooks.append(Every(write, steps=config.curves_every))
        every = config.eval_every
        if every is None and (
            config.target_auc is not None or config.seeks_best
        ):
            steps = -(-(self.batches or 0) // config.accumulate)
            every = max(1, steps // 20) if steps else 10_000
        if every is not None and self.test is not None:
            hooks.append(Every(score, steps=every))
        if config.save_every is not None:
            hooks.append(Every(save, steps=config.save_every))
        if config.save_minutes is not None:
            hooks.append(Every(save, minutes=config.save_minutes))
        return hooks

    def _write(self, values: dict[str, float]) -> None:
        if self._log is not None:
            self._log.log(values, self.trainer.step)

    def _write_progress(self) -> None:
        at = self.trainer.progress()
        if self._log is None or at is None:
            return
        values = {
            "train/loss": at.loss,
            "train/auc": at.auc,
            "train/samples_per_second": at.rows_per_second,
            "train/dense_lr": self.optimizer.param_groups[0]["lr"],
        }
        values |= {f"train/{n}/auc": auc for n, auc in at.tasks.items()}
        self._write(values | health(self.store))

    def _scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Of the dense learning rate, at the step of the trainer."""
        config, step = self.config, self.trainer.step
        if not config.warmup and config.decay == "none":
            return None
        warmup, end = config.warmup, 0
        if config.decay != "none":
            if self.batches is None:
                raise errors.InvalidArgument(
                    f"`decay={config.decay}` needs to know how many batches "
                    f"{config.data!r} has, which takes a pass over it: leave "
                    "`decay` out, or use Parquet files"
                )
            steps = -(-self.batches // config.accumulate)
            end = steps * config.epochs

        def factor(at: int) -> float:
            if at < warmup:
                return (at + 1) / warmup
            if not end:
                return 1.0
            left = max(0.0, (end - at) / max(1, end - warmup))
            if config.decay == "linear":
                return left
            return 0.5 - 0.5 * math.cos(math.pi * left)

        for group in self.optimizer.param_groups:
            group["initial_lr"] = config.dense_lr
        return torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, factor, last_epoch=step - 1
        )

    def _why_nothing(self) -> str:
        """Why there was no sample to train on."""
        data = self.source
        if isinstance(data, persia.Stream):
            text = "the data loaders sent no batch"
        elif isinstance(data, Kafka):
            text = f"no usable message in {self.config.data}"
        elif not isinstance(data, Files):
            text = f"{self.config.samples} samples"
        else:
            names = ", ".join(map(repr, data.files[:3]))
            names += ", ..." if len(data.files) > 3 else ""
            text = f"no usable line in {names}"
            if data.malformed:
                text += f": {data.malformed:,} malformed, the first of them"
                text += f" {data.malformed_lines[0]}"
            elif data.samples[1] is not None:
                text += ", apart from those that are held out"
        if self.ranks > 1:
            text += (
                f"; each of {self.ranks} ranks needs a block of"
                f" {self.config.batch_size} samples (`batch_size`)"
            )
        return f"nothing to train on: {text}"

    def save(self) -> Path | str:
        """Writes rows, model, optimizer, options and position as one
        checkpoint; the path of its folder."""
        assert self.config.save is not None
        place = self._place()
        folder = self._save(self.config.save, self.config.keep, place)
        if isinstance(place, position.InTopics):
            place.commit()
        return folder

    def export(self) -> Path | Url | None:
        """Exports what :meth:`save` has saved last, or the best of it; the
        folder. None on all ranks but the first."""
        config = self.config
        assert config.save is not None and config.export_to is not None
        if self.rank > 0:
            return None
        root = best_root(config.save) if config.keep_best else config.save
        found = export_checkpoint(
            root, config.export_to, row_dtype=config.export_row_dtype
        )
        return found.path

    def _save(
        self,
        root: str,
        keep: int | None,
        place: position.InTopics | position.InFiles | None,
    ) -> Path | str:
        at, samples = self.trainer, self.config.batch_size * self.ranks
        folder = self.store.save(
            root,
            model=self.model,
            optimizer=self.optimizer,
            loader=place,
            keep=keep,
            extra=Extra(
                options=self.config.options(),
                step=at.step,
                epoch=at.epoch,
                batch=at.batch,
                samples=at.batch * samples + at.offset,
                ranks=self.ranks,
                placed=place is not None,
                left=[list(map(list, x)) for x in self._shared.sharings],
                source=position.source(self.config, self.train),
                keys=list(self.train.keys),
                dense_features=self.train.dense_features,
                tasks=self.train.tasks,
                schema=schema_of(self.train),
                best=self.best.state_dict(),
            ).to_save(),
        )
        if self.roots.removed.pop(root, None) and self.rank == 0:
            there = files.root_of(root)
            there.keep_only(files.find(there, None).name)
        return folder

    def _place(self) -> position.InTopics | position.InFiles | None:
        """The position of this rank, where the source has one."""
        if self.source is not self.train or self.config.window is not None:
            return None  # the data loaders, or the window, decide it
        if self._shared.sharings:
            return None
        if isinstance(self.train, Kafka):
            return position.InTopics(self.train, self.trainer)
        if isinstance(self.train, Files):
            return position.InFiles(self.train, self.trainer)
        return None

    def result(self) -> Result:
        """Scores the model on the samples held out.

        Raises:
            MalformedData: all of these are malformed.
        """
        scores = self._score()
        if scores is not None and not scores.samples:
            self._check_no_score()
            scores = None
        target = self.config.target_auc
        auc = math.nan if scores is None else scores.auc
        if self._reached is None and auc >= (target or math.inf):
            self._reached = self.trainer.step
        planted = None
        made = SyntheticCTR | ClickStream
        if isinstance(self.test, made) and self.rank == 0:
            planted = self.test.planted_auc()
        rows = self._rows()
        tables = self.store.stats()["tables"].values()
        clock = self.trainer.clock
        return Result(
            scores=scores,
            auc=None if self._last is None else self._last.auc,
            planted_auc=planted,
            rows=rows,
            bytes_a_row=sum(table["bytes"] for table in tables) / max(rows, 1),
            samples_per_second=self._samples() / (clock.total or 1.0),
            clock=clock,
            compiled=self.config.compile,
            malformed=getattr(self.train, "malformed", 0),
            windows=tuple(self._windows),
            target=None if target is None else (target, self._reached),
            best=self.best if self.config.seeks_best else None,
        )

    def _check_no_score(self) -> None:
        """Held out were none, or all were malformed, which is an error."""
        wrong = torch.tensor(getattr(self.test, "malformed", 0))
        if self.ranks > 1:
            torch.distributed.all_reduce(wrong)
        if int(wrong):
            raise errors.MalformedData(
                f"nothing to score the model on: {no_sample(self.test)}"
            )

    def _rows(self) -> int:
        tables = self.store.stats()["tables"].values()
        return sum(table["rows"] for table in tables)

    def _samples(self) -> int:
        """That all ranks have trained on."""
        samples = torch.tensor(self.trainer.samples)
        if self.ranks > 1:
            torch.distributed.all_reduce(samples)
        return int(samples)

    def losses(self) -> list[str]:
        """A line for batches that ended without an update, and one for
        updates that servers lost, if there were any; of all ranks."""
        lost = failed = torch.tensor(0)
        if self.store.remote:
            client = _core.cluster_counts(engine_of(self.store).handle)
            lost = torch.tensor(client["lost"])
        if isinstance(self.source, persia.Stream):
            failed = torch.tensor(self.source.stats()["failed"])
        if self.ranks > 1:
            torch.distributed.all_reduce(lost)
            # Each rank has the number of the job, as far as it knows.
            most = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(failed, most)
        lines = []
        if failed:
            lines.append(
                f"failed: {int(failed):,} batches of the data loaders ended "
                "without an update; persia feed prints why"
            )
        if lost:
            lines.append(
                f"lost: {int(lost):,} updates that servers had, counted for "
                "each server that was started again without them"
            )
        return lines

    def close(self) -> None:
        """Ends the store and leaves the other ranks."""
        if self.elastic is not None and self.finished:
            self.elastic.end()
        self.store.close()
        if self.ranks > 1:
            torch.distributed.destroy_process_group()

    def _load(self, folder: Path | str) -> None:
        # Before the load: rows of servers that it replaces do not come back.
        extra = Extra.of(checkpoint.read_extra(folder), folder)
        if extra.schema is not None:
            version = Schema.of_checkpoint(extra.schema).hash_version
            for data in self.train, self.test:
                if data is not None and hasattr(data, "schema"):
                    data.use_hash_version(version)
        trainer, place = self.trainer, self._place()
        if self.source is not self.train:  # data loaders know what is left
            trainer.epoch, trainer.batch = extra.epoch, extra.batch
        elif not isinstance(place, position.InTopics):
            at = position.find(extra, self.config, self.train, self.ranks)
            trainer.epoch, trainer.batch = at.epoch, at.batch
            trainer.offset = at.offset
            if at.sharings:
                self._shared.continues(at.epoch, at.sharings)
            if extra.ranks != self.ranks or not extra.placed:
                place = None  # of other shares, or an older checkpoint
        self.store.load(
            folder, model=self.model, optimizer=self.optimizer, loader=place
        )
        trainer.step = extra.step
        if extra.best is not None:
            self.best.load_state_dict(extra.best)
        # The load brought back the rates of the run that saved.
        here, there = self.config, resolve(extra.options)
        if here.learning_rate != there.learning_rate:
            for group in self.store.optimizer.param_groups:
                group["lr"] = here.learning_rate
        if here.eps is not None and here.eps != there.eps:
            for group in self.store.optimizer.param_groups:
                group["eps"] = here.eps
        if here.dense_lr != there.dense_lr:
            for group in self.optimizer.param_groups:
                group["lr"] = here.dense_lr


def _values(prefix: str, scores: Scores) -> dict[str, float]:
    """What a log has of scores."""
    names = ("auc", "logloss", "normalized_entropy", "calibration", "gauc")
    values = {f"{prefix}/{name}": getattr(scores, name) for name in names}
    return {name: v for name, v in values.items() if v is not None}


def _open_log(path: str | None) -> Log | None:
    if path is None:
        return None
    return CSVLog(path) if path.endswith(".csv") else TensorBoardLog(path)


def backends_for(device: str) -> str:
    """The process group's backends: gloo, and NCCL for tensors on GPUs."""
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def join_ranks(device: str = "cpu") -> tuple[int, int]:
    """(rank, ranks) of the job that torchrun has started, else (0, 1).

    ``device``: of the dense part, as :class:`Config` names it.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return 0, 1
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backends_for(device))
    return torch.distributed.get_rank(), ranks
