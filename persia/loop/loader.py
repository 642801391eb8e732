"""The :class:`DataLoader`: batches whose embeddings are looked up ahead."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from persia import _core, errors
from persia.base.check import whole
from persia.data.base import hash_version_of
from persia.data.batches.jagged import JaggedBatch
from persia.loop.stream import Stream, Taking, open_pass
from persia.nn.embedding import tables_of
from persia.nn.joined import Given, Joined
from persia.nn.lookups import Collection, collections_of
from persia.store.ahead import LookedUp
from persia.store.engine import Engine, engine_of
from persia.store.operators import TAKEN

T = TypeVar("T")

# Batches taken from the source beyond the one that is trained: more would
# cost memory and hide no more time. Without a bound (async) it is all that
# bounds the staleness.
_DEPTH_MAX = 8
_DEPTH_ASYNC = 4


class DataLoader(Generic[T]):
    """Looks up the embeddings of the next batches while a batch is trained.

    It takes batches as they are from any iterable and gives them out in the
    same order, each with a ticket on its ids: a forward with these ids finds
    its embeddings looked up already, on threads of the store. The bound: the
    lookup of a batch starts when at most ``staleness`` earlier batches have
    gradients that are not applied yet. With 0 the rows are those that a plain
    loop would read, bit for bit; over several ranks all take each step
    together, and a rank without a gradient for a batch (``batch.skip()``), or
    without more batches, holds up no other rank.

    With 1 or more ``backward()`` hands its update to a thread of the store and
    returns; the end of the loop, evaluation and every look at the rows wait
    for it. Should it fail, the next call that trains, or ``store.flush()``,
    raises its error.

    Looking ahead helps only where a core or the network would be idle. Tables
    in this process and a model on the CPU with as many threads
    (``torch.get_num_threads()``) as there are cores leave none: then forward
    and backward do their own lookups and updates, as in a plain loop. So with
    a staleness of 1 or more the bits of a training depend on the machine. They
    do not with ``staleness=0``, nor, where tables are in this process, with
    ``prefetch=False``.

    A batch counts until its gradients are applied, until ``batch.skip()``, or
    until the loop asks for a next batch that could not be looked up
    otherwise: then the oldest batch without a backward is abandoned (counted
    in ``store.stats()``; its later backward raises TicketError). So
    ``continue`` after a bad loss never blocks. With ``Store(update="step")``
    the staleness counts optimizer steps. Under ``torch.no_grad()`` nothing is
    waited for.

    Args:
        batches: an iterable of ready batches, torch's DataLoader included. A
            batch is anything that holds ids. It must not change batches that
            it gave out: they are taken ahead.
        model: its persia modules are those to look up for.
        staleness: 0 is synchronous, None without bound.
        ids: where a batch keeps its ids: a field (attribute, key or place in
            a tuple) or a function of the batch. Default: the field ``ids``,
            else the first JaggedBatch, KeyedJaggedTensor or dict of tensors
            among its fields (or the batch itself) with the features of a
            module.
        prefetch: whether anything is done ahead; "auto": where a core or a
            wire would wait otherwise. ``prefetch`` of
            ``store.stats()["lookahead"]`` is the latest decision. With
            tables on servers or ranks False takes no batch ahead, but updates
            still overlap.

    A forward knows ids again by the object, or by their contents: also a dict
    of tensors, and what ``.to()`` has copied to another device. Compiled code
    knows the ids of a JaggedBatch alone. Ids that are not found or that
    changed are looked up by the forward, which warns once, and are counted:
    ``store.stats()["lookahead"]["not_prefetched"]``.

    Leaving the loop (``break``, an exception, ``close()`` of the iterator)
    cancels what was looked up ahead. Several iterators may be open at once,
    as in ``zip(loader_a, loader_b)``: the bound of each counts the batches of
    all of them. Batches that are taken from several loaders before a backward
    belong to one step, and do not wait for each other.

    Raises:
        InvalidArgument: an argument of the wrong kind, or a model without
            persia modules; (iterating) a second time over a generator.
        MissingFeature: (iterating) a batch has no field ``ids``.
    """

    def __init__(
        self,
        batches: Iterable[T],
        model: nn.Module,
        staleness: int | None = 1,
        ids: str | int | Callable[[T], Any] | None = None,
        prefetch: bool | str = "auto",
    ) -> None:
        if not isinstance(batches, Iterable) and not hasattr(
            batches, "__getitem__"
        ):
            raise errors.InvalidArgument(
                f"batches is a {type(batches).__name__}, need an iterable of "
                "batches"
            )
        if not isinstance(model, nn.Module):
            raise errors.InvalidArgument(
                f"model is a {type(model).__name__}, need the nn.Module that "
                "is trained"
            )
        if staleness is not None and (
            isinstance(staleness, bool)
            or not isinstance(staleness, int)
            or staleness < 0
        ):
            raise errors.InvalidArgument(
                f"staleness is {staleness!r}, need a number of batches, 0 or "
                "more, or None"
            )
        if (
            ids is not None
            and not callable(ids)
            and not isinstance(ids, str | int)
        ):
            raise errors.InvalidArgument(
                f"ids is a {type(ids).__name__}, need the name of a field or "
                "a function"
            )
        if not isinstance(prefetch, bool) and prefetch != "auto":
            raise errors.InvalidArgument(
                f"prefetch is {prefetch!r}, need 'auto', True or False"
            )
        if not collections_of(model):
            raise errors.InvalidArgument(
                "the model has no persia module (a collection, a "
                "persia.nn.Embedding or a converted module), so there is "
                "nothing to look up ahead"
            )
        self.batches = batches
        self.model = model
        self.staleness = staleness
        self.ids = ids
        self.prefetch = prefetch
        self._joins: dict[int, Joined] = {}  # by store
        self._given = 0  # batches given out by the latest iteration
        self._begin = 0  # batches that the next iteration leaves out
        self._passes = 0  # iterations; of the latest one:
        self._at: int | None = None  # the epoch where it began
        self._left_at: int | None = None  # and where it was left
        self._ended = False  # it reached the end

    def __iter__(self) -> _Pass[T]:
        if self._passes and isinstance(self.batches, Iterator):
            raise errors.InvalidArgument(
                f"the batches are a {type(self.batches).__name__}, which can "
                "be read once, and batches that were taken ahead are gone; "
                "pass a list, or a data set of persia.data"
            )
        return _Pass(self)

    def __repr__(self) -> str:
        return (
            f"DataLoader({self.batches!r}, staleness={self.staleness}, "
            f"prefetch={self.prefetch!r})"
        )

    def __len__(self) -> int:
        """The number of batches, where the source knows it."""
        return len(self.batches)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: how many batches the latest iteration
        gave out, and ``epoch`` of the source if it has one. After the end of
        an epoch that is the beginning of the next one, whether the source's
        ``epoch`` was set to it already or not.
        Of a source that continues, such as :class:`persia.data.Kafka`:
        ``source``, its own position after these batches; the end is one.
        """
        batches, epoch = self._position()
        state: dict[str, Any] = {"batches": batches, "epoch": epoch}
        version = getattr(self.batches, "hash_version", None)
        if isinstance(version, int):
            state["hash_version"] = version
        if (source := self._continuing) is not None:
            state["source"] = source.state_dict(self._given)
        return state

    def _position(self) -> tuple[int, int | None]:
        """(batches given out, epoch). The source itself may be in the next
        epoch, as its batches are taken ahead."""
        now, at = self._epoch, self._at
        if at is None or now is None or self._continuing is not None:
            return self._given, now
        if self._left_at not in (None, now):  # it was set since
            return 0, now
        return (0, at + 1) if self._ended else (self._given, at)

    @property
    def _epoch(self) -> int | None:
        """Of the source, if it has one."""
        epoch = getattr(self.batches, "epoch", None)
        return epoch if isinstance(epoch, int) else None

    @property
    def _continuing(self) -> Any:
        """The source, if its iterations continue where the latest one
        ended."""
        continues = getattr(self.batches, "continues", False)
        return self.batches if continues is True else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration continues behind the batches that were given out.

        The source must give the same batches again, as those of
        ``persia.datasets`` do; those left out are read and dropped.
        """
        try:
            batches, epoch = state["batches"], state["epoch"]
        except (LookupError, TypeError):
            raise errors.InvalidArgument(
                f"the state of a DataLoader has batches and epoch; this is "
                f"{state!r}"
            ) from None
        batches = whole("batches", batches, 0, 2**63 - 1)
        if (source := self._continuing) is not None:
            source.load_state_dict(state.get("source"))
            self._given = batches
            return
        data: Any = self.batches
        if isinstance(getattr(data, "hash_version", None), int):
            data.use_hash_version(hash_version_of(state))
        if epoch is not None and hasattr(self.batches, "epoch"):
            self.batches.epoch = whole("epoch", epoch, 0, 2**63 - 1)
        self._given = self._begin = batches
        self._at = None


@dataclasses.dataclass(slots=True)
class _Batch(Generic[T]):
    """A batch that was taken from the source and not given out."""

    number: int
    batch: T
    looked_up: list[tuple[Any, Collection, LookedUp]]  # ids, module
    joined: list[tuple[Joined, Given]]


class _Pass(Iterator[T]):
    """One iteration over a DataLoader."""

    def __init__(self, loader: DataLoader[T]) -> None:
        # (handle of a store, stream)
        self._streams: list[tuple[int, int]] = []
        self._trains: list[Engine] | None = None  # those of a training pass
        self._joined: list[Engine] = []  # in steps of all ranks
        self._modules = collections_of(loader.model)
        engines = (engine_of(module.store) for module in self._modules)
        self._engines = {engine.handle: engine for engine in engines}
        self._find = _finder(loader.ids)
        bound = loader.staleness
        here = not loader.prefetch
        if loader.prefetch == "auto":
            here = nothing_to_hide(loader.model, self._modules)
        for engine in self._engines.values():
            engine.prefetch = not here
        self._joins: list[Joined] = []
        self._began = False
        if not isinstance(loader.batches, Stream):
            self._join(loader)
        if here:
            self._depth = 0
        elif bound is None:
            self._depth = _DEPTH_ASYNC
        else:
            self._depth = max(1, min(bound, _DEPTH_MAX))
        self._ahead: deque[_Batch[T]] = deque()
        self._numbers: set[int] = set()  # of batches given out
        self._end: BaseException | None = None  # what the source ended with
        self._loader = loader
        begin, loader._begin = loader._begin, 0
        loader._passes += 1
        self._number = loader._passes
        loader._at, loader._left_at = loader._epoch, None
        loader._ended = False
        if (source := loader._continuing) is not None:
            loader._given = source.rewind(loader._given)
        else:
            loader._given = begin
        self._taking: Taking | None = None
        self._source: Iterator[Any] | None
        if isinstance(loader.batches, Stream):
            if begin:
                raise errors.InvalidArgument(
                    "a Stream cannot begin behind the first batches: the "
                    "data loaders decide where it begins"
                )
            self._taking = open_pass(loader.batches, self._modules, bound)
            self._source = self._taking
        else:
            self._source = islice(iter(loader.batches), begin, None)
        for handle in self._engines:
            stream = _core.prefetch_open(
                handle, -1 if bound is None else bound, here
            )
            self._streams.append((handle, stream))
        # The other ranks continue without a pass that is open at the exit.
        # This runs before the exit of the stores, which were made before.
        self._exit = partial(_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._exit)

    def _join(self, loader: DataLoader[T]) -> None:
        """Modules that have a table each are looked up together."""
        apart = tables_of(loader.model)
        self._modules = [m for m in self._modules if m not in apart]
        for handle, engine in self._engines.items():
            here = [m for m in apart if engine_of(m.store) is engine]
            if here:
                one = loader._joins.setdefault(handle, Joined(here))
                self._joins.append(one)
                engine.ahead.joins.append(one)

    def __iter__(self) -> _Pass[T]:
        return self

    def __next__(self) -> T:
        if self._source is None:
            raise StopIteration
        try:
            if self._trains is None and torch.is_grad_enabled():
                self._begin_training()
            self._fetch(1)
            if not self._ahead:
                assert self._end is not None
                for handle, _ in self._streams:
                    _core.prefetch_flush(handle)
                ended = isinstance(self._end, StopIteration)
                if ended and self._loader._continuing is None:
                    self._loader._given = 0
                    self._loader._ended = True
                raise self._end
            one = self._ahead[0]
            reading = not torch.is_grad_enabled()
            for handle, _ in self._streams:
                _core.prefetch_next(handle, one.number, reading)
            self._ahead.popleft()
            if self._taking is not None:
                taken: Any = one.batch
                received: Any = self._taking.receive(taken, one.number)
                if received is None:
                    return self._end_of_stream(one.number)
                received.ids.given_by = weakref.ref(self)
                one.batch = received
            for join in self._joins:
                join.settle()
            # The first forward shows what there is to look up.
            if self._began or all(one.knows for one in self._joins):
                self._fetch(self._depth)
            self._began = True
            # Now, as another pass may have ids of the same batch ahead.
            for ids, module, looked_up in one.looked_up:
                _put(ids, looked_up.ticket(), self)
                engine_of(module.store).ahead.add(looked_up)
                self._numbers.add(one.number)
            for join, given in one.joined:
                join.give(given)
            self._loader._given += 1
            return one.batch
        except StopIteration:
            self.close()
            raise
        except BaseException:
            if self._taking is not None:
                self._taking.again()
            with contextlib.suppress(errors.PersiaError):
                self._close(settle=False)
            raise

    def _end_of_stream(self, number: int) -> T:
        """No more are asked for; what was asked for before may have got
        one of the last batches."""
        self._end = StopIteration()
        self._skip(number)
        return next(self)

    def _fetch(self, n: int) -> None:
        """Takes batches until n are ahead, and starts their lookups.

        An exception (the end is one) waits until the batches before it were
        given out.
        """
        assert self._source is not None
        while len(self._ahead) < n and self._end is None:
            try:
                batch = next(self._source)
                self._ahead.append(self._look_ahead(batch))
            except Exception as end:
                self._end = end.with_traceback(_of_source(end.__traceback__))
                return

    def _look_ahead(self, batch: T) -> _Batch[T]:
        """Starts the lookups of a batch."""
        number = _core.prefetch_number()
        for handle, stream in self._streams:
            _core.prefetch_batch(handle, stream, number)
        looked_up = []
        if self._taking is not None:
            taken: Any = batch
            self._taking.look_up(taken, number)
            for handle, _ in self._streams:
                _core.prefetch_ready(handle, number)
            return _Batch(number, batch, [], [])
        # Ordinary tensors, whatever mode the loop is in: a forward may need
        # gradients.
        with torch.inference_mode(False):
            for module in self._modules:
                ids = self._find(batch, module.features)
                one = self._look_up(ids, module, number)
                if one is not None:
                    looked_up.append((ids, module, one))
            joined = [
                (join, join.look_ahead(batch, number)) for join in self._joins
            ]
        for handle, _ in self._streams:
            _core.prefetch_ready(handle, number)
        return _Batch(number, batch, looked_up, joined)

    @staticmethod
    def _look_up(ids: Any, module: Collection, number: int) -> LookedUp | None:
        """Starts one; says why it is none."""
        if ids is None:
            engine_of(module.store).ahead.warn(
                f"a batch has no ids with the features {module.features} "
                "that can be found: name their field with ids="
            )
            return None
        try:
            one = module.look_ahead(ids, number)
        except errors.Closed:
            raise
        except errors.PersiaError:
            return None  # a forward with these ids will raise it
        if one is None:
            engine_of(module.store).ahead.warn("weights of ids require grad")
        return one

    def _begin_training(self) -> None:
        """A pass that trains begins; a synchronous one with all ranks."""
        self._trains = []
        together = any(
            isinstance(m, nn.parallel.DistributedDataParallel)
            for m in self._loader.model.modules()
        )
        for engine in self._engines.values():
            engine.connection.end_steps()
            exchanges = (
                engine.arguments.update == "step"
            )  # norms, what is infinite
            meets = exchanges and not together
            engine.connection.passes.begin(meets=meets)
            self._trains.append(engine)
        if self._loader.staleness != 0:
            return
        for handle, stream in self._streams:
            engine = self._engines[handle]
            by_batch = engine.arguments.update == "backward"
            if engine.connection.join(stream, by_batch):
                self._joined.append(engine)

    def skip(self, ticket: Tensor) -> None:
        """Waits no longer for the gradients of a batch that it gave out."""
        self._skip(int(ticket[0]) & ~TAKEN)

    def _skip(self, number: int) -> None:
        for handle, _ in self._streams:
            _core.prefetch_skip(handle, number)

    def __enter__(self) -> _Pass[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        """:meth:`close`, which waits for no update after an error: its step
        may wait for another rank, which has ended."""
        self._close(settle=kind is None)

    def close(self) -> None:
        """Cancels what was looked up ahead; the iteration is over."""
        self._close(settle=True)

    def _close(self, settle: bool) -> None:
        if self._source is not None and (self._loader._passes == self._number):
            self._loader._left_at = self._loader._epoch
        self._source = None
        self._end = None
        self._ahead.clear()
        if self._taking is not None:
            self._taking.close()
        for engine in self._engines.values():
            engine.ahead.remove(self._numbers)
        for join in self._joins:
            join.forget()
            engine_of(join.store).ahead.joins.remove(join)
        self._joins = []
        for handle, stream in self._streams:
            _core.prefetch_close(handle, stream)
        self._streams = []
        atexit.unregister(self._exit)
        joined, self._joined = self._joined, []
        trained, self._trains = self._trains or [], []
        with contextlib.ExitStack() as all_of_it:  # whatever one raises
            for engine in trained:
                all_of_it.callback(engine.connection.passes.end)
            for engine in joined:
                all_of_it.callback(engine.connection.leave, settle)

    def __del__(self) -> None:
        if getattr(self, "_streams", None):
            self.close()


def _of_source(trace: TracebackType | None) -> TracebackType | None:
    """Without our own frames: one that refers to the pass would keep it, and
    so its look-ahead and its place in steps, beyond the loop's end."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _at_exit(of: weakref.ref[_Pass[Any]], pid: int) -> None:
    """Closes a pass, but not in a forked child."""
    one = of()
    if one is None or os.getpid() != pid:
        return
    failed = getattr(sys, "last_value", None) is not None
    with contextlib.suppress(Exception):
        one._close(settle=not failed)


