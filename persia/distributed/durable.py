"""The log of a server: it survives a crash without losing an update.

The C core appends each change to the log before it is applied, and removes
files that are not needed any more (``csrc/log``). What is left here is the
beginning, from the rows of the last cut and the records behind it, and the
cuts themselves: whenever the log is long, the rows of this shard are written
beside it, while training runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from persia import _core
from persia.base.logs import say
from persia.checkpoint import files
from persia.checkpoint.snapshot import SNAPSHOT, Snapshot, save_rows
from persia.errors import (
    CorruptFile,
    PersiaError,
    SchemaMismatch,
    StorageError,
    Unavailable,
)

if TYPE_CHECKING:
    from persia.distributed.server import ServeConfig

#: The root of cuts, as the core knows it: no user's checkpoint has this name.
ROOT = "@log"
#: Levels of ``--durable`` that keep a log.
LEVELS = {"process": _core.LOG_PROCESS, "disk": _core.LOG_DISK}

_NOTE = "checkpoints"
_SEGMENT = 256 << 20  # bytes of a file, at most
_LIMIT = 1 << 30  # bytes of a log, where no limit is given
_POLL = 0.5  # seconds between looks at the log
_LOOKS = 10  # at a log that a server changes meanwhile
_PATIENCE = (1.0, 60.0)  # seconds after a cut that failed: first and longest


def _check_shards(log: Path, namespace: str, shards: int) -> None:
    """Refuses a folder with the log of one of another number of servers: what
    it has would be missing, and not be missed.

    Raises:
        SchemaMismatch: it has one; the text says what to do.
    """
    name = re.compile(re.escape(namespace) + r"-\d+-of-(\d+)(-at-.*)?")
    for folder in log.glob(f"{glob.escape(namespace)}-*"):
        found = name.fullmatch(folder.name)
        if found and int(found[1]) != shards and any(folder.glob("log-*")):
            raise SchemaMismatch(
                f"{folder} is the log of one of {found[1]} servers, and this "
                f"is one of {shards}. To change their number start "
                f"{found[1]}, save a checkpoint, and start {shards} with "
                "`restore` and another `log`; or remove that log"
            )


def _check_segments(path: Path, position: int) -> None:
    """Raises CorruptFile where the log does not continue the rows at this
    position, which lie beside it."""
    first = min(path.glob("log-*"), default=None)
    if first is None and position:
        raise CorruptFile(
            f"the log is missing, which the rows at position {position} were "
            "written beside"
        )
    if first is not None and int(first.name.removeprefix("log-")) > position:
        raise CorruptFile(
            f"the log begins with {first.name}; what lies between it and the "
            f"rows at position {position} is missing"
        )


class Log:
    """The log of one server.

    Args:
        config: with ``durable`` other than "off", and ``log``.
        shard: which, of
        shards: how many.
        path: its folder, of a shard that has moved here.
    """

    def __init__(
        self,
        config: ServeConfig,
        shard: int,
        shards: int,
        path: Path | None = None,
    ) -> None:
        assert config.log is not None
        log = Path(config.log)
        name = f"{config.namespace}-{shard}-of-{shards}"
        self.path = log / name if path is None else path
        _check_shards(log, config.namespace, shards)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"`log={config.log}`: {error.strerror}"
            ) from None
        self._limit = config.log_limit
        self._level = LEVELS[config.durable]
        self._root = files.LocalRoot(self.path)
        self._stop = threading.Event()
        self._cutting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._dropped = config.log_from == "cut" and not self._is_whole(config)
        if self._dropped:
            self._drop()

    def arguments(self) -> tuple[str, int, int, int]:
        """What the core is given."""
        limit = self._limit or _LIMIT
        segment = max(1 << 16, min(_SEGMENT, limit // 4))
        return str(self.path), self._level, segment, limit

    # ---- the beginning

    def recover(
        self,
        core: _core.Server,
        read: Callable[[str, str, Snapshot], int],
    ) -> dict[str, int]:
        """Reads the rows of the last cut, then applies the log behind it.

        Args:
            core: the server, which has neither.
            read: reads the rows of a snapshot in a root and folder.

        Returns:
            "records" that were applied, "torn" bytes at the end of the log
            that a crash left unfinished, and positions.

        Raises:
            CorruptFile: a file is damaged; the text names it and the place.
        """
        position = self._read_cut(read)
        try:
            if not self._dropped:
                _check_segments(self.path, position)
            found = core.replay(position)
        except (CorruptFile, StorageError) as error:
            raise type(error)(
                f"{self.path}: {error}. Bring back what is missing or damaged "
                "from a copy; or `log_from=cut` leaves out what follows the "
                "rows that were written last"
            ) from None
        if found["torn"]:
            say(
                f"the log {self.path} ended within a record that was never "
                f"acknowledged: {found['torn']:,} bytes are cut off",
                "warning",
            )
        return found

    def _read_cut(self, read: Callable[[str, str, Snapshot], int]) -> int:
        """Reads the rows of the last cut, if there is one; its position."""
        try:
            cut = Snapshot.of_root(self._root)
            if cut is None:
                return 0
            folder, snapshot = cut
            read(ROOT, folder, snapshot)
        except (CorruptFile, StorageError) as error:
            raise type(error)(
                f"the rows beside the log {self.path} cannot be read: {error}."
                " Bring the file back from a copy; or begin with a checkpoint"
                " (`restore`) and another `log`"
            ) from None
        return snapshot.log

    def _is_whole(self, config: ServeConfig) -> bool:
        """Whether the log behind the cut can be applied: it is there and not
        damaged, and the checkpoints are there that it restores."""
        cut = Snapshot.of_root(self._root)
        position = 0 if cut is None else cut[1].log
        restored: list[str] = []
        try:
            _check_segments(self.path, position)
            if not any(self.path.glob("log-*")):
                return True
            _core.log_read(
                str(self.path),
                position,
                lambda *record: restored.append(record[-1]),
            )
        except CorruptFile:
            return False
        return all(config.has(name) for name in filter(None, restored))

    def _drop(self) -> None:
        """Puts the records aside, which are not to be applied."""
        aside = self.path / f"dropped-{int(time.time())}"
        segments = list(self.path.glob("log-*"))
        with open(self.path / "lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Unavailable(
                    f"another server has the log {self.path} open"
                ) from None
            aside.mkdir(exist_ok=True)
            for segment in segments:
                segment.rename(aside / segment.name)
        rows = Snapshot.of_root(self._root) is not None
        say(
            f"`log_from=cut`: {len(segments)} files of the log are in "
            f"{aside}; "
            + (
                "the server begins with the rows of the last cut, and what "
                "was acknowledged after it is lost"
                if rows
                else "no rows lie beside the log, so the server begins "
                "without it, and what was acknowledged is lost"
            ),
            "warning",
        )

    # ---- where its restores read

    def noted(self) -> str:
        """The folder of checkpoints that was noted last, or ""."""
        try:
            return (self.path / _NOTE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{self.path / _NOTE} cannot be read: {error}"
            ) from None

    def note(self, folder: str) -> None:
        """Notes the folder that restores of the log name checkpoints in."""
        new = self.path / f".{_NOTE}"
        try:
            new.unlink(missing_ok=True)
            files.write_file(new, lambda file: file.write(folder.encode()))
            new.replace(self.path / _NOTE)
            files.sync_folder(self.path)
        except OSError as error:
            raise StorageError(
                f"{self.path / _NOTE} cannot be written: {error}"
            ) from None

    # ---- cuts

    @contextlib.contextmanager
    def cutting(
        self,
        core: _core.Server,
        write: Callable[[str, str, str], Snapshot],
    ) -> Iterator[None]:
        """Cuts, whenever the log wants one, until the end of the context.

        Args:
            core: the server.
            write: writes the rows into a folder of a root, which has a proof.
        """

        def run() -> None:
            pause = _PATIENCE[0]
            while not self._stop.wait(_POLL):
                try:
                    if core.log_counts()["wants_cut"]:
                        self.cut(core, write)
                    pause = _PATIENCE[0]
                except (PersiaError, OSError) as error:
                    if self._stop.is_set():
                        return  # the server stops, and its snapshots end
                    say(
                        f"the rows could not be written beside the log: "
                        f"{error}; next attempt in {pause:.0f} s",
                        "warning",
                    )
                    self._stop.wait(pause)
                    pause = min(2 * pause, _PATIENCE[1])

        self._thread = threading.Thread(
            target=run, name="persia-cuts", daemon=True
        )
        self._thread.start()
        try:
            yield
        finally:
            self.end_cuts()
            self._thread.join()

    def end_cuts(self) -> None:
        """No other cut begins, and one that fails now is not reported."""
        self._stop.set()

    def cut(
        self,
        core: _core.Server,
        write: Callable[[str, str, str], Snapshot],
    ) -> None:
        """Writes the rows beside the log, and lets go of what lies before."""
        with self._cutting:
            saved = save_rows(self._root, partial(write, ROOT))
            core.log_release(saved.log)


# ---- looking at one ---------------------------------------------------------

Seen = TypeVar("Seen")


def _looked(path: Path, look: Callable[[], Seen]) -> Seen:
    """What `look` finds; it looks again where a server that runs removed
    meanwhile what its cut made needless, or wrote on: a record that was not
    whole yet has later ones behind it by then."""

    def state() -> tuple[int, list[tuple[str, int]]]:
        cut = Snapshot.of_root(files.LocalRoot(path))
        segments = []
        for segment in sorted(path.glob("log-*")):
            with contextlib.suppress(FileNotFoundError):
                segments.append((segment.name, segment.stat().st_mtime_ns))
        return -1 if cut is None else cut[1].log, segments

    for _ in range(_LOOKS):
        before = state()
        try:
            return look()
        except (PersiaError, OSError):
            if state() == before:
                raise
    return look()


def logs_in(path: Path) -> list[Path]:
    """The folders of logs in that of ``--log``, or the folder itself.

    Raises:
        StorageError: there is none.
    """
    if not path.is_dir():
        raise StorageError(f"{path} is no folder; give that of `log`")
    parts = ("log-*", f"{files.ROWS}/{SNAPSHOT}")

    def has_one(folder: Path) -> bool:
        return any(any(folder.glob(part)) for part in parts)

    if has_one(path):
        return [path]
    found = [folder for folder in sorted(path.iterdir()) if has_one(folder)]
    if not found:
        raise StorageError(f"{path} has no log of a server")
    return found


def described(path: Path) -> dict[str, Any]:
    """What the log in a folder has: "namespace", "shard", "shards"; "records"
    and their "bytes" by type; "times" of the first and the last, in seconds
    since 1970; positions "first" and "end"; "cut": that of the rows beside
    it, or None; "segments"; "torn": bytes at the end that are no record.

    Raises:
        CorruptFile: it is damaged.
        StorageError: it cannot be read.
    """
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    times: list[int] = []

    def note(
        kind: str,
        position: int,
        size: int,
        parts: int,
        seconds: int,
        file: str,
        offset: int,
        restored: str,
    ) -> None:
        counts[kind] = counts.get(kind, 0) + 1
        sizes[kind] = sizes.get(kind, 0) + size
        times[:] = [times[0] if times else seconds, seconds]

    def look() -> tuple[dict[str, Any], tuple[str, int, int], int | None]:
        counts.clear()
        sizes.clear()
        times.clear()
        cut = Snapshot.of_root(files.LocalRoot(path))
        position = None if cut is None else cut[1].log
        _check_segments(path, position or 0)
        found, owner = _core.log_read(str(path), (1 << 64) - 1, note)
        return found, owner, position

    found, owner, cut = _looked(path, look)
    return found | {
        "log": str(path),
        "namespace": owner[0],
        "shard": owner[1],
        "shards": owner[2],
        "records": counts,
        "bytes": sizes,
        "times": times,
        "cut": cut,
    }


def verified(path: Path) -> int:
    """Reads every byte of the rows beside a log; how many rows.

    Raises:
        CorruptFile: a file is not what was written, or the log does not begin
            with what follows these rows.
    """

    def look() -> int:
        cut = Snapshot.of_root(files.LocalRoot(path))
        position = 0 if cut is None else cut[1].log
        _check_segments(path, position)
        if cut is None:
            return 0
        folder, snapshot = path / cut[0], cut[1]
        with files.opened(folder) as descriptor:
            for file in snapshot.files:
                try:
                    size, crc = _core.ckpt_file_crc(descriptor, file.name)
                except StorageError as error:
                    raise CorruptFile(f"{folder}: {error}") from None
                if (f"{crc:08x}", size) != (file.crc32c, file.bytes):
                    raise CorruptFile(f"{folder / file.name} is damaged")
        return sum(file.rows for file in snapshot.files)

    return _looked(path, look)
