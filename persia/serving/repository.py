"""The models that a process serves, and their versions."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from persia.base.logs import say
from persia.base.urls import Url
from persia.errors import (
    InvalidArgument,
    NotFound,
    PersiaError,
    StorageError,
    Unavailable,
)
from persia.serving.folder import (
    Versions,
    find_version,
    versions_of,
)
from persia.serving.form import DATATYPES
from persia.serving.model import ExportedModel


def named_paths(texts: tuple[str, ...]) -> dict[str, str]:
    """Models by name, of ``NAME=PATH`` or ``PATH``, whose last part is its
    name.

    Raises:
        InvalidArgument: there is none, or a name twice, or an odd one.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, is_named, path = text.partition("=")
        if not is_named or "/" in name:
            url = Url(text)
            place = url.path if url.scheme else os.path.abspath(text)
            name, path = Path(place).name, text
        if not name or "/" in name or not name.isprintable():
            raise InvalidArgument(f"{text!r}: a model has a name without /")
        if name in found:
            raise InvalidArgument(
                f"two models have the name {name!r}: give NAME=PATH"
            )
        found[name] = path
    if not found:
        raise InvalidArgument("no model is given")
    return found


class Model:
    """A model by its name: the version that answers, and others that were
    asked for.

    Args:
        name: in requests.
        path: the root of its versions, or the folder of one.
        mapped: versions that stay mapped at once.
        cache: where those of a bucket are kept; None: that of the user.
        ends: once it is set nothing is fetched any more.
    """

    def __init__(
        self,
        name: str,
        path: str,
        mapped: int,
        cache: Path | None = None,
        ends: threading.Event | None = None,
    ) -> None:
        self.name = name
        self._path = path
        self._root: Versions | None = versions_of(path)
        if self._root.is_version:
            self._root = None
        self._mapped = mapped
        self._cache = cache
        self._ends = ends
        self._lock = threading.Lock()
        self._versions: dict[str, ExportedModel] = {}
        self._current: ExportedModel | None = None
        self._pinned = False
        self._why = "it was not loaded yet"

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
        found = find_version(self._path, name)
        folder = found.root.folder(
            found, self._cache, self._mapped, self._ends
        )
        model = ExportedModel(found, folder, self._cache)
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

    def load(self, name: str | None = None, pin: bool = False) -> str:
        """Makes a version the one that answers; its name.

        Args:
            name: of the version; None: the current one of the root.
            pin: it stays until another is loaded, whatever the root says.

        Raises:
            NotFound, StorageError, CorruptFile, SchemaMismatch: it cannot be
                loaded; the one that answered still does.
        """
        with self._lock:
            if name is None and self._root is not None:
                name = self._root.current()
            found = self._versions.get(name or "") or self._map(name)
            self._current, self._pinned = found, pin
            return found.version

    def unload(self) -> None:
        """It answers no more."""
        with self._lock:
            self._current, self._versions = None, {}
            self._pinned = True
            self._why = "it was unloaded"

    def follow(self) -> str | None:
        """Loads the version that is current in the root, if it is another
        one; its name."""
        if self._root is None or self._pinned or self._current is None:
            return None
        name = self._root.current()
        if name == self._current.version:
            return None
        return self.load(name)


def _warm_up(model: ExportedModel) -> None:
    """Calls it once, so that the first request takes no longer."""
    tensors = []
    for one in model.form.inputs:
        shape = [2 if size == -1 else size for size in one.shape]
        tensors.append(torch.ones(shape).to(DATATYPES[one.datatype]))
    try:
        model.form.check(tensors)
        model.run(tensors)
    except Exception as error:  # it may take no such values
        say(
            f"version {model.version} was not warmed up: "
            f"{type(error).__name__}: {error}",
            "warning",
        )


class Repository:
    """All models of a process.

    Args:
        paths: of the models, by name.
        mapped: versions of a model that stay mapped.
        poll: seconds between looks at which version is current; 0: never.
        cache: where versions of buckets are kept; None: that of the user.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        mapped: int,
        poll: float,
        cache: Path | None = None,
    ) -> None:
        self._ends = threading.Event()
        self.models = {
            name: Model(name, path, mapped, cache, self._ends)
            for name, path in paths.items()
        }
        for model in self.models.values():
            model.load()
        self._failed: dict[str, str] = {}
        self._thread = threading.Thread(
            target=self._follow,
            args=(poll,),
            name="persia-versions",
            daemon=True,
        )
        if poll:
            self._thread.start()

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

    def _follow(self, poll: float) -> None:
        while not self._ends.wait(poll):
            for name, model in self.models.items():
                if self._ends.is_set():
                    return
                try:
                    version = model.follow()
                except PersiaError as error:
                    if self._ends.is_set():
                        return
                    text = str(error)
                    if self._failed.get(name) != text:  # once
                        self._failed[name] = text
                        say(
                            f"model {name}: the version before answers on: "
                            f"{text}",
                            "warning",
                        )
                    continue
                if version is not None:
                    self._failed.pop(name, None)
                    say(f"model {name}: version {version} answers")

    def end(self) -> None:
        """Follows no more, and fetches nothing; models still answer."""
        self._ends.set()

    def close(self) -> None:
        """Follows no more. A version that is being loaded is loaded first,
        once its files are there: the interpreter's end would abort a thread
        that is within torch."""
        self.end()
        if self._thread.is_alive():
            self._thread.join()
