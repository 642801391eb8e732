"""Batches that data loaders in other processes send: :class:`Stream`."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from persia import _core, errors
from persia.base.check import number
from persia.base.patience import patiently, saying_so, watching
from persia.base.warning import warn
from persia.data.batches.batch import Batch, of_flat
from persia.data.batches.jagged import JaggedBatch
from persia.distributed.addresses import (
    WIRE_DTYPES,
    job_of,
    resolve_workers,
    why_no_batch,
    why_workers_away,
)
from persia.distributed.listing import follow
from persia.distributed.peers import peers
from persia.distributed.security import Security
from persia.nn.collections import EmbeddingBagCollection
from persia.nn.lookups import Collection
from persia.store.configs import TableConfig, pooling_of
from persia.store.engine import engine_of
from persia.store.operators import TAKEN
from persia.store.store import Store

_ELSEWHERE = (
    "the ids of this batch are at the embedding workers: a rank gets their "
    "embeddings only"
)


class Stream:
    """The batches of data loaders, looked up by embedding workers.

    It is the ``batches`` of a :class:`persia.DataLoader`; a model needs no
    change. Each batch has the embeddings of its ids, and its gradients
    go back to the worker, which applies them at the parameter servers. An
    iteration ends when the data loaders have ended an epoch.

    Workers pool the ids of a :class:`persia.EmbeddingBagCollection`. Of tables
    that a weighted one or a :class:`persia.EmbeddingCollection` looks up, the
    distinct rows of a batch travel, and the trainer pools them.

    The model's store must be on the servers of the workers
    (``Store(servers=...)``).

    Args:
        workers: addresses "host:port" of embedding workers, several with
            commas between or as a list. Default: PERSIA_WORKERS. Lists that
            begin with "file:" or "dns:" are read again while it trains:
            "file:/shared/workers", one address a line, or "dns:name:port".
        timeout: seconds after which it is an error that no worker can be
            reached. One that cannot is passed over as long as others can, and
            takes part again when it is back. The same holds for a batch of the
            epoch whose worker died and which its loader does not send again.
        move_after: seconds that the first pass waits for workers that cannot
            be reached, before it begins with the others. Default: a third of
            ``timeout``.
        job: the job whose loaders' batches this trainer takes. Default:
            PERSIA_RUN_ID, which ``persia launch`` sets, else the job that a
            loader joined last. A pass waits until the job has loaders.
        security: TLS and tokens; default: as the environment says, see
            :meth:`persia.distributed.Security.from_environment`.

    Raises:
        InvalidArgument: (iterating) a model or store that cannot be used so.
        SchemaMismatch: (iterating) ranks of other models use these workers,
            or workers are of another namespace.
        Unavailable: (iterating) no worker can be reached, or the loader of a
            batch that was lost with its worker does not send it again.
    """

    def __init__(
        self,
        workers: str | Sequence[str] | None = None,
        *,
        timeout: float = 60.0,
        move_after: float | None = None,
        job: str | None = None,
        security: Security | None = None,
    ) -> None:
        self.workers = workers
        self.job = job
        self.timeout = number("timeout", timeout, 1e-9, 1e9)
        self.move_after = (
            self.timeout / 3
            if move_after is None
            else number("move_after", move_after, 0, 1e9)
        )
        self.security = security
        self._rank: _core.Rank | None = None
        self._why: Callable[[], str] = str  # there is no batch
        self._taking: weakref.ref[Taking] | None = None  # the last pass
        self._store: Store | None = None

    def __iter__(self) -> NoReturn:
        raise errors.InvalidArgument(
            "a Stream gives no batches by itself: it is the first argument "
            "of a persia.DataLoader"
        )

    def stats(self) -> dict[str, int]:
        """``late``: batches whose gradients reached a worker that no longer
        had their lease. It does not apply them: another process trains the
        batch, or the worker that had the lease applied them before it ended.
        ``given_up``: of those, batches that no worker had within the timeout
        after theirs had died. ``failed``: batches of the job that ended
        without an update; their loader has the reason. ``lost``: updates that
        servers had, and lost; as ``Store.stats()["client"]["lost"]``.
        ``away``: workers that cannot be reached now. ``silent``: data loaders
        that were not heard of for ``persia serve worker --loader-silence``,
        so that the last epoch ended without their batches. ``epochs``: of the
        data loaders that are there, that are over for this process; those
        before its first pass among them."""
        if self._rank is None or self._store is None:
            names = (
                *("late", "failed", "given_up", "away"),
                *("silent", "epochs", "lost"),
            )
            return dict.fromkeys(names, 0)
        client = _core.cluster_counts(engine_of(self._store).handle)
        return self._rank.counts() | {"lost": client["lost"]}

    def _connect(self, store: Store) -> _core.Rank:
        addresses, security = resolve_workers(self.workers, self.security)
        settings = engine_of(store).arguments.settings
        config = {
            "addresses": addresses,
            "namespace": settings.namespace,
            "rank": store.rank,
            "world": store.world_size,
            "timeout": self.timeout,
            "dtype": WIRE_DTYPES.index(settings.wire_dtype),
            "security": security.arguments(),
            "move_after": self.move_after,
            "stream": 0,
            "job": job_of(self.job),
        }
        asked = (addresses, settings.namespace, security)
        cause = partial(why_workers_away, *asked)
        self._why = partial(why_no_batch, *asked)
        with saying_so(addresses, self.timeout, cause, "embedding workers"):
            rank = _core.Rank(config)
        peers.watch()
        follow(
            self,
            self.workers,
            self.security,
            lambda _, found: rank.set_workers(config | {"addresses": found}),
        )
        return rank


def open_pass(
    stream: Stream, modules: Sequence[Collection], staleness: int | None
) -> Taking:
    """Begins a pass of these modules."""
    store = _check(modules)
    last = None if stream._taking is None else stream._taking()
    if last is not None and not last.closed:
        raise errors.InvalidArgument(
            "a Stream has one iteration at a time; close() the iterator "
            "of the other"
        )
    if stream._rank is None:
        stream._rank = stream._connect(store)
    stream._store = store
    features = _features(modules)
    tables = list({f.config.name: f.config for f in features}.values())
    places = {c.name: i for i, c in enumerate(tables)}
    plan = [
        (
            f.name,
            places[f.config.name],
            f.pooling,
            bool(f.config.trainable),
            f.rows,
        )
        for f in features
    ]
    declare = partial(
        stream._rank.declare,
        [engine_of(store).native(c) for c in tables],
        plan,
        staleness == 0 and store.world_size > 1,
    )
    patiently(partial(_vouching, store, declare), stream.timeout)
    taking = Taking(stream._rank, store, features)
    stream._taking = weakref.ref(taking)
    watching(
        partial(_held, stream._taking),
        stream._why,
        "a batch",
        "batches arrive again",
    )
    return taking


def _vouching(store: Store, ask: Callable[[], None]) -> None:
    """Servers that were started again differ to workers, until a store that
    knows better has looked at them.

    Raises:
        Unavailable: it has; ask again.
        RestoreIncomplete: they differ to it, too.
    """
    try:
        ask()
    except errors.RestoreIncomplete as error:
        engine_of(store).core.look()
        raise errors.Unavailable(str(error)) from error


def _check(modules: Sequence[Collection]) -> Store:
    """The store of modules that workers can look up for."""
    store = modules[0].store
    if any(module.store is not store for module in modules):
        raise errors.InvalidArgument(
            "a Stream: the modules of the model have several stores; give "
            "all of them one store="
        )
    if not store.remote or engine_of(store).connection.hosting is not None:
        raise errors.InvalidArgument(
            "a Stream: the tables are in this process; make the store with "
            "the servers of the embedding workers, Store(servers=...)"
        )
    return store


class _Feature(NamedTuple):
    """A feature by a table.

    Attributes:
        name: of the feature.
        config: of the table.
        pooling: by the worker; 0 where it does not pool.
        rows: whether distinct rows of the table travel.
    """

    name: str
    config: TableConfig
    pooling: int
    rows: bool


def _features(modules: Sequence[Collection]) -> list[_Feature]:
    """All outputs, each once."""
    rows = {
        config.name
        for module in modules
        for _, _, config in module.outputs
        if not isinstance(module, EmbeddingBagCollection)
        or module.is_weighted()
    }
    found: dict[tuple[str, str, int], _Feature] = {}
    for module in modules:
        for _, name, config in module.outputs:
            as_rows = config.name in rows
            pooling = 0 if as_rows else pooling_of(config)
            one = _Feature(name, config, pooling, as_rows)
            found.setdefault((name, config.name, pooling), one)
    return list(found.values())


class TakenIds(JaggedBatch):
    """In the place of a batch's ids, which are elsewhere.

    Its values are places among the distinct rows of the tables that travel.
    Features that workers pool have empty bags.
    """

    def __init__(
        self,
        keys: Sequence[str],
        rows: int,
        samples: int,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> None:
        self._keys = list(keys)
        self._rows = rows  # keys from the first one on that have values
        self._stride = samples
        self._values = values
        self._offsets: Tensor = offsets
        self._lengths = torch.diff(offsets) if rows else None
        self._weights = weights
        self._device = None
        self._copies = {}
        self.ticket = None
        self.taken: _core.Taken | None = None

    def values(self) -> Tensor:
        """Raises InvalidArgument."""
        raise errors.InvalidArgument(_ELSEWHERE)

    def lengths(self) -> Tensor:
        """Of a batch whose features all travel as rows, else raises."""
        self._check_all()
        return super().lengths()

    def offsets(self) -> Tensor:
        """Of a batch whose features all travel as rows, else raises."""
        self._check_all()
        return super().offsets()

    def _check_all(self) -> None:
        if self._rows < len(self._keys):
            raise errors.InvalidArgument(_ELSEWHERE)

    def _part(self, key: str) -> tuple[Tensor, ...]:
        """In place of ids: numbers that are equal where the ids are."""
        if key not in self._keys[: self._rows]:
            raise errors.InvalidArgument(f"feature {key!r}: {_ELSEWHERE}")
        first = self._keys.index(key) * self._stride
        bags = slice(first, first + self._stride)
        assert self._lengths is not None
        ids = slice(int(self._offsets[first]), int(self._offsets[bags.stop]))
        values = self._placed("_values", self._values)[ids]
        lengths = self._placed("_lengths", self._lengths)[bags]
        if self._weights is None:
            return values, lengths
        return values, lengths, self.weights()[ids]

    def with_weights(self, weights: Mapping[str, Tensor]) -> JaggedBatch:
        """The same batch with other weights of features whose rows travel."""
        for key in weights:
            if key in self._keys[self._rows :]:
                raise errors.InvalidArgument(f"feature {key!r}: {_ELSEWHERE}")
        out = super().with_weights(weights)
        out.ticket = self.ticket
        return out


def _held(of: weakref.ref[Taking]) -> float:
    """The seconds for which a pass has waited for its next batch.

    Raises:
        Closed: the pass has ended.
    """
    taking = of()
    if taking is None or taking.closed:
        raise errors.Closed("this pass has ended")
    since = taking.waits_since
    return time.monotonic() - since if since else 0.0


class Taking(Iterator[_core.Taken]):
    """One pass over a :class:`Stream`: batches that are asked for."""

    def __init__(
        self, rank: _core.Rank, store: Store, features: Sequence[_Feature]
    ) -> None:
        self._rank = rank
        self._engine = engine_of(store)
        self._handle = self._engine.handle
        rows = dict.fromkeys(f.name for f in features if f.rows)
        self._rows = len(rows)
        self._keys = list(rows | dict.fromkeys(f.name for f in features))
        self._zeros = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.closed = False
        self._ended = False  # the loop has heard of the end
        self.waits_since = 0.0  # receive() does, or 0
        self._asked: set[_core.Taken] = set()  # and not received

    def __next__(self) -> _core.Taken:
        taken = self._rank.next()
        self._asked.add(taken)
        return taken

    def look_up(self, taken: _core.Taken, number: int) -> None:
        """It is asked for when the bound of the store's pass allows."""
        taken.lookup(self._handle, number)

    def receive(self, taken: _core.Taken, number: int) -> Batch | None:
        """Waits for a batch; None: the pass has ended."""
        self.waits_since = time.monotonic()
        _core.taken_wait(self._handle, number)
        self.waits_since = 0.0
        if taken.end:
            self._ended = True
            self._look()
            self._warn_silent()
            return None
        taken.use()
        self._asked.discard(taken)
        try:
            tensors = {
                name: _tensor(taken, type_, shape, offset, size)
                for name, type_, shape, offset, size in taken.tensors()
            }
        except errors.ProtocolError:
            taken.skip()  # the next trainer could not read it, either
            raise
        ids = self._ids(taken)
        ids.ticket = torch.tensor([number | TAKEN, 0], device="cpu")
        ids.taken = taken
        return of_flat(ids, tensors)

    def _look(self) -> None:
        """What servers lost since is an error of this pass. The next one has
        nothing left."""
        patiently(self._engine.core.look, self._engine.connection.timeout)

    def _warn_silent(self) -> None:
        """An epoch may have fewer batches than its data has."""
        silent = self._rank.counts()["silent"]
        if silent:
            warn(
                f"this epoch ended without {silent} of the data loaders: "
                "workers have not heard of them for their `loader_silence`, "
                "and do not wait for what they had not sent. Start them again "
                "with the names or parts that they had"
            )

    def _ids(self, taken: _core.Taken) -> TakenIds:
        """The places of ids whose rows travel; empty bags of the others."""
        bags = len(self._keys) * taken.samples + 1
        if not self._rows:
            if len(self._zeros) < bags:
                self._zeros = torch.zeros(
                    bags, dtype=torch.int64, device="cpu"
                )
            values, offsets = self._zeros[:0], self._zeros[:bags]
            return TakenIds(
                self._keys, 0, taken.samples, values, offsets, None
            )
        places, ends, floats = taken.places(self._rows)
        values = _array(places, torch.int64)
        offsets = _array(ends, torch.int64)
        n = bags - len(offsets)
        if n:
            rest = torch.full(
                (n,), len(values), dtype=torch.int64, device="cpu"
            )
            offsets = torch.cat((offsets, rest))
        weights = None if floats is None else _array(floats, torch.float32)
        return TakenIds(
            self._keys, self._rows, taken.samples, values, offsets, weights
        )

    def again(self) -> None:
        """The pass ends with an error. If it was at its end, the loop has not
        heard of that: the next one ends, too."""
        self._rank.again()

    def close(self) -> None:
        """What was not received is offered again, and so is a batch that was
        taken and was not trained, also if it was the last one of the epoch."""
        if not self.closed:
            self.closed = True
            if not self._ended:
                self._rank.again()
            self._rank.cancel()
            # The traceback of an error may keep them.
            while self._asked:
                self._asked.pop().give_back()


def _array(data: bytearray, dtype: torch.dtype) -> Tensor:
    """A tensor that lies in these bytes."""
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype)


def _tensor(
    taken: _core.Taken,
    type_: str,
    shape: tuple[int, ...],
    offset: int,
    size: int,
) -> Tensor:
    """A tensor that lies in the answer."""
    dtype = getattr(torch, type_, None)
    if (
        not isinstance(dtype, torch.dtype)
        or math.prod(shape) * dtype.itemsize != size
    ):
        raise errors.ProtocolError(
            f"a tensor of type {type_!r} and shape {shape} has {size} bytes"
        )
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(
        taken,
        dtype=dtype,
        count=math.prod(shape),
        offset=offset,
    )
    return flat.reshape(shape)
