"""``Store.stats()`` has the keys and types that it says."""

from __future__ import annotations

import contextlib
import typing
from typing import Any

import pytest
import torch

import persia
from persia import _core
from persia.store import stats as kinds
from tests.remote import Servers


def check(value: Any, kind: Any) -> None:
    """A value is of an annotation, down to the last level."""
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        marked = typing.get_type_hints(kind, include_extras=True)
        optional = {
            name
            for name, hint in marked.items()
            if typing.get_origin(hint) is typing.NotRequired
        }
        assert set(hints) - optional <= set(value) <= set(hints)
        for name, one in value.items():
            check(one, hints[name])
    elif typing.get_origin(kind) is dict:
        key, of = typing.get_args(kind)
        for name, one in value.items():
            check(name, key)
            check(one, of)
    elif typing.get_origin(kind) is list:
        for one in value:
            check(one, typing.get_args(kind)[0])
    else:
        assert isinstance(value, kind), (value, kind)


@pytest.mark.parametrize("remote", [False, True])
def test_stats_have_the_keys_that_they_say(remote: bool) -> None:
    with contextlib.ExitStack() as stack:
        where = {}
        if remote:
            servers = stack.enter_context(contextlib.closing(Servers(2)))
            where["servers"] = servers.text
        store = stack.enter_context(persia.Store(**where))
        bags = persia.EmbeddingBagCollection(
            store=store, tables=[persia.EmbeddingBagConfig("t", 4, ["f"])]
        )
        check(store.stats(), kinds.StoreStats)
        batches = [{"f": torch.arange(6).reshape(3, 2)}] * 3
        for batch in persia.DataLoader(batches, bags, 1, prefetch=True):
            bags(batch).values().sum().backward()
        store.flush()
        stats = store.stats()
        check(stats, kinds.StoreStats)
        assert stats["tables"]["t"]["rows"] == 6
        assert sum(stats["lookahead"]["staleness"].values()) == 3
        assert ("client" in stats) == ("servers" in stats) == remote
        if remote:
            assert set(stats["client"]) == set(
                kinds.ClientStats.__annotations__
            )


def test_tables_have_the_counters_of_the_core() -> None:
    assert set(kinds.TableStats.__annotations__) == set(_core.TABLE_COUNTERS)
