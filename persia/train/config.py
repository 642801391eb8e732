"""The options of ``persia train``, by flags or by a YAML file."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from persia import _core, admission, errors, eviction
from persia.base.environment import variable
from persia.base.options import seconds_of, validated
from persia.base.urls import Url

OPTIMIZERS = _core.TABLE_OPTIONS["optimizer"]

_MADE = {"synthetic", "drift", "kwai-video", "criteo-syn"}

# Options that say where a run is, and variables that say it as well.
_PLACES = {
    "servers": "PERSIA_SERVERS",
    "namespace": "PERSIA_NAMESPACE",
    "workers": "PERSIA_WORKERS",
    "job": "PERSIA_RUN_ID",
}


UrlText = Annotated[str, pydantic.AfterValidator(Url)]
RowDtype = Literal["fp32", "bf16", "int8"]
WireDtype = Literal["fp32", "fp16", "bf16"]


class TrainConfig(pydantic.BaseModel):
    """The options of a run; their names are those of the flags."""

    model_config = pydantic.ConfigDict(
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    data: UrlText = Field(
        "synthetic",
        description="A file, glob or URL (Parquet, CSV, JSON lines, Arrow, "
        "TFRecord, Criteo's TSV), topics (kafka://BROKER:PORT/TOPIC?group="
        "NAME), NAME:PATH for the logs avazu, criteo and taobao, or a made "
        "click log: synthetic, drift, kwai-video, criteo-syn:100T.",
    )
    table_schema: UrlText | None = Field(
        None,
        alias="schema",
        description="Columns of the files: a YAML file (persia schema FILE "
        "makes one), or adult, avazu, movielens or taobao; inferred by "
        "default.",
    )
    label: str | None = Field(
        None,
        description="Column of the label; several with commas between are "
        "tasks of `model=mmoe` or `model=sharedbottom` (default: as the "
        "schema says).",
    )
    group: str | None = Field(
        None,
        description="Column of what samples belong to, such as the user, for "
        "the GAUC of scores (default: as the schema says).",
    )
    samples: int = Field(
        2_000_000,
        ge=1,
        description="Samples of an epoch of a made click log.",
    )
    shuffle: int = Field(
        0,
        ge=0,
        description="Samples of a file to read at a time and give out in "
        "random order.",
    )
    malformed_limit: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the samples that one rule, such as that of a "
        "column, may leave out as malformed; more end the run.",
    )
    eval_data: UrlText | None = Field(
        None, description="A file or glob to score the model on."
    )
    eval_split: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of `data`, its last samples, to score the "
        "model on; "
        "0: none (default: 0.1).",
    )
    window: str | None = Field(
        None,
        description="Train on the samples of a span of time, such as 1d or "
        "6h, score the model on those of the next one, then train on them; "
        "the data are in time order and have timestamps.",
    )
    model: Literal[
        "dlrm", "deepfm", "dcn", "widedeep", "mmoe", "sharedbottom"
    ] = Field(
        "dlrm",
        description="The dense part; mmoe and sharedbottom are for several "
        "labels, dcn is DCN-v2.",
    )
    dim: int = Field(16, ge=1, le=4096, description="Numbers in an embedding.")
    optimizer: str = Field(
        "adagrad",
        description="Optimizer of the embeddings.",
        json_schema_extra={"choices": list(OPTIMIZERS)},
    )
    lr: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the embeddings (default: that of "
        "persia.optim, 0.05 for Adagrad, 0.002 for Adam, 0.1 for FTRL; SGD "
        "has none).",
    )
    eps: float | None = Field(
        None,
        gt=0,
        description="Eps of the optimizer of the embeddings. With Adagrad "
        "5e-4, above the gradient of one sample, keeps ids that are seen a "
        "few times from overfitting (default: that of persia.optim).",
    )
    dense_lr: float = Field(
        0.002, gt=0, description="Learning rate of the dense part (Adam)."
    )
    row_dtype: RowDtype = Field(
        "fp32",
        description="Type of the embeddings in the tables; int8 has a scale "
        "for each row.",
    )
    capacity: int | None = Field(
        None,
        ge=1,
        lt=2**63,
        description="Largest number of rows of each table, on all servers "
        "together (default: no limit).",
    )
    eviction: str | None = Field(
        None,
        description="Which rows go at `capacity`: lru, lfu, lfu:N (half-life "
        "in updates), norm (the smallest) or score:EXPRESSION of age, count "
        "and norm; also below it: ttl:N (updates) or ttl:7d (time since the "
        "last update). Without it a full table is an error.",
    )
    admission: str = Field(
        "all",
        description="Which unseen ids get a row at an update: all; each with "
        "a probability, such as 0.1; or each at its N-th update, "
        "sightings:N.",
    )
    batch_size: int = Field(
        1024, ge=1, description="Samples a batch, of each rank."
    )
    accumulate: int = Field(
        1, ge=1, le=1 << 20, description="Batches an optimizer step."
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Type of the dense part; bf16 is mixed precision.",
    )
    warmup: int = Field(
        0,
        ge=0,
        description="Optimizer steps in which `dense_lr` rises from 0.",
    )
    decay: Literal["none", "linear", "cosine"] = Field(
        "none",
        description="How `dense_lr` then falls to 0 until the last epoch "
        "ends.",
    )
    staleness: int | None = Field(
        1,
        ge=0,
        description="Batches whose updates a lookup may miss; 0: "
        "synchronous, async: no bound.",
    )
    prefetch: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether lookups run ahead of the training; auto: where "
        "a wire or a device would wait otherwise, or, with threads given, a "
        "core.",
    )
    epochs: int = Field(1, ge=1, description="Passes over the training data.")
    servers: str | None = Field(
        None,
        description="Where the tables are: host:port of parameter servers, "
        "with commas between; ranks: shared among the ranks of torchrun; "
        "embedded: in this process (default: PERSIA_SERVERS, else ranks "
        "under torchrun, else embedded).",
    )
    namespace: str | None = Field(
        None,
        description="Namespace of the tables on servers and workers; those "
        "of another one refuse (default: PERSIA_NAMESPACE, else default).",
    )
    wire_dtype: WireDtype = Field(
        "fp32",
        description="Type of vectors and gradients on the way to servers.",
    )
    workers: str | None = Field(
        None,
        description="Take the batches from these embedding workers, host:port "
        "with commas between; persia feed sends them, with the same options "
        "of the data (default: PERSIA_WORKERS).",
    )
    job: str | None = Field(
        None,
        min_length=1,
        description="With `workers`: train the batches of the data loaders "
        "of this job, the `job` of persia feed (default: PERSIA_RUN_ID, which "
        "persia launch sets, else the job that a loader joined last).",
    )
    lost: Literal["raise", "continue"] = Field(
        "raise",
        description="About updates that servers had and lost, as they were "
        "started again: raise an error, or continue and count them.",
    )
    dense_every: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps between two files of the dense part, on "
        "each machine: ranks that torchrun starts again, as more or fewer, "
        "continue with it and with the rows that `servers` have (default: "
        "none).",
    )
    save: UrlText | None = Field(
        None,
        description="Checkpoint root, a folder or URI: a checkpoint is "
        "written there at the end and at Ctrl-C.",
    )
    export_to: UrlText | None = Field(
        None,
        description="Folder of exports: at the end the model is a new version "
        "there, for persia serve model. Needs `save`. A trial before the "
        "first step shows whether the model can be exported.",
    )
    export_row_dtype: Literal["fp32", "fp16", "int8", "int4"] = Field(
        "fp32",
        description="Type of the embeddings in `export_to` and `publish_to`; "
        "integers have a scale for each row.",
    )
    publish_to: UrlText | None = Field(
        None,
        description="Folder of exports: the model is a version there before "
        "the first step, and packets of what changed keep it fresh while it "
        "trains, for persia serve model.",
    )
    publish_every: float = Field(
        10.0,
        gt=0,
        le=86400,
        description="Seconds between two packets of `publish_to`.",
    )
    publish_rows: int | None = Field(
        None,
        ge=1,
        description="A packet of `publish_to` is also due when so many rows "
        "have changed.",
    )
    save_every: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps between two checkpoints on the way.",
    )
    save_minutes: float | None = Field(
        None, gt=0, description="Minutes between two checkpoints on the way."
    )
    keep: int | None = Field(
        None,
        ge=1,
        description="Checkpoints that stay; older ones are removed "
        "(default: all).",
    )
    eval_every: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps between two scores of the samples held "
        "out (default: at the end alone; with `target_auc`, `early_stop` or "
        "`keep_best`: 20 times an epoch).",
    )
    target_auc: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Stop when the samples held out, or the next window, "
        "reach this AUC; of several files the last is held out.",
    )
    early_stop: int | None = Field(
        None,
        ge=1,
        description="Stop after so many scores in a row that are no better "
        "than the best one.",
    )
    keep_best: bool = Field(
        False,
        description="Save the best model, too: in the checkpoint root of "
        "`save` with -best at the end of its name.",
    )
    best_by: Literal["auc", "logloss", "gauc"] = Field(
        "auc",
        description="The score that decides which model is best; gauc is of "
        "data with a group.",
    )
    curves: UrlText | None = Field(
        None,
        description="A .csv file, or a folder for TensorBoard: loss, AUC and "
        "what the tables do, over the steps.",
    )
    curves_every: int = Field(
        100, ge=1, description="Optimizer steps between points."
    )
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="Where the dense part is; auto: on cuda, if there is one.",
    )
    compile: bool = Field(
        False, description="Run the model through torch.compile."
    )
    seed: int = Field(
        0, ge=0, lt=2**64, description="Seed of all that is random."
    )
    grace: float = Field(
        30.0,
        ge=0,
        le=86400,
        description="Seconds from SIGTERM until it has ended, its checkpoint "
        "saved or not.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads of torch and of the tables (default: as many as "
        "processors may be used and a step has work for).",
    )

    @pydantic.field_validator("label")
    @classmethod
    def _label(cls, value: str | None) -> str | None:
        names = [] if value is None else columns_in(value)
        if not all(names) or len(set(names)) < len(names):
            raise ValueError("need names of columns, each once")
        return value

    @pydantic.field_validator("optimizer")
    @classmethod
    def _optimizer(cls, value: str) -> str:
        if value not in OPTIMIZERS:
            raise ValueError(f"need one of {', '.join(OPTIMIZERS)}")
        return value

    @pydantic.field_validator("admission", mode="before")
    @classmethod
    def _admission(cls, value: Any) -> Any:
        text = str(value)  # a file may have a number
        admission.parse(text)
        return text

    @pydantic.field_validator("eviction")
    @classmethod
    def _eviction(cls, value: str | None) -> str | None:
        if value is not None:
            eviction.parse(value)
        return value

    @pydantic.model_validator(mode="after")
    def _eviction_of_a_full_table(self) -> TrainConfig:
        if (
            self.eviction is not None
            and self.capacity is None
            and eviction.parse(self.eviction).needs_capacity
        ):
            raise ValueError(f"eviction {self.eviction} needs capacity")
        return self

    @pydantic.field_validator("staleness", mode="before")
    @classmethod
    def _staleness(cls, value: Any) -> Any:
        return None if value == "async" else value

    @pydantic.model_validator(mode="after")
    def _one_evaluation(self) -> TrainConfig:
        if self.eval_data is not None and self.eval_split is not None:
            raise ValueError("eval_data and eval_split exclude each other")
        return self

    @pydantic.model_validator(mode="after")
    def _one_pass_in_time(self) -> TrainConfig:
        if self.window is None:
            return self
        seconds_of(self.window)
        for name, absent in (
            ("eval_data", self.eval_data is None),
            ("eval_split", not self.eval_split),
            ("eval_every", self.eval_every is None),
            ("early_stop", self.early_stop is None),
            ("keep_best", not self.keep_best),
            ("shuffle", not self.shuffle),
            ("workers", self.workers is None),
            ("dense_every", self.dense_every is None),
            ("epochs", self.epochs == 1),
        ):
            if not absent:
                raise ValueError(f"window excludes {name}")
        if self.data.startswith("kafka://"):
            raise ValueError("window goes with files, not with topics")
        return self

    @pydantic.model_validator(mode="after")
    def _eps_of_one(self) -> TrainConfig:
        if self.eps is not None and "eps" not in self._defaults:
            raise ValueError(f"eps: {self.optimizer} has none; leave it out")
        return self

    @pydantic.model_validator(mode="after")
    def _has_a_learning_rate(self) -> TrainConfig:
        if self.lr is None and "lr" not in self._defaults:
            raise ValueError(
                f"lr: {self.optimizer} has no default; give one, such as 5.0 "
                "for batches of 1024 samples"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _saves_somewhere(self) -> TrainConfig:
        if self.save is None:
            for name in ("save_every", "save_minutes", "keep", "keep_best"):
                if getattr(self, name) not in (None, False):
                    raise ValueError(f"{name} needs save")
        return self

    @property
    def seeks_best(self) -> bool:
        """Whether the samples held out say which model is best."""
        return self.early_stop is not None or self.keep_best

    @property
    def learning_rate(self) -> float:
        """Of the embeddings."""
        lr: float = self._defaults["lr"] if self.lr is None else self.lr
        return lr

    @property
    def labels(self) -> list[str]:
        """The columns of the labels, where they are given."""
        return [] if self.label is None else columns_in(self.label)

    def table_options(self) -> dict[str, Any]:
        """Of each table, by the names of ``EmbeddingBagConfig``."""
        return {
            "data_type": self.row_dtype,
            "capacity": self.capacity,
            "eviction": self.eviction and eviction.parse(self.eviction),
            "admission": admission.parse(self.admission),
        }

    @property
    def _defaults(self) -> dict[str, Any]:
        """Constants of the optimizer of the embeddings."""
        from persia.optim import ALGORITHMS  # and torch

        arguments = inspect.signature(ALGORITHMS[self.optimizer]).parameters
        return {
            name: one.default
            for name, one in arguments.items()
            if one.default is not one.empty
        }

    def changed(self) -> set[str]:
        """The names of options that do not have their defaults."""
        return {
            field.alias or name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        }

    def options(self) -> dict[str, Any]:
        """What :func:`resolve` makes this configuration of again. The keys in
        URLs are left out."""
        options = self.model_dump(by_alias=True, exclude_none=True)
        if self.staleness is None:
            options["staleness"] = "async"
        return {
            name: str(value) if isinstance(value, Url) else value
            for name, value in options.items()
        }


def columns_in(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",")]


def is_made(data: str) -> bool:
    """Whether ``data`` names a click log that is made, no files."""
    return data.partition(":")[0].partition("?")[0] in _MADE


def of_train(name: str) -> Any:
    """The field of another command that means what it means here."""
    return copy.copy(TrainConfig.model_fields[name])


def resolve(*layers: dict[str, Any]) -> TrainConfig:
    """The configuration of several layers of options; the last one wins."""
    options: dict[str, Any] = {}
    for layer in layers:
        # These exclude each other, so one of a later layer removes both.
        if "eval_data" in layer or "eval_split" in layer:
            options.pop("eval_data", None)
            options.pop("eval_split", None)
        options |= layer
    return validated(TrainConfig, options)


def give_way(
    saved: dict[str, Any], given: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """The options of a run that is continued, without those of places that
    the environment names now; and a line for each of these.

    Args:
        saved: of the run.
        given: names of options that are given now.
    """
    lines = []
    for name, said in _PLACES.items():
        here, there = variable(said), saved.get(name)
        if here and there not in (None, here) and name not in given:
            lines.append(
                f"--{name} {there} of the run that is continued gives way to "
                f"{said}={here}"
            )
            saved = {k: v for k, v in saved.items() if k != name}
    return saved, lines


def check_used(
    config: TrainConfig, given: Iterable[str], remote: bool
) -> None:
    """Refuses options that were given, by flag or file, and change nothing.

    Args:
        config: with them.
        given: their names.
        remote: whether the tables are, or may be, on servers or ranks.
    """
    synthetic = is_made(config.data)
    tables = "with tables on servers or ranks (`servers`)"
    workers = config.workers or variable(_PLACES["workers"])
    goes = {
        "samples": (synthetic, "with `data=synthetic`; files are read whole"),
        "shuffle": (not synthetic, f"with files, not with {config.data}"),
        "label": (not synthetic, f"with files, not with {config.data}"),
        "group": (not synthetic, f"with files, not with {config.data}"),
        "namespace": (remote, tables),
        "wire_dtype": (remote, tables),
        "lost": (remote, tables),
        "job": (workers, "with batches from embedding workers (`workers`)"),
        "publish_every": (config.publish_to, "with `publish_to`"),
        "publish_rows": (config.publish_to, "with `publish_to`"),
        "best_by": (config.seeks_best, "with `early_stop` or `keep_best`"),
    }
    for name in given:
        used, where = goes.get(name, (True, ""))
        if not used:
            raise errors.InvalidArgument(f"`{name}` goes {where}")
