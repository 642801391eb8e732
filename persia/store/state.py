"""The state of a module: which rows belong to it. It holds no rows.

It is a float32 tensor of the bytes of JSON, so that every format of
checkpoints takes it, and loops that leave out integers do not.
Rows are known by their lineage and, for each table, the number of its rows
and of its updates. A load gives them another lineage; so do, in one process,
``set_rows``, ``erase``, ``clear`` and ``drop``. Servers do not count rows that
``set_rows`` replaces.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from persia import errors
from persia.store.engine import engine_of

if TYPE_CHECKING:
    from persia.store.configs import TableConfig
    from persia.store.store import Store

_ROWS = 1 << 16  # copied in one call


def lineages_of(store: Store) -> list[str]:
    """Names of the rows that a store has: the one to save first.

    Rows that a store has loaded have that of the checkpoint, too, until an
    update: two trainings that continue from one checkpoint make other rows
    with as many updates.
    """
    engine = engine_of(store)
    then = engine.loaded_updates
    loaded = then is not None and all(
        updates == then.get(table, 0)
        for table, updates in updates_of(store).items()
    )
    if not store.remote:
        return [engine.loaded if loaded else engine.lineage]
    from persia.checkpoint.shards import rows_of

    mine = rows_of(engine.connection).lineage()
    return [mine, engine.loaded] if loaded else [mine]


def _tables(store: Store) -> dict[str, dict[str, int]]:
    engine_of(store).core.settle()  # updates that threads have yet to apply
    return {
        name: {"rows": table["rows"], "updates": table["pushes"]}
        for name, table in store.stats()["tables"].items()
    }


def updates_of(store: Store) -> dict[str, int]:
    """How many each table has had."""
    return {name: t["updates"] for name, t in _tables(store).items()}


def unsaved(store: Store, configs: Sequence[TableConfig]) -> list[str]:
    """The tables whose rows are in no checkpoint as they are now."""
    engine = engine_of(store)
    if engine.loading or engine.keeper is not None:
        return []
    tables = _tables(store)
    return [
        c.name
        for c in configs
        if tables[c.name]["rows"]
        and tables[c.name]["updates"] != engine.saved.get(c.name)
    ]


def state_of(
    store: Store,
    configs: Sequence[TableConfig],
    outputs: Sequence[tuple[str, int]],
) -> Tensor:
    """The state of a module with these tables; where rows are kept beside
    states, they are saved."""
    keeper = engine_of(store).keeper
    if keeper is not None and not engine_of(store).loading:
        keeper.save()
    tables = _tables(store)
    state = {
        "tables": {
            c.name: {"embedding_dim": c.embedding_dim, **tables[c.name]}
            for c in configs
        },
        "lineage": lineages_of(store)[0],
        "checkpoint": engine_of(store).checkpoint_id,
        "outputs": outputs,
    }
    text = bytearray(json.dumps(state).encode())
    return torch.frombuffer(text, dtype=torch.uint8).to(torch.float32)


def _read(what: str, state: Any) -> dict[str, Any]:
    """A state as it was before it became a tensor, or was a dict."""
    try:
        if isinstance(state, Tensor):
            text = bytes(state.detach().cpu().to(torch.uint8).tolist())
            state = json.loads(text)
        for saved in state["tables"].values():
            saved["embedding_dim"], saved["rows"], state["checkpoint"]
        return dict(state)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
        raise errors.SchemaMismatch(
            f"the state of a {what} has tables with their "
            f"embedding_dim and rows, and a checkpoint; this is {state!r}"
        ) from None


def check_state(
    store: Store,
    configs: Sequence[TableConfig],
    what: str,
    state: Any,
    outputs: Sequence[tuple[str, int]],
    in_order: bool,
) -> None:
    """Raises if a state is of other tables, or of other rows.

    Args:
        store: of the module.
        configs: its tables.
        what: its class.
        state: that was saved.
        outputs: names and dims, in the order of the module.
        in_order: what reads the output knows its columns by their order.

    Raises:
        SchemaMismatch: it has no such form, or other tables.
        RowsMissing: the rows that it was saved with are not in the store.
    """
    state = _read(what, state)
    strict = engine_of(store).strict
    _check_outputs(what, outputs, state.get("outputs"), in_order, strict)
    if not strict:
        return
    dims = {c.name: c.embedding_dim for c in configs}
    for name, saved in state["tables"].items():
        if name not in dims:
            raise errors.SchemaMismatch(
                f"the state has a table {name!r}, the module has "
                f"{sorted(dims)}"
            )
        if dims[name] != saved["embedding_dim"]:
            raise errors.SchemaMismatch(
                f"table {name!r}: embedding_dim is {dims[name]}, in the "
                f"state {saved['embedding_dim']}"
            )
    if engine_of(store).loading:  # a checkpoint's states come before its rows
        return
    try:
        _check_all_rows(store, state)
    except errors.RowsMissing:
        keeper = engine_of(store).keeper
        if keeper is not None and keeper.bring_back(state["checkpoint"]):
            return
        source = _store_with(store, state)
        if source is None:
            raise
        for name in state["tables"]:
            _copy_table(source, store, name)


def _check_outputs(
    what: str,
    mine: Sequence[tuple[str, int]],
    saved: Sequence[tuple[str, int]] | None,
    in_order: bool,
    strict: bool,
) -> None:
    """Raises if what reads the output would take one feature for another."""
    if saved is None:  # of an earlier version
        return
    here, there = ([str(name) for name, _ in one] for one in (mine, saved))
    both = set(here) & set(there)
    order = [[n for n in one if n in both] for one in (here, there)]
    if in_order and order[0] != order[1]:
        raise errors.SchemaMismatch(
            f"the output of this {what} has the features {here}, in the "
            f"state they are {there}: the layers behind it would read one "
            "for the other. Make it with tables and features in that order"
        )
    if strict and set(here) != set(there):
        more = sorted(set(here) - both), sorted(set(there) - both)
        raise errors.SchemaMismatch(
            f"the output of this {what} has features that the state has not: "
            f"{more[0]}; the state has others: {more[1]}. For the rest alone "
            "use store.load(path, model=model, strict=False)"
        )


def _check_all_rows(store: Store, state: Mapping[str, Any]) -> None:
    mine = _tables(store)
    same = state.get("lineage") is None or state["lineage"] in lineages_of(
        store
    )
    for name, saved in state["tables"].items():
        _check_rows(name, saved, mine[name], same, state["checkpoint"])


#: Of this process, whose rows a state may be of.
stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _store_with(store: Store, state: Mapping[str, Any]) -> Store | None:
    """Another store here whose rows are those of a state, as they are now."""
    if not state.get("lineage"):
        return None
    if not any(saved["rows"] for saved in state["tables"].values()):
        return None  # any empty store would do
    for other in list(stores):
        if other is store or other.closed or other.remote:
            continue
        if state["tables"].keys() <= other.tables.keys():
            try:
                _check_all_rows(other, state)
            except errors.RowsMissing:
                continue
            return other
    return None


def _copy_table(source: Store, target: Store, name: str) -> None:
    """Replaces all rows of a table by those of another store."""
    engine_of(target).check_writable("load_state_dict")
    floats = [
        engine_of(s).core.state_floats(engine_of(s).find(name).number)
        for s in (source, target)
    ]
    ids = source.ids(name)
    target.clear(name)
    for some in torch.split(ids, _ROWS):
        rows, state, _ = source.rows_and_state(name, some)
        kept = state if floats[0] == floats[1] else None
        target.set_rows(name, some, rows, kept)


def _check_rows(
    name: str,
    saved: Mapping[str, int],
    mine: Mapping[str, int],
    same: bool,
    checkpoint: str,
) -> None:
    """Of one table; same: whether the lineage is that of the state."""
    if not saved["rows"] and not mine["rows"]:
        return
    remedy = (
        "A state_dict holds no rows: save them beside it with "
        "store.save(path), and load them first with store.load(path) (the "
        f"state knows of checkpoint {checkpoint or 'not saved'!r})"
    )
    if not mine["rows"]:
        raise errors.RowsMissing(
            f"table {name!r} had {saved['rows']} rows when this state was "
            f"saved, now it is empty. {remedy}"
        )
    if not same:
        raise errors.RowsMissing(
            f"table {name!r} has rows of another training than this state, "
            f"or they were loaded, assigned or erased since. {remedy}"
        )
    # A state of an earlier version counts no updates.
    updates = saved.get("updates", mine["updates"])
    if updates != mine["updates"]:
        raise errors.RowsMissing(
            f"table {name!r} had {updates} updates when this state was "
            f"saved, its rows have {mine['updates']} now. {remedy}"
        )
    if saved["rows"] != mine["rows"]:
        raise errors.RowsMissing(
            f"table {name!r} had {saved['rows']} rows when this state was "
            f"saved, now it has {mine['rows']}. {remedy}"
        )
