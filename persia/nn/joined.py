"""Lookups of many modules as one.

A converted model looks up one table a module, in the middle of its forward.
A :class:`Joined` watches which field of a batch each of these lookups has its
ids from.  The next batches of the loader are then looked up at once, ahead of
their forward, and each module takes its part.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from persia import errors
from persia.base.torch_private import in_backward
from persia.data.batches.jagged import JaggedBatch
from persia.nn.collections import EmbeddingCollection
from persia.nn.lookups import TableRows
from persia.store.ahead import LookedUp
from persia.store.configs import TableConfig

# Searches for the ids of a table before its lookups are left alone.
_SEARCHES = 8
_DEEP = 4  # containers within containers that a batch may have


@dataclasses.dataclass(frozen=True)
class _Call:
    """One lookup of a forward, and where a batch has its ids.

    Attributes:
        rows: the table.
        padding: an id that is left out, or None.
        path: keys and places that lead to a tensor of the batch.
        columns: of that tensor [samples, columns]; None: all of it.
    """

    rows: EmbeddingCollection
    padding: int | None
    path: tuple[Any, ...]
    columns: tuple[int, int] | None

    def ids(self, batch: Any) -> Tensor:
        """int64 [n] on the host; empty if the batch is of another form."""
        try:
            for step in self.path:
                batch = _inside(batch, step)
            if self.columns is not None:
                batch = batch[:, slice(*self.columns)]
            return _flat(self.rows.ids_on_cpu(batch), self.padding)
        except (AttributeError, LookupError, TypeError):
            return torch.empty(0, dtype=torch.int64, device="cpu")


class _Tables(TableRows):
    """The tables of all calls, one feature a call."""

    def __init__(self, calls: Sequence[_Call]) -> None:
        tables: dict[str, list[str]] = {}
        self._still: set[str] = set()  # ids whose rows have no gradient
        for i, call in enumerate(calls):
            (config,) = call.rows.tables
            names = tables.setdefault(config.name, [])
            names.append(f"{i}")
            if call.padding is not None:
                names.append(f"{i}/padding")
                self._still.add(f"{i}/padding")
        configs = {c.name: c for call in calls for c in call.rows.tables}
        super().__init__(
            [
                dataclasses.replace(configs[name], feature_names=features)
                for name, features in tables.items()
            ],
            owner=calls[0].rows,
        )
        self._anchors = {id(c.rows): c.rows.anchor for c in calls}

    def _leaves(self) -> tuple[Tensor, ...]:
        return tuple(self._anchors.values())

    def _connect(self) -> None:
        self.outputs = [
            (name, feature, _still(config) if name in self._still else config)
            for name, feature, config in self.outputs
        ]
        super()._connect()


def _still(config: TableConfig) -> TableConfig:
    return dataclasses.replace(config, trainable=False)


class Given:
    """A batch that a loop has, and what was looked up ahead for it."""

    def __init__(
        self,
        batch: Any,
        calls: list[_Call],
        tables: _Tables | None,
        ids: dict[str, Tensor],
        joined: JaggedBatch | None,
    ) -> None:
        self.batch = batch
        self.calls = calls
        self.used: set[_Call] = set()
        self.number = 0
        self._tables = tables
        self._ids = ids
        self._joined = joined
        self._looked: LookedUp | None = None
        # The output by whether it has a graph; a backward uses it up.
        self._parts: dict[bool, dict[str, Tensor]] = {}

    def start(self, number: int) -> None:
        """Starts the lookup."""
        self.number = number
        if self._tables is None or self._joined is None:
            return
        try:
            self._looked = self._tables.look_ahead(self._joined, number)
        except errors.Closed:
            raise
        except errors.PersiaError:
            self._tables = None  # the forward of a module will raise it

    def gives_out(self) -> None:
        """The loop gets the batch."""
        if self._joined is not None and self._looked is not None:
            self._joined.ticket = self._looked.ticket()

    def part(self, call: _Call, ids: Tensor | None) -> Tensor | None:
        """The vectors of a call, if its ids are those looked up; of its
        padding, without ids."""
        if self._tables is None or call not in self.calls:
            return None
        name = f"{self.calls.index(call)}"
        if ids is None:
            name = f"{name}/padding"
        elif not _same(self._ids[name], ids):
            return None
        grad = torch.is_grad_enabled()
        parts = self._parts.get(grad)
        if parts is None:
            if in_backward():  # a checkpoint's: it must not save tensors
                return None
            parts = self._parts[grad] = self._look_up(grad)
        self.used.add(call)
        (config,) = call.rows.tables
        if ids is not None:
            of_one = (config.feature_names[0],), ids, None, None, None, ()
            call.rows.note(of_one, parts[name], self.number)
        return parts[name][:, : config.embedding_dim]

    def _look_up(self, grad: bool) -> dict[str, Tensor]:
        assert self._tables is not None and self._joined is not None
        # A checkpoint (torch.utils.checkpoint) counts the tensors that are
        # saved in its part of the forward; these are of all parts.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            out = self._tables.look_up(self._joined)
            if out.requires_grad:
                out.register_hook(lambda _: self._spent(grad))  # type: ignore[no-untyped-call]
            split = torch.split(out, [len(i) for i in self._ids.values()])
        return dict(zip(self._ids, split, strict=True))

    def _spent(self, grad: bool) -> None:
        self._parts.pop(grad, None)


class Joined:
    """The lookups of the modules of one store, for one data loader.

    A call is learnt from the batch whose forward made it: the batch's tensor,
    or the columns of one, that has its ids. It is looked up ahead from then
    on. A call whose ids are elsewhere, or that a forward leaves out, is
    looked up by its module.

    Args:
        tables: of the modules, all of one store.
    """

    def __init__(self, tables: Sequence[EmbeddingCollection]) -> None:
        self.store = tables[0].store
        self._searches = dict.fromkeys(map(id, tables), _SEARCHES)
        self._calls: list[_Call] = []
        self._tables: _Tables | None = None
        self._given: deque[Given] = deque(maxlen=2)

    @property
    def knows(self) -> bool:
        """Whether there is anything to look up ahead."""
        return bool(self._calls)

    def look_ahead(self, batch: Any, number: int) -> Given:
        """Starts the lookups of a batch."""
        if self._calls and self._tables is None:
            self._tables = _Tables(self._calls)
        ids: dict[str, Tensor] = {}
        for i, call in enumerate(self._calls):
            ids[f"{i}"] = call.ids(batch)
            if call.padding is not None:
                ids[f"{i}/padding"] = torch.tensor([call.padding])
        joined = None
        if ids:
            lengths = torch.tensor([len(one) for one in ids.values()])
            joined = JaggedBatch(
                list(ids), torch.cat(list(ids.values())), lengths
            )
        one = Given(batch, list(self._calls), self._tables, ids, joined)
        one.start(number)
        return one

    def settle(self) -> None:
        """A loop asks for a batch: the one before has had its forward."""
        for before in self._given:
            unused = set(before.calls) - before.used
            if before.used and unused:  # a forward without them
                self._set([c for c in self._calls if c not in unused])

    def give(self, one: Given) -> None:
        """A loop gets a batch."""
        one.gives_out()
        self._given.appendleft(one)

    def forget(self) -> None:
        """The pass has ended."""
        self._given.clear()

    @property
    def latest(self) -> int:
        """The number of the batch that a loop got last; -1 without one."""
        return self._given[0].number if self._given else -1

    def take(
        self,
        rows: EmbeddingCollection,
        padding: int | None,
        ids: Tensor | None,
    ) -> Tensor | None:
        """The vectors of ids [n, dim], or of the padding (ids None), if they
        were looked up with a batch that a loop has."""
        if not rows.trains:
            return None
        for given in self._given:
            for call in given.calls:
                if call.rows is rows and call.padding == padding:
                    part = given.part(call, ids)
                    if part is not None:
                        return part
        return None

    def learn(
        self, rows: EmbeddingCollection, padding: int | None, ids: Tensor
    ) -> None:
        """Looks where the latest batch has these ids."""
        left = self._searches.get(id(rows), 0)
        if not left or not self._given or not rows.trains or not len(ids):
            return
        self._searches[id(rows)] = left - 1
        found = [
            _Call(rows, padding, path, columns)
            for path, tensor in _tensors(self._given[0].batch, ())
            for columns in _places(tensor, padding, ids)
        ]
        # Of several, as in a batch of few ids, a later batch shows which.
        if len(found) == 1 and found[0] not in self._calls:
            self._set([*self._calls, found[0]])

    def _set(self, calls: list[_Call]) -> None:
        if calls != self._calls:
            self._calls, self._tables = calls, None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.device == b.device and torch.equal(a, b)


def _flat(tensor: Tensor, padding: int | None) -> Tensor:
    """The ids of a tensor as a module looks them up, int64 [n]."""
    ids = tensor.reshape(-1).long()
    return ids if padding is None else ids[ids != padding]


def _inside(thing: Any, step: Any) -> Any:
    if isinstance(thing, Mapping) or isinstance(step, int):
        return thing[step]
    return getattr(thing, step)


def _tensors(
    thing: Any, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """All tensors of a batch, and the way to them."""
    if isinstance(thing, Tensor):
        yield path, thing
        return
    if len(path) == _DEEP or isinstance(thing, str):
        return
    inside: Iterator[tuple[Any, Any]] | enumerate[Any]
    if isinstance(thing, Mapping):
        inside = iter(thing.items())
    elif isinstance(thing, Sequence):
        inside = enumerate(thing)
    elif dataclasses.is_dataclass(thing) or hasattr(thing, "__dict__"):
        inside = iter(vars(thing).items())
    else:
        return
    for step, value in inside:
        yield from _tensors(value, (*path, step))


def _places(
    tensor: Tensor, padding: int | None, ids: Tensor
) -> Iterator[tuple[int, int] | None]:
    """The columns of a tensor that have exactly these ids."""
    if tensor.is_meta or tensor.is_sparse or tensor.is_complex():
        return
    tensor = tensor.cpu()
    if _same(_flat(tensor, padding), ids):
        yield None
        return
    if tensor.dim() != 2:
        return
    rows, width = tensor.shape
    if padding is None:
        if not rows or len(ids) % rows:
            return
        widths = range(len(ids) // rows, len(ids) // rows + 1)
    else:  # how many were left out is not known
        widths = range(1, width)
    for count in widths:
        for first in range(width - count + 1):
            columns = first, first + count
            if _same(_flat(tensor[:, slice(*columns)], padding), ids):
                yield columns
