"""What a checkpoint holds beside rows: ``dense.pt``, the states of model,
optimizers and scheduler, of each rank's loader and random generators, and
what the user gave as ``extra``.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from persia import _core
from persia.base.torch_private import uncompiled
from persia.base.warning import warn
from persia.checkpoint import files
from persia.checkpoint.ranks import Ranks
from persia.errors import (
    CorruptFile,
    InvalidArgument,
    PersiaError,
    SchemaMismatch,
)
from persia.store.configs import EmbeddingBagConfig, word

if TYPE_CHECKING:
    from persia.optim import SparseOptimizer
    from persia.store.store import Store

_DENSE = "dense.pt"
PLACE = "place"  # of a rank's last batch, in its states
# Settings of a table that schedulers change, or that are compared elsewhere.
_VARY = ("lr", "initial_lr", "initial_accumulator_value")


class TableSettings:
    """The groups of a store's optimizer, by table: their order may differ."""

    def __init__(self, optimizer: SparseOptimizer) -> None:
        self._groups = optimizer.param_groups

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {
            group["table"]: {k: v for k, v in group.items() if k != "params"}
            for group in self._groups
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for group in self._groups:
            group.update(state.get(group["table"], {}))


class RandomStates:
    """The global generators of torch (CPU, CUDA), Python and numpy."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            # ("MT19937", key uint32 [624], pos, has_gauss, cached)
            name, key, *rest = numpy.random.get_state(legacy=True)
            key = torch.from_numpy(key.astype("int64"))
            state["numpy"] = [name, key, *rest]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if len(state.get("cuda", ())) == torch.cuda.device_count() > 0:
            torch.cuda.set_rng_state_all(state["cuda"])
        if "numpy" in state:
            import numpy as np

            name, key, *rest = state["numpy"]
            np.random.set_state((name, key.numpy().astype("uint32"), *rest))


def unwrap(model: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inner := uncompiled(model)) is not model:
            model = inner
        else:
            return model


def parts_of(**given: Any) -> dict[str, Any]:
    """The objects with a state_dict() that go into dense.pt, by name."""
    parts: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, list | tuple):
            parts |= {f"{name} {i}": one for i, one in enumerate(value)}
        elif value is not None:
            parts[name] = unwrap(value)
    for name, value in parts.items():
        if not hasattr(value, "state_dict") or not hasattr(
            value, "load_state_dict"
        ):
            raise InvalidArgument(
                f"{name}= is a {type(value).__name__} without state_dict() "
                "and load_state_dict(); give its state as extra="
            )
    return parts


def classes_of(parts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of the optimizers: their class and its bases, whose states a plain
    ``load_state_dict`` takes for its own and then breaks at its next step.
    """
    top = torch.optim.Optimizer
    return {
        name: [
            cls.__qualname__
            for cls in type(part).__mro__
            if issubclass(cls, top) and cls is not top
        ]
        for name, part in parts.items()
        if isinstance(part, top)
    }


def poolings_of(store: Store) -> dict[str, str]:
    """How each table is pooled, where it is."""
    return {
        name: word(config.pooling)
        for name, config in store.tables.items()
        if isinstance(config, EmbeddingBagConfig)
    }


def say_differences(
    store: Store, dense: Mapping[str, Any], folder: Path | str
) -> None:
    """Warns where tables are pooled otherwise than in a checkpoint, or their
    optimizer was made with other constants."""
    there = dense.get("poolings", {})  # absent in older checkpoints
    for name, mine in poolings_of(store).items():
        theirs = there.get(name, mine)
        if theirs != mine:
            warn(
                f"table {name!r}: pooling is {mine!r} here and {theirs!r} in "
                f"{folder}: the rows were trained for another sum"
            )
    saved = dense["store"]
    for name, group in TableSettings(store.optimizer).state_dict().items():
        other = saved.get(name, {})
        differing = [
            f"{key} ({value!r} here, {other[key]!r} there)"
            for key, value in group.items()
            if key in other and key not in _VARY and other[key] != value
        ]
        if differing:
            warn(
                f"table {name!r}: the optimizer was made with other constants "
                f"than in {folder}, which are taken from it: "
                f"{', '.join(differing)}. To train on with yours, set them in "
                "store.optimizer.param_groups after the load"
            )


def check_classes(
    parts: Mapping[str, Any], dense: Mapping[str, Any], folder: Path | str
) -> None:
    """An optimizer reads what its own class, or a relative of it, saved."""
    saved = dense.get("classes", {})  # absent in older checkpoints
    for name, mine in classes_of(parts).items():
        theirs = saved.get(name)
        if theirs and not set(theirs) & set(mine):
            raise SchemaMismatch(
                f"the {name} saved in {folder} is of class {theirs[0]}, the "
                f"one given of class {mine[0]}: give one of the same class, "
                f"or leave {name.split()[0]}= out and let it start without "
                "state"
            )


class Dense(NamedTuple):
    """What goes into dense.pt, by name: states that are equal on all ranks or
    of the first alone, those of each rank, and what the user gave.
    """

    shared: dict[str, Any]
    ranks: list[dict[str, Any]]
    extra: Any


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


def write_dense(folder: Path, states: Dense) -> dict[str, Any]:
    """Writes dense.pt; its entry in the manifest. Finds out now, not at the
    load, what weights_only=True refuses.
    """
    path = folder / _DENSE
    shared, ranks, extra = states
    dense = shared | {"ranks": ranks, "extra": extra}
    try:
        files.write_file(path, lambda file: torch.save(dense, file))
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except OSError:
        raise
    except Exception as error:
        # torch's writer fails where Ctrl-C interrupts it: that is raised
        # first.
        context = error.__context__
        if context is not None and not isinstance(context, Exception):
            raise context from None
        named = shared | {"extra": extra}
        for rank, own in enumerate(ranks):
            named |= {f"{n} of rank {rank}": s for n, s in own.items()}
        bad = [name for name, state in named.items() if not _readable(state)]
        raise InvalidArgument(
            f"the state of {' and '.join(bad) or 'the model'} cannot be "
            "saved: torch.load(weights_only=True) would refuse it; keep to "
            f"tensors, numbers, strings, lists and dicts ({error})"
        ) from error
    with files.opened(folder) as descriptor:
        size, crc = _core.ckpt_file_crc(descriptor, _DENSE)
    return {"name": _DENSE, "bytes": size, "crc32c": f"{crc:08x}"}


def _readable(state: object) -> bool:
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="cpu")
    except Exception:
        return False
    return True


