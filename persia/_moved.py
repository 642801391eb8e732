"""Modules that were moved: ``import`` finds them by their old names, too."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "Finder"]

MOVED = {
    "addresses": "distributed.addresses",
    "arrow": "store.arrow",
    "certs": "distributed.certs",
    "cluster": "distributed.cluster",
    "configs": "store.configs",
    "conversion": "nn.conversion",
    "jagged": "data.jagged",
    "launch": "distributed.launch",
    "loader": "train.loader",
    "modules": "nn",
    "plan": "distributed.planning",
    "security": "distributed.security",
    "server": "distributed.server",
    "status": "distributed.status",
    "stream": "train.stream",
    "worker": "distributed.worker",
}


class Finder:
    """Gives the module of today for an old name, with a DeprecationWarning.

    It has the methods of importlib's MetaPathFinder and Loader; to name these
    would import importlib.abc, which takes longer than all of this.
    """

    def __init__(self, package: str) -> None:
        self._new = {
            f"{package}.{o}": f"{package}.{n}" for o, n in MOVED.items()
        }

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """For the names of MOVED alone."""
        if fullname not in self._new:
            return None
        loader: Any = self
        return ModuleSpec(fullname, loader)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself: both names are one object."""
        new = self._new[spec.name]
        warnings.warn(
            f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2
        )
        module = importlib.import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is imported; importlib has changed its spec, however."""
        module.__spec__ = self._spec
