"""The models that a process serves, and their versions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persia.base.logs import say
from persia.errors import (
    CorruptFile,
    NotFound,
    PersiaError,
    StorageError,
    Unavailable,
)
from persia.serving.deltas.erased import read_erased
from persia.serving.folder import (
    Versions,
    check_file,
    find_version,
    versions_of,
)
from persia.serving.form import DATATYPES
from persia.serving.inputs import inputs_of, tensors_of
from persia.serving.model import ExportedModel

_PACKETS_S, _PACKETS_MAX_S = 0.02, 0.25  # between looks for packets


class Model:
    """A model by its name: the version that answers, and others that were
    asked for.

    Args:
        name: in requests.
        path: the root of its versions, or the folder of one.
        mapped: versions that stay mapped at once.
        cache: where those of a bucket are kept; None: that of the user.
        rows_limit: bytes that rows of packets may take, of each table.
        ends: once it is set nothing is fetched any more.

    Attributes:
        changed: is called when it answers from now on, or no more.
    """

    def __init__(
        self,
        name: str,
        path: str,
        mapped: int,
        cache: Path | None = None,
        rows_limit: int = 0,
        ends: threading.Event | None = None,
    ) -> None:
        self.name = name
        self._path = path
        self._root: Versions | None = versions_of(path)
        if self._root.is_version:
            self._root = None
        self._mapped = mapped
        self._cache = cache
        self._rows_limit = rows_limit
        self._ends = ends
        self._lock = threading.Lock()
        self._versions: dict[str, ExportedModel] = {}
        self._current: ExportedModel | None = None
        self._pinned = False
        self._held = False  # no packets are applied
        self._doubtful = ""  # put into use by hand, or not the newest by now
        self._read: set[str] = set()  # versions whose bytes were compared
        self._damaged: set[str] = set()
        self._why = "it was not loaded yet"
        self.changed: Callable[[], object] = _nothing

    @property
    def current(self) -> ExportedModel:
        """The version that answers.

        Raises:
            Unavailable: there is none.
        """
        found = self._current
        if found is None:
            raise Unavailable(f"model {self.name!r} is not ready: {self._why}")
        return found

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self._current is not None

    def names(self) -> list[str]:
        """The versions that are there, from the oldest to the newest; while
        a bucket gives no answer those that are mapped."""
        try:
            if self._root is not None:
                return self._root.names()
            return [find_version(self._path).manifest.name]
        except StorageError:
            return sorted(self._versions)

    def version(self, name: str | None) -> ExportedModel:
        """A version, which is mapped if it is not yet.

        Raises:
            NotFound: it is not there.
            StorageError: it cannot be read.
            CorruptFile: it is damaged.
            Unavailable: None is asked for, and none is loaded.
        """
        if name is None:
            return self.current
        found = self._versions.get(name)
        if found is None:
            with self._lock:
                found = self._versions.get(name) or self._map(name)
        return found

    def _map(self, name: str | None) -> ExportedModel:
        if name and name not in self.names():
            raise NotFound(f"model {self.name!r} has no version {name!r}")
        if name in self._damaged:
            raise CorruptFile(f"version {name} of {self.name!r} is damaged")
        found = find_version(self._path, name)
        folder = found.root.folder(
            found, self._cache, self._mapped, self._ends
        )
        model = ExportedModel(found, folder, self._cache)
        model.limit_rows(self._rows_limit)
        _warm_up(model)
        versions = dict(self._versions)
        versions.pop(model.version, None)
        versions[model.version] = model
        for old in list(versions):
            if len(versions) <= self._mapped:
                break
            if versions[old] is not self._current and old != model.version:
                del versions[old]
        self._versions = versions
        return model

    def begin(self) -> None:
        """Loads the current version. If the first one is not written yet,
        the model is not ready, and :meth:`follow` loads it.

        Raises: as :meth:`load`.
        """
        if self._root is None or not self._root.is_to_come:
            self.load()
            return
        self._why = f"{self._root} has no version yet"
        say(f"model {self.name}: {self._why}; it waits for the first one")

    def load(self, name: str | None = None, pin: bool = False) -> str:
        """Makes a version the one that answers; its name.

        The newest one follows the packets. One that was put into use by hand,
        here or in the root, answers as it was exported: packets would make
        the newest one of it.

        Args:
            name: of the version; None: the current one of the root.
            pin: it stays until another is loaded, whatever the root says.

        Raises:
            NotFound, StorageError, CorruptFile, SchemaMismatch: it cannot be
                loaded; the one that answered still does.
        """
        with self._lock:
            held = pin
            if name is None and self._root is not None:
                name, held = self._chosen(self._root)
            return self._use(name, held, pin)

    def _use(self, name: str | None, held: bool, pin: bool = False) -> str:
        found = self._versions.get(name or "")
        if found is None or (held and found.packets):
            found = self._map(name)
        if not held and self._root is not None:
            self._catch_up_first(found)
        if self._current not in (None, found):
            self._forget(self._current)
        if held:
            found.stop_following()
        self._current, self._pinned, self._held = found, pin, held
        self.changed()
        return found.version

    def _chosen(self, root: Versions) -> tuple[str, bool]:
        """The current version of the root, and whether it was put into use by
        hand: a newer one is there."""
        names = root.names()  # first: what appears meanwhile is newer
        name = root.current()
        return name, name in names[:-1]

    def _forget(self, old: ExportedModel) -> None:
        """The one that answered until now: asked for by name it is mapped
        again, and answers as it was exported, in each process alike."""
        old.stop_following()
        if self._versions.get(old.version) is old and old.packets:
            others = {k: v for k, v in self._versions.items() if v is not old}
            self._versions = others

    def _catch_up_first(self, found: ExportedModel) -> None:
        """Before it answers. A version whose packets are damaged answers all
        the same, where none that is newer does."""
        try:
            found.catch_up()
        except PersiaError as error:
            now, new = self._current, found.follower
            here = None if now is None else now.follower
            if here is not None and new is not None:
                one, other = here.place, new.place
                if one.chain == other.chain and one.number > other.number:
                    raise
            say(
                f"model {self.name}: version {found.version} answers without "
                f"all of its packets: {error}",
                "warning",
            )

    @property
    def follows(self) -> bool:
        """Whether packets change the version that answers."""
        now = self._current
        return (
            self._root is not None
            and not self._held
            and now is not None
            and now.follower is not None
        )

    @property
    def lag(self) -> float | None:
        """Of the version that answers."""
        now = self._current
        return None if now is None else now.lag

    @property
    def packets(self) -> int:
        """Of the version that answers."""
        now = self._current
        return 0 if now is None else now.packets

    def catch_up(self) -> int:
        """Applies the packets that are there; how many.

        Raises: as :meth:`ExportedModel.catch_up`.
        """
        with self._lock:
            now = self._current
            if now is None or not self.follows:
                return 0
            return now.catch_up()

    def wait(self, seconds: float, ends: threading.Event) -> None:
        """Until the next packet is there, for so many seconds, or until a
        process ends. It may return sooner, and a little later."""
        now = self._current
        follower = None if now is None else now.follower
        if self._root is None or follower is None or not self.follows:
            ends.wait(seconds)
        else:
            self._root.wait(follower.place.next_name, seconds, ends)

    def check(self) -> None:
        """Removes what was erased from all versions, and looks for a gap in
        the packets.

        Raises:
            StaleLineage: there is one.
            CorruptFile, StorageError: the root cannot be read.
        """
        if self._root is None:
            return
        erased = read_erased(self._root)
        with self._lock:
            for version in self._versions.values():
                if self.follows and version is self._current:
                    version.pass_erased(erased)
                else:
                    version.apply_erased(erased)
            now = self._current
            if self.follows and now is not None and now.follower is not None:
                now.follower.check_gap(self._root)

    def check_files(self) -> None:
        """Reads every byte of the version that answers, once, and compares the
        checksums. If it is damaged it answers no more, and the newest one
        before it does, as it was exported.

        Raises:
            CorruptFile: it is damaged.
            StorageError: it cannot be read.
        """
        now = self._current
        if now is None or now.version in self._read:
            return
        self._read.add(now.version)
        try:
            for entry in now.manifest.files:
                check_file(now.folder, entry)
        except CorruptFile:
            with self._lock:
                self._leave(now)
            if self._root is not None:
                self._root.discard(now.folder)
            raise
        except OSError as error:
            if now.folder.exists():
                raise StorageError(f"{now.folder}: {error}") from None
            # It was removed, as there are newer ones.

    def _leave(self, now: ExportedModel) -> None:
        """Has the version before a damaged one answer; if there is none, it
        still does."""
        self._damaged.add(now.version)
        names = self.names()
        before = names[: names.index(now.version)]
        for name in reversed(before):
            if self._current is not now:
                return
            with contextlib.suppress(PersiaError):
                found = self._versions.get(name) or self._map(name)
                now.stop_following()
                found.stop_following()
                self._current, self._held = found, True
                self._versions.pop(now.version, None)

    def unload(self) -> None:
        """It answers no more."""
        with self._lock:
            self._current, self._versions = None, {}
            self._pinned = self._held = True
            self._why = "it was unloaded"
            self.changed()

    def follow(self) -> str | None:
        """Loads the version that is current in the root, if it is another
        one; its name."""
        root, now = self._root, self._current
        if root is None or self._pinned:
            return None
        if now is None:
            return None if root.is_to_come else self.load()
        if root.current() == now.version:
            return None
        name, held = self._chosen(root)
        if name == now.version or name in self._damaged:
            return None
        is_newer = int(name[2:]) > int(now.version[2:])
        if held and is_newer and name != self._doubtful:
            # A training puts the newest one into its place just now. Without
            # its packets this one would be older than what answers.
            self._doubtful = name
            return None
        with self._lock:
            return self._use(name, held)


def _nothing() -> None:
    pass


def _warm_up(model: ExportedModel) -> None:
    """Calls it once, so that the first request takes no longer."""
    try:
        model.run(_made_up(model))
    except Exception as error:  # it may take no such values
        say(
            f"version {model.version} was not warmed up: "
            f"{type(error).__name__}: {error}",
            "warning",
        )
    if not model.joins:
        say(
            f"version {model.version}: scores depend on all samples of a "
            "request, so each request is computed alone"
        )


def _made_up(model: ExportedModel) -> list[Tensor]:
    """Inputs of its graph, as from a request of two samples."""
    inputs: dict[str, Any] = {}
    for one in inputs_of(model.schema, model.form):
        if one.datatype == "BYTES":
            inputs[one.name] = np.full(2, b"1", object)
            continue
        shape = [2 if size == -1 else size for size in one.shape]
        inputs[one.name] = torch.ones(shape).to(DATATYPES[one.datatype])
    if model.schema is None:
        tensors = [inputs[one.name] for one in model.form.inputs]
        model.form.check(tensors)
        return tensors
    columns = {name: np.asarray(x) for name, x in inputs.items()}
    return tensors_of(model, columns, 2)


class Repository:
    """All models of a process.

    Args:
        paths: of the models, by name.
        mapped: versions of a model that stay mapped.
        poll: seconds between looks at which version is current; 0: never.
            Then the first version has to be there.
        cache: where versions of buckets are kept; None: that of the user.
        rows_limit: bytes that rows of packets may take, of each table.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        mapped: int,
        poll: float,
        cache: Path | None = None,
        rows_limit: int = 0,
    ) -> None:
        self._ends = threading.Event()
        self.models = {
            name: Model(name, path, mapped, cache, rows_limit, self._ends)
            for name, path in paths.items()
        }
        for model in self.models.values():
            if poll:
                model.begin()
            else:
                model.load()
        self._failed: dict[str, str] = {}
        self._threads = [
            threading.Thread(
                target=self._follow,
                args=(name, poll),
                name="persia-versions",
                daemon=True,
            )
            for name in paths
        ]
        if poll:
            for thread in self._threads:
                thread.start()
            threading.Thread(
                target=self._compare,
                args=(poll,),
                name="persia-checksums",
                daemon=True,
            ).start()

    def model(self, name: str) -> Model:
        """A model by its name.

        Raises:
            NotFound: there is none.
        """
        if name not in self.models:
            raise NotFound(
                f"there is no model {name!r}; there are "
                f"{', '.join(self.models)}"
            )
        return self.models[name]

    def find(self, name: str, version: str) -> ExportedModel:
        """A version of a model; "": the one that answers.

        Raises: as :meth:`model` and :meth:`Model.version`.
        """
        return self.model(name).version(version or None)

    @property
    def is_ready(self) -> bool:
        """Whether all models answer."""
        return all(model.is_ready for model in self.models.values())

    def _follow(self, name: str, poll: float) -> None:
        """New versions of a model every ``poll`` seconds; packets as they
        appear."""
        model, due, wait = self.models[name], time.monotonic() + poll, 0.0
        while True:
            follows = model.follows and name not in self._failed
            left = max(due - time.monotonic(), 0.0)
            model.wait(min(wait, left) if follows else left, self._ends)
            if self._ends.is_set():
                return
            applied = follows and self._done(name, model.catch_up)
            # Soon after a packet; a bucket is asked four times a second then.
            wait = wait * 1.2 if not applied else _PACKETS_S
            wait = min(max(wait, _PACKETS_S), _PACKETS_MAX_S)
            if time.monotonic() >= due:
                due = time.monotonic() + poll
                if self._look(name, model):
                    self._failed.pop(name, None)

    def _compare(self, poll: float) -> None:
        """Reads the files of versions that answer, beside all else."""
        while not self._ends.wait(poll):
            for name, model in self.models.items():
                self._done(name, model.check_files)

    def _look(self, name: str, model: Model) -> bool:
        """Looks for a new version; whether nothing failed."""
        version = self._done(name, model.follow)
        if version is False:
            return False
        if version is not None:
            say(f"model {name}: version {version} answers")
        failed = self._failed.get(name)
        if self._done(name, model.check) is False:
            return False
        return failed is None or self._done(name, model.catch_up) is not False

    def _done(self, name: str, call: Callable[[], Any]) -> Any:
        """What it gives; False after an error, which is said once."""
        try:
            return call()
        except PersiaError as error:
            text = str(error)
            if self._failed.get(name) != text and not self._ends.is_set():
                self._failed[name] = text
                state = "the version before answers on"
                if not self.models[name].is_ready:
                    state = "it does not answer"
                say(f"model {name}: {state}: {text}", "warning")
            return False

    def end(self) -> None:
        """Follows no more, and fetches nothing; models still answer."""
        self._ends.set()

    def close(self) -> None:
        """Follows no more. A version that is being loaded is loaded first,
        once its files are there: the interpreter's end would abort a thread
        that is within torch."""
        self.end()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
