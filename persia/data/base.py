"""What the data sources share: their position, the share of a worker, and
reading ahead."""

from __future__ import annotations

import copy
import itertools
import logging
import mmap
import os
import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from persia import _core, errors
from persia.base.check import kind, whole
from persia.data.batches.batch import Batch

if TYPE_CHECKING:
    from persia.data.sharing import Sharing

T = TypeVar("T")

log = logging.getLogger("persia.data")

_STATES = 256  # positions kept, for a loader that takes batches ahead

# A byte for each source: whether workers of torch's DataLoader read it.
# Processes that are forked share it, so that theirs is known here.
_in_workers = mmap.mmap(-1, 1 << 16)
_numbers = itertools.count()

_REMEDY = (
    "save and load a persia.DataLoader over torch's DataLoader "
    "(store.save(loader=...)), or read without workers (num_workers=0)"
)


def value_hash(value: str | bytes, salt: int = 0) -> int:
    """The 64-bit id of a categorical value, as all data sets compute it.

    It is XXH64 of the value's bytes (UTF-8 for a str) with ``salt`` as seed,
    read as a signed number.
    """
    kind("value", value, (str, bytes), "a str or bytes")
    raw = value.encode() if isinstance(value, str) else value
    return _core.value_hash(raw, check_salt("value_hash", salt))


def check_salt(what: str, salt: int) -> int:
    return whole(f"{what}: hash_salt", salt, 0, 2**64 - 1)


def pair(what: str, value: Any, need: str) -> tuple[Any, Any]:
    """Both of a pair."""
    if not isinstance(value, Sequence) or len(value) != 2:
        kind(what, value, (), need)
    return value[0], value[1]


