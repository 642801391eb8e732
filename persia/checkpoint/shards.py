"""Rows of a store in files and back: each shard writes and reads its own, here
they are asked to. Servers share the folder with this process, or have the same
remote storage; the shard of an embedded store is in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from persia import _core
from persia.base.patience import patiently
from persia.base.urls import Url
from persia.checkpoint import files
from persia.checkpoint.files import Folder
from persia.checkpoint.ledgers import Numbers
from persia.checkpoint.manifest import (
    Manifest,
    Part,
    Rows,
    Table,
    next_restore,
    part_of,
    warn_in_part,
)
from persia.distributed.cluster import Connection
from persia.errors import (
    Interrupted,
    InvalidArgument,
    PersiaError,
    RestoreIncomplete,
    SchemaMismatch,
    StorageError,
    Unavailable,
)

_TEXT = 200  # bytes of a path in errors
_REMIND, _ENDS, _PAUSE = 5.0, 10.0, 0.05  # seconds
_STAYS = 2**64 - 1  # clock of a table that is not restored


class Peer(Protocol):
    """One shard; what :class:`persia._core.Channel` has of it."""

    @property
    def address(self) -> str:
        """For messages."""

    def hello(self, namespace: str, stream: int, /) -> dict[str, Any]:
        """See Hello in persia.proto."""

    def snapshot(
        self, verb: int, root: str, folder: str, proof: str, /
    ) -> dict[str, Any]:
        """See Snapshot in persia.proto."""

    def restore(
        self,
        verb: int,
        root: str,
        folder: str,
        proof: str,
        lineage: int,
        restore: int,
        updates: int,
        step: int,
        t: int,
        pushes: Sequence[int],
        ledgers: Sequence[Numbers],
        files: Sequence[tuple[int, str, int, int, int]],
        /,
    ) -> dict[str, int]:
        """See Restore in persia.proto."""


class _StorePeer:
    """A shard of a store. Implements :class:`Peer`."""

    def __init__(
        self, connection: Connection, shard: int, address: str
    ) -> None:
        self.address = address
        ask = connection.ask
        self.hello = partial(ask, _core.ckpt_hello, shard)
        self.snapshot = partial(ask, _core.ckpt_snapshot, shard)
        self.restore = partial(ask, _core.ckpt_restore, shard)


def rows_of(
    connection: Connection, root: files.Root | None = None
) -> ShardRows:
    """The rows of a store, whose files are in a root."""
    shards = enumerate(_core.ckpt_shards(connection.core.handle))
    peers = [_StorePeer(connection, shard, addr) for shard, addr in shards]
    made = peers, connection.namespace, connection.timeout
    if not connection.remote:
        return EmbeddedRows(*made)
    if connection.hosting is None and root is not None and root.far:
        return FarRows(root, *made)
    return ShardRows(*made)


class Place(NamedTuple):
    """How shards find a folder: see Snapshot in persia.proto."""

    root: str
    folder: str
    proof: str


def _names(folder: Folder) -> tuple[str, str]:
    """Those of a folder and the one above it."""
    path = PurePosixPath(
        folder.path if isinstance(folder, Url) else folder.absolute()
    )
    return path.parent.name, path.name


def poll(
    shards: int,
    ask: Callable[[int], dict[str, Any]],
    timeout: float,
    stop: threading.Event,
    until: str = "done",
) -> list[dict[str, Any]]:
    """Asks each shard until it is done (or started); their last answers."""

    def once(shard: int) -> dict[str, Any]:
        return patiently(partial(ask, shard), timeout)

    answers = [once(shard) for shard in range(shards)]
    began = asked = time.monotonic()
    while not all(answer[until] for answer in answers):
        if stop.is_set():
            raise Interrupted("the checkpoint was given up by another rank")
        # What took long may take a little longer.
        now = time.monotonic()
        time.sleep(min(max((now - began) / 50, 0.001), 0.5))
        # A shard that is not asked about forgets what it has done.
        every = now - asked > _REMIND
        if every:
            asked = now
        for shard in range(shards):
            if every or not answers[shard][until]:
                answers[shard] = once(shard)
    return answers


def _end(shards: int, ask: Callable[[int], Mapping[str, Any]]) -> None:
    """Ends the work of all shards, and waits until none touches a file of it
    any more: for a while, as their files may hang. It does not fail.
    """
    left, began, pause = list(range(shards)), time.monotonic(), 0.001

    def ended(shard: int) -> bool:
        try:
            return bool(ask(shard)["done"])
        except PersiaError:
            return True  # it forgets the work by itself

    while left := [shard for shard in left if not ended(shard)]:
        if time.monotonic() - began > _ENDS:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


class ShardRows:
    """The rows of servers' shards. Calls that may take long look at `stop` now
    and then.

    Args:
        peers: all shards, in their order.
        namespace: of the tables.
        timeout: seconds; so long a shard is asked that cannot be reached.
    """

    def __init__(
        self, peers: Sequence[Peer], namespace: str, timeout: float = 60.0
    ) -> None:
        self._peers = peers
        self._namespace = namespace
        self._timeout = timeout

    #: Its folders are URIs.
    is_far = False

    def lineage(self) -> str:
        """Names the training that they come from: 16 hexadecimal digits."""
        return f"{self._hello(self._peers[0])['lineage']:016x}"

    def lineages(self) -> list[int]:
        """The same of each shard, as numbers."""
        return [self._hello(peer)["lineage"] for peer in self._peers]

    def restores(self) -> list[int]:
        """The id of the restore that the rows of each shard stem from; 0: of
        none."""
        return [self._hello(peer)["restore"] for peer in self._peers]

    def check_one(
        self, restores: Sequence[int], what: str, remedy: str
    ) -> None:
        """The rows of all shards stem from one restore.

        Args:
            restores: of each shard.
            what: is not done otherwise.
            remedy: for the message.

        Raises:
            RestoreIncomplete: they stem from several.
        """
        if len(set(restores)) <= 1:
            return
        which = ", ".join(
            f"{id:016x} at {peer.address}"
            for peer, id in zip(self._peers, restores, strict=True)
        )
        raise RestoreIncomplete(
            f"{what}: the rows of servers stem from different restores "
            f"({which}); {remedy}"
        )

    def tables(self) -> list[dict[str, Any]]:
        """The tables of the first shard, as arguments of the core's
        declare()."""
        found: list[dict[str, Any]] = self._hello(self._peers[0])["tables"]
        return found

    def _tables(self) -> list[list[dict[str, Any]]]:
        """Name and options of the tables of each shard, by its numbers."""
        return [
            [
                _core.ckpt_describe(**table)
                for table in self._hello(peer)["tables"]
            ]
            for peer in self._peers
        ]

    def _hello(self, peer: Peer, stream: int = 0) -> dict[str, Any]:
        ask = partial(peer.hello, self._namespace, stream)
        return patiently(ask, self._timeout)

    def ledgers(self, stream: int) -> list[Numbers]:
        """What each shard has of a stream of updates."""
        return [
            Numbers(*self._hello(peer, stream)["ledger"])
            for peer in self._peers
        ]

    def lost(self, manifest: Manifest, stream: int) -> dict[str, int]:
        """The shards that have not all updates of a stream that a checkpoint
        has, by address, and how many at least those are. The stream is the
        caller's.
        """
        found: dict[str, int] = {}
        pairs = zip(self._peers, self.ledgers(stream), strict=True)
        for shard, (peer, has) in enumerate(pairs):
            part = part_of(manifest, shard, len(self._peers))
            for saved in part.ledgers:
                if saved.stream != stream:
                    continue
                # A server that lost some gets an order to pass over them.
                lost = max(has.lacks(saved), saved.applied() - has.applied())
                if lost > 0:  # several shards may be at one address
                    found[peer.address] = found.get(peer.address, 0) + lost
        return found

    def updates(self) -> int:
        """How many the shard has that has most."""
        return max(int(self._hello(peer)["updates"]) for peer in self._peers)

    def write(
        self,
        folder: Folder,
        id: str,
        between: Callable[[], None],
        stop: threading.Event,
    ) -> tuple[list[dict[str, Any]], list[Part]]:
        """Writes all rows of this moment into files of the folder.

        `between` is called when the moment is taken and rows may change
        again, before it takes time.

        Args:
            folder: this process sees it, or it is a URI, see `is_far`.
            id: of the checkpoint.

        Returns:
            Name and options of all tables, and what each shard wrote.
        """
        peers = self._peers
        with self._snapshot(folder, id, stop) as ask:
            tables = self._tables()
            between()
            answers = self._watch(ask, folder, stop, "done")
        every, parts = _parts(tables, answers)
        self.check_one(
            [part.restore for part in parts],
            "nothing was saved",
            "load a checkpoint, which reaches all of them",
        )
        size = self._sizes(folder, id)
        for peer, part in zip(peers, parts):
            for file in part.files:
                _check_file(peer, folder, file, size(file.name))
        return every, parts

    def _sizes(self, folder: Folder, id: str) -> Callable[[str], int | None]:
        """The bytes of a file that a shard wrote; None: it cannot be seen."""

        def size(name: str) -> int | None:
            assert isinstance(folder, Path)
            try:
                return (folder / name).stat().st_size
            except OSError:
                return None

        return size

    def _watch(
        self,
        ask: Callable[[int, int], dict[str, Any]],
        folder: Folder,
        stop: threading.Event,
        until: str,
    ) -> list[dict[str, Any]]:
        status = partial(ask, _core.SNAPSHOT_STATUS)
        try:
            return poll(len(self._peers), status, self._timeout, stop, until)
        except InvalidArgument as error:
            raise Unavailable(
                f"the save into {folder} has failed, a server was "
                f"started again in the middle of it, or another save took "
                f"its place: save again ({error})"
            ) from error

    def check(self, folder: Folder) -> None:
        """Finds out whether all shards could write into the folder."""
        with self._snapshot(folder, secrets.token_hex(16), threading.Event()):
            pass

    @contextlib.contextmanager
    def _snapshot(
        self, folder: Folder, id: str, stop: threading.Event
    ) -> Iterator[Callable[[int, int], dict[str, Any]]]:
        """All shards write their rows into the folder, until the end at most;
        what asks them for more: by verb and shard.
        """
        with self._shared(folder, id) as place:

            def ask(verb: int, shard: int) -> dict[str, Any]:
                return self._peers[shard].snapshot(verb, *place)

            try:
                with self._opened(folder):
                    for shard in range(len(self._peers)):
                        begin = partial(ask, _core.SNAPSHOT_BEGIN, shard)
                        patiently(begin, self._timeout)
                    self._watch(ask, folder, stop, "started")
                yield ask
            finally:
                _end(len(self._peers), partial(ask, _core.SNAPSHOT_END))

    def stage(
        self,
        folder: Folder,
        manifest: Manifest,
        tables: Mapping[int, Table],
        stop: threading.Event,
    ) -> Staged:
        """Reads the rows of a checkpoint, beside those that are there.

        Args:
            folder: where the row files are.
            manifest: of the checkpoint.
            tables: those of its tables that are wanted, by the store's
                number.
        """
        warn_in_part(manifest, folder, len(self._peers))
        shards = [shard.restore for shard in manifest.shards]
        with self._shared(folder, None) as place:
            staged = Staged(
                self._peers,
                [*self.restores(), *shards],
                self._tables(),
                place,
                manifest,
                {table.name for table in tables.values()},
                self._timeout,
            )
            try:
                with self._opened(folder):
                    staged.prepare(stop)
            except BaseException:
                staged.abort()
                raise
        return staged

    @contextlib.contextmanager
    def _shared(self, folder: Folder, proof: str | None) -> Iterator[Place]:
        """Shards find the folder meanwhile; proof: they write into it."""
        assert isinstance(folder, Path)
        path = folder / files.PROOF
        if proof is not None:
            text = proof.encode()
            files.write_file(path, lambda file: file.write(text))
        yield Place(*_names(folder), proof or "")
        if proof is not None:
            path.unlink()

    @contextlib.contextmanager
    def _opened(self, folder: Folder) -> Iterator[None]:
        """The shards' first use of a folder: where it fails, with the
        remedy."""
        try:
            yield
        except (InvalidArgument, StorageError) as error:
            root, name = _names(folder)
            raise StorageError(
                f"a server cannot use {folder}, which must be {root}/{name} "
                f"in the folder of its `checkpoints`: {error}. Start all "
                f"servers with `checkpoints={_two_above(folder)}`, on storage "
                "that they share with this process"
            ) from error


def _two_above(folder: Folder) -> Folder:
    if isinstance(folder, Url):
        return folder.at(str(PurePosixPath(folder.path).parent.parent))
    return folder.absolute().parent.parent


class FarRows(ShardRows):
    """The rows of servers that have the storage of a root, and send their
    files there themselves."""

    is_far = True

    def __init__(
        self,
        root: files.Root,
        peers: Sequence[Peer],
        namespace: str,
        timeout: float,
    ) -> None:
        super().__init__(peers, namespace, timeout)
        self._root: Any = root  # a RemoteRoot: pyarrow takes time to import

    @contextlib.contextmanager
    def _shared(self, folder: Folder, proof: str | None) -> Iterator[Place]:
        with contextlib.ExitStack() as stack:
            names = _names(folder)
            if proof is not None:
                stack.enter_context(self._root.proving(names[1], proof))
            yield Place(*names, proof or "")

    def _sizes(self, folder: Folder, id: str) -> Callable[[str], int | None]:
        found: dict[str, int] = self._root.sizes(_names(folder)[1])
        return lambda name: found.get(f"{self._root.prefix(id)}{name}")


class EmbeddedRows(ShardRows):
    """The rows of a store whose only shard is in this process."""

    def write(
        self,
        folder: Folder,
        id: str,
        between: Callable[[], None],
        stop: threading.Event,
    ) -> tuple[list[dict[str, Any]], list[Part]]:
        every, (part,) = super().write(folder, id, between, stop)
        # Its stream of updates ends with this process.
        return every, [dataclasses.replace(part, ledgers=[])]

    @contextlib.contextmanager
    def _shared(self, folder: Folder, proof: str | None) -> Iterator[Place]:
        assert isinstance(folder, Path)
        # Names are for texts, and have less room than a path.
        root, name = (
            os.fsencode(path)[-_TEXT:].decode(errors="ignore")
            for path in (folder.parent, folder.name)
        )
        with files.opened(folder) as descriptor:
            yield Place(root, name, str(descriptor))

    @contextlib.contextmanager
    def _opened(self, folder: Folder) -> Iterator[None]:
        yield


def kept(tables: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were not dropped."""
    return [t for t in tables if not t["name"].startswith(_core.DROPPED)]