def _put(ids: Any, ticket: Tensor, by: _Pass[Any]) -> None:
    """Puts the ticket on an ids object, if it takes attributes."""
    with contextlib.suppress(AttributeError):
        ids.ticket = ticket
        ids.given_by = weakref.ref(by)


def _is_ids(value: Any) -> bool:
    """A JaggedBatch, a KeyedJaggedTensor or its like."""
    return isinstance(value, JaggedBatch) or all(
        callable(getattr(value, name, None))
        for name in ("keys", "values", "offsets", "weights_or_none")
    )


def _fields(batch: Any) -> Iterator[Any]:
    """The values that a batch consists of."""
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        yield from batch
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield getattr(batch, field.name)
    elif hasattr(batch, "__dict__"):
        yield from vars(batch).values()


def _candidates(batch: Any) -> Iterator[Any]:
    """What may be ids, the most likely first."""
    if _is_ids(batch):
        yield batch
    named = (
        batch.get("ids")
        if isinstance(batch, Mapping)
        else getattr(batch, "ids", None)
    )
    if _is_ids(named) or isinstance(named, Mapping):
        yield named
    fields = list(_fields(batch))
    yield from filter(_is_ids, fields)
    yield from (one for one in (batch, *fields) if isinstance(one, Mapping))


def _default_ids(batch: Any, features: tuple[str, ...]) -> Any:
    """The first that has the features; else the first with offsets, whose
    forward will raise."""
    candidates = list(_candidates(batch))
    for one in candidates:
        keys = set(one.keys())
        if all(feature in keys for feature in features):
            return one
    return next(filter(_is_ids, candidates), None)


def nothing_to_hide(model: nn.Module, modules: Sequence[Collection]) -> bool:
    """Whether no core would wait otherwise: the tables are in this process,
    and torch computes the model with all of its cores."""
    return (
        not any(m.store.remote for m in modules)
        and all(p.device.type == "cpu" for p in model.parameters())
        and torch.get_num_threads() >= len(os.sched_getaffinity(0))
    )


def _finder(ids: Any) -> Callable[[Any, tuple[str, ...]], Any]:
    """A function from a batch, and the features of a module, to its ids; None
    where there are none."""
    if ids is None:
        return _default_ids

    def named(batch: Any, features: tuple[str, ...]) -> Any:
        if callable(ids):
            return ids(batch)
        try:
            if isinstance(ids, int) or isinstance(batch, Mapping):
                return batch[ids]
            return getattr(batch, ids)
        except (AttributeError, KeyError, IndexError):
            raise errors.MissingFeature(
                f"ids={ids!r}, but a batch ({type(batch).__name__}) has no "
                "such field"
            ) from None

    return named
