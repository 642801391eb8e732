"""What a table is: :class:`EmbeddingBagConfig` (pooled) and
:class:`EmbeddingConfig` (sequences).

The names of the fields are those of torchrec.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from persia import _core, errors
from persia.admission import Admission, as_admission
from persia.base.check import kind, number, real, whole
from persia.base.tensors import tensor
from persia.eviction import Eviction, as_eviction
from persia.optim import SparseOptimizer
from persia.store.foreign import is_foreign, options_of, positional

# What the core calls otherwise than the fields.
_OPTIONS = {
    "dim": "embedding_dim",
    "dtype": "data_type",
    "init_a": "init",
    "init_b": "init",
    "full": "eviction",
    "evict_updates": "eviction",
    "evict_seconds": "eviction",
    "evict_score": "eviction",
    "admit": "admission",
    "sightings": "admission",
    "sightings_kept": "admission",
}
_POOLINGS = {
    "sum": _core.POOL_SUM,
    "mean": _core.POOL_MEAN,
    "sqrtn": _core.POOL_SQRTN,
}
_DTYPES = {
    "fp32": _core.FP32,
    "float32": _core.FP32,
    "torch.float32": _core.FP32,
    "bf16": _core.BF16,
    "bfloat16": _core.BF16,
    "torch.bfloat16": _core.BF16,
    "int8": _core.INT8,
    "torch.int8": _core.INT8,
}
_INITS = {
    "uniform": (_core.INIT_UNIFORM, 2),
    "normal": (_core.INIT_NORMAL, 2),
    "constant": (_core.INIT_CONSTANT, 1),
}


def word(value: Any) -> str:
    """A string, or an enum's (torchrec's PoolingType), in lower case."""
    return str(getattr(value, "value", value)).lower()


def _choice(where: str, name: str, value: Any, choices: dict[str, int]) -> int:
    try:
        return choices[word(value)]
    except KeyError:
        raise errors.InvalidArgument(
            f"{where}: {name} is {value!r}, need one of {sorted(choices)}"
        ) from None


@dataclass
class TableConfig:
    """A table of embeddings, and the features that are looked up in it.

    A number in the place of ``name`` means torchrec's order of arguments:
    ``num_embeddings, embedding_dim, name, data_type, feature_names``.

    Attributes:
        name: of the table; checkpoints and servers find its rows by it. It
            decides the initial values, together with the store's seed.
        embedding_dim: elements of a vector, 1 to 4096.
        feature_names: keys of the batches; several features may share a table.
        num_embeddings: how many rows are expected, 0 or more. It is kept for
            you to read, as torchrec's configs have it, and changes nothing:
            neither a limit (that is ``capacity``) nor a modulus.
        init: of new rows: ``("uniform", low, high)``, ``("normal", mean,
            std)``, ``("constant", c)``, or a float r for uniform in [-r, r).
            Default: 0.01.
        data_type: of the stored vectors: "fp32"; "bf16"; or "int8", with an
            fp32 scale a row. The last two are rounded stochastically, by
            draws that are the same in every run. State stays fp32.
        optimizer: a ``persia.optim`` object whose settings this table uses;
            None: the store's.
        lr: a learning rate of its own.
        trainable: False: looked up, never updated.
        capacity: largest number of rows; None: no limit.
        eviction: which rows go: "lru" (at capacity those that were not
            updated for long), "lfu", "norm", or an object of
            :mod:`persia.eviction`. None: none, a new id at capacity raises
            CapacityReached.
        admission: which unseen ids get a row at an update: "all", a
            probability, or an object of :mod:`persia.admission`.
        missing: what a lookup without a row gives: "init" (its initial value)
            or "zeros".
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str] = field(default_factory=list)
    num_embeddings: int = 0
    init: float | tuple[Any, ...] = 0.01
    data_type: Any = "fp32"
    optimizer: SparseOptimizer | None = None
    lr: float | None = None
    trainable: bool = True
    capacity: int | None = None
    eviction: str | Eviction | None = None
    admission: str | float | Admission = "all"
    missing: str = "init"

    def __post_init__(self) -> None:
        if isinstance(self.name, int) and not isinstance(self.name, bool):
            positional(self)
        where = f"table {self.name!r}"
        names = self.feature_names
        if not isinstance(self.name, str):
            raise errors.InvalidArgument(
                f"the name of a table is {self.name!r}, need a string"
            )
        if isinstance(names, str):
            raise errors.InvalidArgument(
                f"{where}: feature_names is the string {names!r}; pass a list"
            )
        names = list(names) if isinstance(names, Iterable) else [names]
        if not all(isinstance(name, str) for name in names):
            raise errors.InvalidArgument(
                f"{where}: feature_names is {self.feature_names!r}, need a "
                "list of strings"
            )
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise errors.InvalidArgument(
                f"{where}: feature_names has {twice} more than once; name "
                "each feature of a table once"
            )
        self.feature_names = names or [self.name]
        if not self.name:
            raise errors.InvalidArgument(
                "the name of a table is empty, need a string"
            )
        for name in (self.name, *self.feature_names):
            if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name):
                raise errors.InvalidArgument(
                    f"{where}: the name {name!r} has a NUL or half a character"
                )
        if (
            isinstance(self.embedding_dim, bool)
            or not isinstance(self.embedding_dim, int)
            or not 1 <= self.embedding_dim <= 4096
        ):
            raise errors.InvalidArgument(
                f"{where}: embedding_dim is {self.embedding_dim!r}, need an "
                "integer 1 .. 4096"
            )
        if self.optimizer is not None and not isinstance(
            self.optimizer, SparseOptimizer
        ):
            raise errors.InvalidArgument(
                f"{where}: optimizer is {self.optimizer!r}, need one of "
                "persia.optim"
            )
        self.num_embeddings = whole(
            f"{where}: num_embeddings", self.num_embeddings, 0, 2**63 - 1
        )
        kind(f"{where}: trainable", self.trainable, bool, "True or False")
        native = native_options(self, 0)
        if self.capacity is not None:
            self.capacity = native["capacity"]  # an int, of 1e6 too