class Dataset(IterableDataset[Batch]):
    """An iterable of batches that knows its features.

    Under a ``torch.utils.data.DataLoader`` with workers, each worker makes
    its share of the batches; under ``torchrun``, ``rank=`` and
    ``world_size=`` do the same for ranks.

    Attributes:
        keys: names of the id features, as in ``batch.ids.keys()``.
        dense_names: names of the columns of ``batch.dense``.
        batch_size: samples of a batch; the last one may have fewer.
        continues: whether an iteration continues where the latest one ended.
    """

    keys: list[str]
    dense_names: list[str]
    schema: Any
    continues = False

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int,
        drop_last: bool,
        rank: int,
        world_size: int,
    ) -> None:
        self.batch_size = whole("batch_size", batch_size, 1, 2**63 - 1)
        self.world_size = whole("world_size", world_size, 1, 2**63 - 1)
        self.rank = whole("rank", rank, 0, self.world_size - 1)
        self.seed = whole("seed", seed, 0, 2**64 - 1)
        self.drop_last = drop_last
        self._epoch = 0
        self.forget_position()

    def _copy(self) -> Self:
        """Another one, which begins at the first batch."""
        part = copy.copy(self)
        part.forget_position()
        return part

    def parts(self, n: int) -> list[Self]:
        """So many parts of it, which have all its samples together.

        Raises:
            InvalidArgument: it is the share of a rank itself.
        """
        whole("parts", n, 1, 2**31 - 1)
        if self.world_size > 1:
            raise errors.InvalidArgument(
                f"parts of the share of rank {self.rank} of "
                f"{self.world_size}: need "
                "those of the whole data"
            )
        return self._parts_of(n)

    def _parts_of(self, n: int) -> list[Self]:
        parts = [self._copy() for _ in range(n)]
        for i, part in enumerate(parts):
            part.rank, part.world_size = i, n
        return parts

    def left(self, sharings: Sequence[Sharing]) -> Iterator[Batch]:
        """The batches of this rank of what is left of a pass that other ranks
        began."""
        return read_ahead(
            lambda: islice(
                self._left(sharings), self.rank, None, self.world_size
            )
        )

    def _left(self, sharings: Sequence[Sharing]) -> Iterator[Batch]:
        """The same of all ranks."""
        *before, last = sharings
        ranks = len(last.done)
        if before:
            for number, batch in enumerate(self._left(before)):
                if not last.has(number % ranks, number // ranks):
                    yield batch
            return
        for rank, first in enumerate(last.done):
            batches = self._batches_from(rank, ranks, first, None)
            for number, (batch, _) in enumerate(batches, first):
                if not last.has(rank, number):
                    yield batch

    def forget_position(self) -> None:
        """Begins at the first batch, as a copy of another one does."""
        # Where the next iteration begins: (batches, position or None), and
        # the process whose position was set.
        self._begin: tuple[int, Any] | None = None
        self._begin_in = 0
        self._number = next(_numbers) % len(_in_workers)
        _in_workers[self._number] = 0
        self._given = 0  # batches that the latest iteration gave out
        self._states: deque[tuple[int, Any]] = deque(maxlen=_STATES)

    @property
    def epoch(self) -> int:
        """The number of the pass; with ``seed`` it decides the shuffle. The
        caller sets it. Another epoch begins with its first batch."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        if number != self._epoch:
            self._begin = None
        self._epoch = number

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.keys)} id features, "
            f"{self.dense_features} dense, batch_size={self.batch_size}, "
            f"rank={self.rank}, world_size={self.world_size})"
        )

    @property
    def begins(self) -> int:
        """Batches before the place where the next iteration begins."""
        return self._begin[0] if self._begin else 0

    @property
    def dense_features(self) -> int:
        """The number of columns of ``batch.dense``."""
        return len(self.dense_names)

    @property
    def tasks(self) -> list[str]:
        """The names of the columns of ``batch.label``, where a sample has
        several labels; else none."""
        schema: Any = getattr(self, "schema", None)
        if schema is None or not isinstance(schema.label, list):
            return []
        return list(schema.tasks)

    def __iter__(self) -> Iterator[Batch]:
        rank, world = self.rank, self.world_size
        worker = get_worker_info()
        _in_workers[self._number] = worker is not None
        if worker is not None:
            if self.begins and self._begin_in != os.getpid():
                raise errors.InvalidArgument(
                    "a position in a data source cannot be loaded for worker "
                    f"processes, each of which has a share of it: {_REMEDY}"
                )
            rank = rank * worker.num_workers + worker.id
            world *= worker.num_workers
        (begin, at), self._begin = self._begin or (0, None), None
        self._given = begin
        self._states.clear()
        self._states.append((begin, at))
        return self._counted(
            read_ahead(lambda: self._batches_from(rank, world, begin, at))
        )

    def _counted(
        self, batches: Generator[tuple[Batch, Any], None, None]
    ) -> Iterator[Batch]:
        with closing(batches):
            for batch, at in batches:
                self._given += 1
                self._states.append((self._given, at))
                yield batch

    def __reduce_ex__(self, protocol: Any) -> Any:
        if get_spawning_popen() is not None:  # for a process that is started
            _in_workers[self._number] = 1
        return super().__reduce_ex__(protocol)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position: after the batches that the latest iteration gave out.

        Workers of torch's DataLoader have positions of their own, of which
        this process knows none: save a :class:`persia.DataLoader` over their
        loader.

        Args:
            batches: the position after so many batches instead, for a
                loader that takes them ahead.

        Returns:
            ``epoch``, ``batches`` (of this rank) and ``at``: where that is
            in the data, or None where it is not known any more. A source
            with a schema adds its ``hash_version``.

        Raises:
            InvalidArgument: worker processes read the data.
        """
        if _in_workers[self._number] and get_worker_info() is None:
            raise errors.InvalidArgument(
                "worker processes of torch's DataLoader read this data "
                f"source, so its position is not known here: {_REMEDY}"
            )
        count = self._given if batches is None else batches
        states = tuple(self._states)  # another thread may add to them
        at = next((a for n, a in states if n == count), None)
        out = {"epoch": self.epoch, "batches": count, "at": at}
        version = self.hash_version
        return out if version is None else out | {"hash_version": version}

    @property
    def hash_version(self) -> int | None:
        """The version of the ids, or None where the source has no schema."""
        return getattr(getattr(self, "schema", None), "hash_version", None)

    def use_hash_version(self, version: int) -> None:
        """Makes the ids of a version of the hash, as of a checkpoint whose
        model was trained on them.

        Raises:
            InvalidArgument: the ids were made already, or there is no such
                version.
        """
        if version == self.hash_version:
            return
        log.warning(
            "the checkpoint was trained on ids of version %s of the hash: so "
            "are those of this data",
            version,
        )
        self.schema = self.schema.model_copy(update={"hash_version": version})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins after the batches that were given out.

        The data, the options and the rank must be those of before. Ids get
        the version of the hash that the state says; 1, if it says none.

        Raises:
            InvalidArgument: it is no state of a data source.
        """
        try:
            epoch, batches = state["epoch"], state["batches"]
        except (LookupError, TypeError):
            raise errors.InvalidArgument(
                f"the state of a data source has epoch and batches; this is "
                f"{state!r}"
            ) from None
        if self.hash_version is not None:
            self.use_hash_version(hash_version_of(state))
        self.epoch = whole("epoch", epoch, 0, 2**63 - 1)
        batches = whole("batches", batches, 0, 2**63 - 1)
        self._given = batches
        self._begin = (batches, state.get("at"))
        self._begin_in = os.getpid()
        if get_worker_info() is None:
            _in_workers[self._number] = 0
        self._states.clear()
        self._states.append(self._begin)

    def _batches_from(
        self, shard: int, shards: int, begin: int, at: Any
    ) -> Iterator[tuple[Batch, Any]]:
        """The batches after the first ``begin`` ones, each with the position
        after it, if that is known."""
        for batch in islice(self._batches(shard, shards), begin, None):
            yield batch, None

    @abstractmethod
    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        """The batches of one of ``shards`` parts, in order."""


def hash_version_of(state: Mapping[str, Any]) -> int:
    """Of the ids that a state was saved with; none is said in those of before
    version 2."""
    return whole("hash_version", state.get("hash_version", 1), 1, 2)


class _End:
    """The last thing in the queue of read_ahead(): how the source ended."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def read_ahead(
    source: Callable[[], Iterator[T]], depth: int = 4
) -> Generator[T, None, None]:
    """Iterates over ``source()`` in a thread, up to ``depth`` items ahead.

    An exception of the source is raised here, after the items before it.
    Closing the iterator (``break`` does) ends the thread.
    """
    ready: queue.Queue[Any] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: Any) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def run() -> None:
        end = _End()
        try:
            items = source()
            try:
                for item in items:
                    if not put(item):
                        break
            finally:
                if hasattr(items, "close"):  # closes a source's own source
                    items.close()
        except BaseException as error:
            end = _End(error)
        put(end)

    thread = threading.Thread(
        target=run, name="persia-read-ahead", daemon=True
    )
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
        while not ready.empty():  # wakes a thread that waits for room
            ready.get_nowait()
        if thread is not threading.current_thread():  # a collection in it
            thread.join()
