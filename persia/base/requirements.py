"""What Persia needs of other packages: stated once, in ``pyproject.toml``.

An installed Persia finds it in its metadata, a source tree in the file.
Nothing but the standard library, as it is asked for where parts are missing.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from persia.base.version import source_tree

#: How to get another Persia. PyPI has another program of its name.
AGAIN = (
    "install Persia again, from the wheel or source tree that it is of (see "
    "docs/install.md); in a source tree: make build"
)
_EXTRA = re.compile(r""";\s*extra\s*==\s*['"]([\w-]+)['"]""")


def required(extra: str | None = None) -> list[str]:
    """What pip installs with Persia, or with one of its extras beside, such
    as ``torch>=2.10,<3``; empty if it is not known."""
    if (tree := source_tree()) is not None:
        project = tomllib.loads((tree / "pyproject.toml").read_text())[
            "project"
        ]
        optional = project["optional-dependencies"]
        found = optional[extra] if extra else project["dependencies"]
        return [str(one) for one in found]
    try:
        lines = metadata.requires("persia") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        mark = _EXTRA.search(line)
        if (mark[1] if mark else None) == extra:
            found.append(line.partition(";")[0].strip())
    return found


def install(names: Iterable[str] = (), extra: str | None = None) -> str:
    """The command that installs packages in versions that Persia works
    with: those named, or all of an extra."""
    known = {_name(one): one for one in required(extra)}
    chosen = [known.get(_name(name), name) for name in names]
    return "pip install " + " ".join(
        f"'{one}'" for one in chosen or known.values()
    )


def library(name: str, extra: str, what: str) -> Any:
    """A module of an extra, which only some use.

    Args:
        name: of the module.
        extra: that brings it.
        what: needs it, in the plural, for the error.

    Raises:
        InvalidArgument: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        from persia.errors import InvalidArgument

        raise InvalidArgument(
            f"{what} need {name}: {install(extra=extra)}"
        ) from None


def _name(requirement: str) -> str:
    """Of a distribution, as pip compares it."""
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()
