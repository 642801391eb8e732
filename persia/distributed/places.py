"""What a server with logs keeps on its disk about shards that have moved.

Without a move there is nothing: a server has the shards of its command line,
each with a log in ``<namespace>-3-of-8``. From the first move on the file
``<namespace>-of-8-at-0.moves`` says which it has, and which have left; 0 is
the first shard of its command line, and a server that joined is ``join``. The
log of a shard that has arrived is in ``<namespace>-3-of-8-at-0-<move>``. Of
one that has left ``.<namespace>-3-of-8.left`` stays: without both a server
that begins would take it for one of its own.

The file is replaced as a whole, so each change happens or does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pydantic

from persia.checkpoint.files import replace_file, sync_folder
from persia.errors import (
    CorruptFile,
    SchemaMismatch,
    StorageError,
    Unavailable,
)

_ARRIVED = 256  # moves by which shards have arrived that are remembered


class Gone(pydantic.BaseModel):
    """A shard that has left.

    Attributes:
        address: of the server that it went to.
        move: by which, or a later one that was heard of.
        folder: of its log, as long as that server may not have it; or "".
    """

    address: str
    move: int
    folder: str = ""


class Prepared(pydantic.BaseModel):
    """A shard that can arrive.

    Attributes:
        shard: which.
        folder: of its log.
        steps: what its log does not have, see ``Server.steps()``.
    """

    shard: int
    folder: str
    steps: list[int]


class _Moves(pydantic.BaseModel):
    """The file."""

    first: list[int]  # of the command line
    here: dict[int, str]  # the folder of each shard
    gone: dict[int, Gone] = {}
    prepared: dict[int, Prepared] = {}  # by move
    arrived: list[int] = []


class Places:
    """Which shards a server has, and where their logs are.

    Args:
        log: the folder of ``log``.
        namespace: of the server.
        numbers: the shards of its command line; none: it joins.
        shards: of the job.

    Raises:
        SchemaMismatch: shards have moved since servers had other shards.
        CorruptFile: the file, or the log of a shard that is here, is missing.
        Unavailable: another server has the file.
    """

    def __init__(
        self, log: Path, namespace: str, numbers: Iterable[int], shards: int
    ) -> None:
        first = list(numbers)
        self._log = log
        self._who = str(first[0]) if first else "join"
        self._namespace, self._shards = namespace, shards
        self._changing = threading.Lock()
        name = f"{namespace}-of-{shards}-at-{self._who}.moves"
        self._path = log / name
        try:
            log.mkdir(parents=True, exist_ok=True)
            self._lock = open(log / f".{name}.lock", "wb")  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"`log={log}`: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Unavailable(
                f"another server keeps its logs in {log}: give each server "
                "that joins a `log` of its own"
            ) from None
        try:
            self._begin(first)
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, first: list[int]) -> None:
        every = f"{glob.escape(self._namespace)}-of-{self._shards}-at-*.moves"
        for path in self._log.glob(every):
            other = _read(path) if path != self._path else None
            if other is not None and set(other.first) & set(first):
                raise SchemaMismatch(_moved_since(path, other.first))
        found = _read(self._path)
        if found is not None and found.first != first:
            raise SchemaMismatch(_moved_since(self._path, found.first))
        self._now = found or _Moves(
            first=first, here={n: self._plain(n) for n in first}
        )
        if found is None:
            self._check_none_moved()
        else:
            self._check_here()
        self._remove_rest()

    def _check_none_moved(self) -> None:
        """Folders of shards that arrive are younger than the file, and so are
        the marks of those that have left."""
        some = [self._mark(n) for n in self._now.first]
        for path in (*self._arrivals(), *filter(Path.exists, some)):
            raise CorruptFile(
                f"{self._path} is missing, which says whether the shard of "
                f"{path} is here. Bring it back from a copy, or start with a "
                "checkpoint and another folder of logs"
            )

    def _check_here(self) -> None:
        """All shards that are here have a log."""
        for shard, path in self.here().items():
            if not any(p.name != "lock" for p in path.glob("*")):
                raise CorruptFile(
                    f"{path} is missing or empty, and {self._path} says that "
                    f"it has the log of shard {shard}. Bring it back from a "
                    "copy, or start with a checkpoint and another folder "
                    "of logs"
                )

    def _mark(self, shard: int) -> Path:
        return self._log / f".{self._plain(shard)}.left"

    def _plain(self, shard: int) -> str:
        return f"{self._namespace}-{shard}-of-{self._shards}"

    def _remove_rest(self) -> None:
        """Of shards that have left, or did not arrive."""
        kept = set(self._now.here.values())
        kept |= {one.folder for one in self._now.prepared.values()}
        kept |= {gone.folder for gone in self._now.gone.values()}
        for path in self._arrivals():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _arrivals(self) -> list[Path]:
        """The folders of shards that have arrived, or were to."""
        namespace = glob.escape(self._namespace)
        some = f"{namespace}-*-of-{self._shards}-at-{self._who}-*"
        return list(self._log.glob(some))

    def close(self) -> None:
        """Another server may have the file."""
        self._lock.close()

    def _write(self, new: _Moves) -> None:
        replace_file(self._path, new.model_dump_json().encode())
        self._now = new

    @contextlib.contextmanager
    def _change(self) -> Iterator[_Moves]:
        """What is in the file when the context ends."""
        with self._changing:
            new = self._now.model_copy(deep=True)
            yield new
            self._write(new)

    # ---- what there is

    def here(self) -> dict[int, Path]:
        """The shards that it has, and the folders of their logs."""
        some = sorted(self._now.here.items())
        return {shard: self._log / folder for shard, folder in some}

    def gone(self) -> dict[int, Gone]:
        """Those that have left."""
        return dict(self._now.gone)

    def folder(self, of: Gone | Prepared) -> Path:
        """Of the log of a shard."""
        return self._log / of.folder

    def prepared(self) -> dict[int, Prepared]:
        """Shards that can arrive, by the number of the move."""
        return dict(self._now.prepared)

    def has_arrived(self, move: int) -> bool:
        """Whether a shard has arrived by this move."""
        return move in self._now.arrived

    # ---- a shard leaves

    def leave(self, shard: int, move: int, address: str) -> None:
        """It is the other server's from now on, until it is :meth:`back`."""
        with self._change() as new:
            folder = new.here.pop(shard)
            new.gone[shard] = Gone(address=address, move=move, folder=folder)
        with contextlib.suppress(OSError):  # the file says it
            self._mark(shard).touch()

    def back(self, shard: int) -> None:
        """The other server does not have it, and never will."""
        with self._change() as new:
            new.here[shard] = new.gone.pop(shard).folder

    def left(self, shard: int) -> None:
        """The other server has it: its log goes."""
        with self._change() as new:
            gone = new.gone[shard]
            folder, gone.folder = gone.folder, ""
        shutil.rmtree(self._log / folder, ignore_errors=True)

    def place(self, shard: int, move: int, address: str) -> None:
        """One that is not here is at this address since a move."""
        gone = self._now.gone.get(shard) or Gone(address="", move=0)
        if shard in self._now.here or gone.folder or gone.move >= move:
            return
        with self._change() as new:
            new.gone[shard] = Gone(address=address, move=move)

    # ---- a shard arrives

    def arriving(self, shard: int, move: int) -> Path:
        """An empty folder for its log; the file is there before it."""
        if not self._path.exists():
            with self._change():
                pass
        folder = self._folder(shard, move)
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _folder(self, shard: int, move: int) -> Path:
        name = f"{self._plain(shard)}-at-{self._who}-{move:016x}"
        return self._log / name

    def prepare(self, shard: int, move: int, steps: list[int]) -> None:
        """Its log has all rows."""
        sync_folder(self._log)
        folder = self._folder(shard, move).name
        with self._change() as new:
            new.prepared[move] = Prepared(
                shard=shard, folder=folder, steps=steps
            )

    def drop(self, shard: int, move: int) -> None:
        """It will not arrive. Without its folder it is not prepared, also
        where the disk takes no file."""
        shutil.rmtree(self._folder(shard, move), ignore_errors=True)
        if move in self._now.prepared:
            with self._change() as new:
                del new.prepared[move]

    def arrive(self, move: int) -> None:
        """It is here."""
        with self._change() as new:
            one = new.prepared.pop(move)
            new.here[one.shard] = one.folder
            new.gone.pop(one.shard, None)
            new.arrived = [*new.arrived[-_ARRIVED:], move]


def joined(log: Path, namespace: str) -> int | None:
    """The shards of the job that a server has joined before, whose logs are
    in this folder."""
    some = log.glob(f"{glob.escape(namespace)}-of-*-at-join.moves")
    found = [re.fullmatch(r".*-of-(\d+)-at-join\.moves", p.name) for p in some]
    return next((int(match[1]) for match in found if match), None)


def _read(path: Path) -> _Moves | None:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        found = _Moves.model_validate(document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from None
    found.prepared = {
        move: one
        for move, one in found.prepared.items()
        if os.path.isdir(path.parent / one.folder)
    }
    return found


def _moved_since(path: Path, first: list[int]) -> str:
    which = ", ".join(map(str, first))
    return (
        f"{path}: shards have moved since this server began with shards "
        f"{which}: start it with those. To change them save a checkpoint, and "
        "start with `restore` and another `log`"
    )