def native_options(config: TableConfig, seed: int) -> dict[str, Any]:
    """Arguments of ``_core.Store.declare``, the store's own left out."""
    where = f"table {config.name!r}"
    init = config.init
    if isinstance(init, (int, float)):
        init = ("uniform", -abs(float(init)), abs(float(init)))
    words: list[Any] = list(init) if isinstance(init, tuple) else [None]
    form, count = _INITS.get(word(words[0]), (-1, 0))
    numbers = [real(x) for x in words[1:]]
    if (
        form < 0
        or len(numbers) != count
        or not all(map(math.isfinite, numbers))
        or (form == _core.INIT_NORMAL and numbers[1] < 0)
    ):
        raise errors.InvalidArgument(
            f"{where}: init is {config.init!r}, need a float, ('uniform', "
            "low, high), ('normal', mean, std >= 0) or ('constant', c)"
        )
    capacity = 0
    if config.capacity is not None:
        capacity = whole(
            f"{where}: capacity",
            config.capacity,
            1,
            2**63 - 1,
            " (or None: no limit)",
        )
    eviction = as_eviction(where, config.eviction)
    if (
        config.eviction is not None
        and config.capacity is None
        and eviction.needs_capacity
    ):
        raise errors.InvalidArgument(
            f"{where}: eviction without a capacity; give both"
        )
    if config.lr is not None:
        number(f"{where}: lr", config.lr, 0.0)
    missing = {"init": _core.MISSING_INIT, "zeros": _core.MISSING_ZEROS}
    return {
        "name": config.name,
        "seed": seed,
        "dim": config.embedding_dim,
        "dtype": _choice(where, "data_type", config.data_type, _DTYPES),
        "init": form,
        "init_a": numbers[0],
        "init_b": numbers[-1],
        "missing": _choice(where, "missing", config.missing, missing),
        "capacity": capacity,
        **as_admission(where, config.admission).options(),
        **eviction.options(),
    }


def check_same(config: TableConfig, first: TableConfig) -> None:
    """Raises if the table was declared otherwise before; the C core
    compares what remains, and knows of the declarations of other
    processes."""
    mine, theirs = native_options(config, 0), native_options(first, 0)
    for key in mine:
        if mine[key] != theirs[key]:
            name = _OPTIONS.get(key, key)
            raise errors.SchemaMismatch(
                f"table {config.name!r}: {name} is {getattr(config, name)!r}, "
                f"but was first declared as {getattr(first, name)!r}; "
                "give both the same"
            )


@dataclass
class EmbeddingBagConfig(TableConfig):
    """A table whose features are pooled: one vector a sample.

    Attributes:
        pooling: "sum", "mean" or "sqrtn" (sum / sqrt(number of ids)).
    """

    pooling: Any = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling_of(self)


def pooling_of(config: TableConfig) -> int:
    """The core's number of a table's pooling; POOL_NONE if it has none."""
    if not isinstance(config, EmbeddingBagConfig):
        return _core.POOL_NONE
    return _choice(
        f"table {config.name!r}", "pooling", config.pooling, _POOLINGS
    )


@dataclass
class EmbeddingConfig(TableConfig):
    """A table whose features are sequences: one vector an id."""


def as_config(config: Any, cls: type[TableConfig]) -> TableConfig:
    """``config`` as ``cls``: itself, or made from a config of torchrec."""
    if isinstance(config, TableConfig):
        if not isinstance(config, cls):
            raise errors.InvalidArgument(
                f"table {config.name!r}: is a {type(config).__name__}, need "
                f"{cls.__name__}"
            )
        return config
    if is_foreign(config):
        arguments = options_of(config)
        if cls is EmbeddingBagConfig:
            arguments["pooling"] = getattr(config, "pooling", "sum")
        return cls(**arguments)
    raise errors.InvalidArgument(
        f"tables holds {config!r}, need a persia.{cls.__name__}"
    )


def as_configs(tables: Any, cls: type[TableConfig]) -> list[TableConfig]:
    """The configs that a module is given, as a list."""
    return [as_config(c, cls) for c in list_of(tables, cls)]


def list_of(tables: Any, cls: type[TableConfig]) -> list[Any]:
    """What a module is given, ours or torchrec's, as a list."""
    need = f"a list of persia.{cls.__name__}"
    if not isinstance(tables, Iterable) or isinstance(tables, str):
        kind("tables", tables, (), need)
    return list(tables)


def float_rows(where: str, rows: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """``rows`` as a contiguous float32 tensor on the CPU of this shape."""
    need = f"need floats of shape {shape}"
    t = tensor(where, rows, need, device="cpu").detach()
    if not t.dtype.is_floating_point:
        raise errors.DtypeError(
            f"{where} has dtype {t.dtype}, need torch.float32: convert with "
            ".to(torch.float32)"
        )
    if tuple(t.shape) != shape:
        raise errors.ShapeError(
            f"{where} has shape {tuple(t.shape)}, need {shape}"
        )
    return t.to(device="cpu", dtype=torch.float32).contiguous()