def _parts(
    tables: Sequence[Sequence[dict[str, Any]]],
    answers: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[Part]]:
    """Tables numbered alike, whatever their numbers are at each shard."""
    every: dict[str, dict[str, Any]] = {}
    for there, answer in zip(tables, answers):
        for table in kept(there[: len(answer["pushes"])]):
            known = every.setdefault(table["name"], table)
            for option, value in table.items():
                if known[option] != value:
                    raise SchemaMismatch(
                        f"table {table['name']!r}: {option} is {value!r} at "
                        f"one shard and {known[option]!r} at another"
                    )
    number = {name: no for no, name in enumerate(every)}
    parts = []
    for there, answer in zip(tables, answers):
        names = [table["name"] for table in there]
        pushes = [0] * len(every)
        for name, clock in zip(names, answer["pushes"]):
            if name in number:
                pushes[number[name]] = clock
        parts.append(
            Part(
                answer["updates"],
                answer["step"],
                answer["t"],
                pushes,
                answer["ledgers"],
                [
                    Rows(number[names[no]], *file)
                    for no, *file in answer["files"]
                ],
                answer["restore"],
            )
        )
    return list(every.values()), parts


def _check_file(
    peer: Peer, folder: Folder, file: Rows, size: int | None
) -> None:
    """What a shard has written is here, too."""
    if size is None:
        raise StorageError(
            f"{file.name}, which server {peer.address} wrote, cannot be seen "
            f"in {folder}"
        )
    if size != file.bytes:
        raise StorageError(
            f"{file.name} has {size} bytes in {folder}, server "
            f"{peer.address} wrote {file.bytes}"
        )


