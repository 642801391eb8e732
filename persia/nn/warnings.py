"""Warnings of states and loads: one for a whole model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

from persia.base.warning import warn
from persia.store.setting import warn_of_kept
from persia.store.state import unsaved

if TYPE_CHECKING:
    from persia.nn.lookups import Collection


def _root(module: nn.Module, code: CodeType) -> nn.Module:
    """The model whose method of ``nn.Module`` this thread is within; the
    module itself where it is in none."""
    found, frame = module, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            found = frame.f_locals["self"]
    return found


def warn_of_unsaved(module: Collection, prefix: str) -> None:
    """Of rows that a state does not hold; the first module of a model with
    such rows warns for all. ``prefix`` is that of its entries."""
    if not unsaved(module.store, module.tables):
        return
    from persia.nn.lookups import Collection

    root = _root(module, nn.Module.state_dict.__code__)
    tables: list[str] = []
    for name, one in root.named_modules():
        if not isinstance(one, Collection):
            continue
        names = unsaved(one.store, one.tables)
        here = one is module and prefix.endswith(f"{name}." if name else "")
        if names and not tables and not here:
            return  # another one warns, or this one by another name
        tables += [table for table in names if table not in tables]
    warn(
        f"the rows of tables {tables} are in no checkpoint as they are now, "
        "and a state_dict holds no rows: it loads only as long as they do "
        "not change. persia.keep_rows(model, path) saves them with each "
        "state_dict() and brings them back with load_state_dict(); or save "
        "them with store.save(path) before they are trained further, and "
        "load them with store.load(path)"
    )


def warn_once_of_kept(
    module: Collection, what: str, kept: Mapping[str, int]
) -> None:
    """Of rows that stayed as they were, at the end of a load of a model."""
    root = _root(module, nn.Module.load_state_dict.__code__)
    if root is module:
        warn_of_kept(module.store, what, kept)
        return
    all_kept: dict[str, int] | None = root.__dict__.get("_persia_kept")
    if all_kept is None:
        all_kept = root.__dict__["_persia_kept"] = {}

        def end(model: nn.Module, keys: Any) -> None:
            handle.remove()
            warn_of_kept(
                module.store, what, model.__dict__.pop("_persia_kept")
            )

        handle = root.register_load_state_dict_post_hook(end)  # type: ignore[no-untyped-call]
    all_kept.update(kept)