def read_dense(
    folder: Path,
    found: files.Found,
    parts: Collection[str],
    ranks: Ranks | None,
) -> dict[str, Any]:
    """What was given as extra, and the states of the parts that are wanted,
    by name; without `ranks`, those that all ranks share.
    """
    entry = found.manifest.dense
    path = folder / entry.name
    with files.opened(folder) as descriptor:
        size, crc = _core.ckpt_file_crc(descriptor, entry.name)
    if size != entry.bytes or f"{crc:08x}" != entry.crc32c:
        raise CorruptFile(
            f"{path} is truncated or altered: {size} bytes with checksum "
            f"{crc:08x}, the manifest says {entry.bytes} with {entry.crc32c}"
        )
    try:
        dense = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    if not isinstance(dense, dict):
        raise CorruptFile(f"{path} holds a {type(dense).__name__}, no dict")
    # Version 1 has the states of its only rank among those of all.
    every = dense.setdefault("ranks", [{}])
    if (
        not isinstance(every, list)
        or not every
        or not all(isinstance(one, dict) for one in every)
    ):
        raise CorruptFile(f"{path} has no states of ranks")
    if ranks is not None:
        dense |= _own_states(every, parts, ranks, found)
    for name in {"extra", *parts} - dense.keys():
        raise SchemaMismatch(
            f"{found.folder} holds no state of the {name} (it has "
            f"{sorted(dense)}): leave {name.split()[0]}= out, or save it, too"
        )
    return dense


def _own_states(
    every: Sequence[dict[str, Any]],
    parts: Collection[str],
    ranks: Ranks,
    found: files.Found,
) -> dict[str, Any]:
    """The states of this rank, of those that the ranks saved."""
    if len(every) == ranks.world:
        return every[ranks.rank]
    if any(name.split()[0] == "loader" for name in parts):
        raise SchemaMismatch(
            f"{found.folder} was saved by {len(every)} ranks, this job has "
            f"{ranks.world}: the positions of their loaders mean other "
            "batches here; leave loader= out and choose where to begin"
        )
    if ranks.rank < len(every):
        return every[ranks.rank]
    return {"random": RandomStates().state_dict()}  # it stays as it is


def load_state(part: Any, state: Any, name: str, folder: Path | str) -> None:
    try:
        part.load_state_dict(state)
    except PersiaError:
        raise
    except (
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        raise SchemaMismatch(
            f"the {name} saved in {folder} does not fit the one given: {e}"
        ) from e