class Staged:
    """Rows of a checkpoint that are not in use yet."""

    def __init__(
        self,
        peers: Sequence[Peer],
        before: Iterable[int],
        tables: Sequence[Sequence[dict[str, Any]]],
        place: Place,
        manifest: Manifest,
        chosen: Collection[str],
        timeout: float,
    ) -> None:
        self._peers = peers
        self._timeout = timeout
        self._place = place
        # Requests of those who know the rows that were are refused.
        self._lineage = secrets.randbits(64) or 1
        self._id = next_restore(before)
        self._requests = [
            self._request(
                shard, [table["name"] for table in there], manifest, chosen
            )
            for shard, there in enumerate(tables)
        ]

    def _request(
        self,
        shard: int,
        there: Sequence[str],
        manifest: Manifest,
        chosen: Collection[str],
    ) -> tuple[Any, ...]:
        part = part_of(manifest, shard, len(self._peers))
        number = {name: no for no, name in enumerate(there)}
        names = [table.name for table in manifest.tables]
        pushes = [_STAYS] * len(there)
        for name, clock in zip(names, part.pushes):
            if name in chosen:
                if name not in number:
                    raise SchemaMismatch(
                        f"server {self._peers[shard].address} has no table "
                        f"{name!r}; it has {sorted(there)}"
                    )
                pushes[number[name]] = clock
        return (
            part.updates,
            part.sync_step,
            part.t,
            pushes,
            part.ledgers,
            [
                (number[names[no]], *file)
                for no, *file in part.files
                if names[no] in chosen
            ],
        )

    def _ask(self, verb: int, shard: int) -> dict[str, Any]:
        return self._peers[shard].restore(
            verb,
            *self._place,
            self._lineage,
            self._id,
            *self._requests[shard],
        )

    def prepare(self, stop: threading.Event) -> None:
        """Each shard reads and checks its rows beside those it has."""
        prepare = partial(self._ask, _core.RESTORE_PREPARE)
        poll(len(self._peers), prepare, self._timeout, stop)

    def commit(self) -> None:
        """They take the place of the rows that were there, with clocks and
        counters: all, or none and an error.

        Raises:
            Unavailable: some shards have them, others could not be reached;
                or none has, as the first was started again.
        """
        begun = done = 0
        try:
            # Those without memory for both read now: side by side.
            for shard in range(len(self._peers)):
                self._commit(shard)
                begun += 1
            for shard in range(len(self._peers)):
                while not self._commit(shard):
                    time.sleep(_PAUSE)
                done += 1
        except PersiaError as error:
            if begun:
                error.add_note(
                    "the rows that were there made room for those of the "
                    "checkpoint: load one before anything else"
                )
            if not begun and isinstance(error, InvalidArgument):
                raise Unavailable(
                    f"the load of {self._place.root}/{self._place.folder} "
                    "changed nothing, a server was started again in the "
                    f"middle of it: load it again ({error})"
                ) from error
            if not begun or len(self._peers) == 1:
                raise
            failed = begun if begun < len(self._peers) else done
            raise Unavailable(
                f"{begun} of {len(self._peers)} shards were given the rows of "
                f"{self._place.root}/{self._place.folder}, then "
                f"{self._peers[failed].address} failed: load it again "
                f"({error})"
            ) from error

    def _commit(self, shard: int) -> bool:
        """Whether it is through."""
        ask = partial(self._ask, _core.RESTORE_COMMIT, shard)
        return bool(patiently(ask, self._timeout)["done"])

    def abort(self) -> None:
        """They are forgotten; it does not fail."""
        _end(len(self._peers), partial(self._ask, _core.RESTORE_ABORT))
