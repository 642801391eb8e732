"""Which Persia this is: a release, or the commit of a source tree.

Nothing is started for it, and nothing is read until it is asked for.
"""

from __future__ import annotations

import re
from pathlib import Path

#: The release that this is, or that the source tree will become.
RELEASE = "0.2.0"

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_DIGITS = 9  # of a commit, in a version


def source_tree() -> Path | None:
    """The source tree that this Persia runs in; None if it is installed."""
    tree = Path(__file__).parents[2]
    here = (tree / "pyproject.toml").is_file() and (tree / "csrc").is_dir()
    return tree if here else None


def commit_of(tree: Path) -> str | None:
    """The commit that is checked out in a tree, in hexadecimal digits; None
    if Git does not say it in files that are known here."""
    try:
        return _commit_of(tree / ".git")
    except (OSError, UnicodeDecodeError):
        return None


def _commit_of(folder: Path) -> str | None:
    if folder.is_file():  # of a worktree or submodule: it says where
        text = folder.read_text(encoding="utf-8")
        folder = folder.parent / text.partition("gitdir:")[2].strip()
    head = (folder / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else None
    name = head.removeprefix("ref:").strip()
    common = folder / "commondir"
    if common.is_file():  # branches are those of all worktrees
        folder /= common.read_text(encoding="utf-8").strip()
    branch = folder / name
    if branch.is_file():
        found = branch.read_text(encoding="utf-8").strip()
        return found if _COMMIT.fullmatch(found) else None
    packed = (folder / "packed-refs").read_text(encoding="utf-8")
    for line in packed.splitlines():
        commit, _, of = line.partition(" ")
        if of == name and _COMMIT.fullmatch(commit):
            return commit
    return None


def version_of(tree: Path | None) -> str:
    """The version of a source tree, or (None) of what is installed.

    A release is ``0.2.0``, and so is the source archive of one. A checkout
    is ``0.2.0.dev0+g`` and the first digits of its commit.
    """
    if tree is None or not (tree / ".git").exists():
        return RELEASE
    commit = commit_of(tree)
    local = "" if commit is None else f"+g{commit[:_DIGITS]}"
    return f"{RELEASE}.dev0{local}"


__version__ = version_of(source_tree())
