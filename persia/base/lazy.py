"""Packages whose names are imported when first asked for.

A parameter server and ``persia --help`` are Python processes that need no
torch, whose import takes seconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazily(
    package: str, names: Mapping[str, str], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        names: each name that it exports to the module below it that has it.
        modules: those below it that are attributes as well.
    """
    below = frozenset(modules)

    def get(name: str) -> Any:
        if name in below:
            return importlib.import_module(f"{package}.{name}")
        if name not in names:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}"
            )
        module = importlib.import_module(f"{package}.{names[name]}")
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names, *below})

    return get, listed
