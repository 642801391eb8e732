"""``persia rows``: single rows of servers, checkpoints or exports."""

from __future__ import annotations

import re
import warnings
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persia.base.counts import counted
from persia.cli.options import (
    DryRun,
    Json,
    Namespace,
    Servers,
    Step,
    Timeout,
    print_json,
)
from persia.cli.shared import Commands
from persia.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from persia.data import Schema
    from persia.serving.near import Rows
    from persia.store.store import Store

commands = Commands(no_args_is_help=True)

_Table = Annotated[str, typer.Argument(help="Name of the table.")]
_Ids = Annotated[
    list[str],
    typer.Argument(
        help="Integers of 64 bits, with or without a sign; negative ones "
        "behind --. With --checkpoint or --values also values of the column "
        "that are no integers, such as names: they are hashed as in the "
        "training."
    ),
]
_Checkpoint = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint root, instead of servers. Memory for all rows of "
        "the table is needed."
    ),
]


_Values = Annotated[
    str | None,
    typer.Option(
        help="File, glob or URL of data, such as those of the training: "
        "prints which value of them each id is the hash of, with the schema "
        "of the checkpoint; on servers with the one that is inferred."
    ),
]


@commands.callback()
def _rows() -> None:
    """Look at single rows, or erase them.

    TLS and tokens are those of the environment (PERSIA_TLS_CA, PERSIA_TOKEN,
    ...).
    """


@commands.command()
def get(
    table: _Table,
    words: _Ids,
    servers: Servers = None,
    checkpoint: _Checkpoint = None,
    step: Step = None,
    namespace: Namespace = "default",
    timeout: Timeout = 10.0,
    json: Json = False,
) -> None:
    """Print the vectors of ids, and the state of their optimizer.

    An id without a row has its initial vector, and no state.

    persia rows get user 7 42 --checkpoint out
    """
    ids = _ids(words, table, None, checkpoint, step)
    wanted = _signed(ids)
    with _opened(table, servers, checkpoint, step, namespace, timeout) as s:
        vectors, states, found = s.rows_and_state(table, wanted)
    rows = [
        {
            "id": id,
            "present": has,
            "vector": vector,
            "state": state if has and state else None,
        }
        for id, has, vector, state in zip(
            ids, found.tolist(), vectors.tolist(), states.tolist()
        )
    ]
    if json:
        print_json(rows)
        return
    for row in rows:
        print(f"{row['id']}{'' if row['present'] else ' (no row)'}")
        for name in ("vector", "state"):
            if row[name]:
                print(f"  {name:<6} {' '.join(f'{x:.6g}' for x in row[name])}")


@commands.command()
def explain(
    table: _Table,
    words: _Ids,
    servers: Servers = None,
    checkpoint: _Checkpoint = None,
    step: Step = None,
    namespace: Namespace = "default",
    timeout: Timeout = 10.0,
    values: _Values = None,
    json: Json = False,
) -> None:
    """Print what is known of ids: the shard, whether there is a row and why
    not, the norms of its vector and state.

    persia rows explain user 7 --servers ps0:8888,ps1:8888

    persia rows explain user anna --checkpoint out
    """
    ids = _ids(words, table, values, checkpoint, step)
    wanted = _signed(ids)
    named = _named(values, table, wanted, checkpoint, step)
    with _opened(table, servers, checkpoint, step, namespace, timeout) as s:
        found = [s.explain(table, id) for id in wanted]
    for one, id in zip(found, ids):
        one["id"] = id
        if values is not None:
            one["value"] = named.get(_signed([id])[0])
        del one["trainable"]  # the model decides it, which is not here
        if checkpoint is not None:
            del one["shard"]  # all rows are in this process
    if json:
        print_json(found)
        return
    for one in found:
        print("  ".join(f"{name}={value}" for name, value in one.items()))


@commands.command()
def erase(
    table: _Table,
    words: _Ids,
    servers: Servers = None,
    namespace: Namespace = "default",
    timeout: Timeout = 10.0,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Remove the rows of ids from servers, with the state of their optimizer.

    Their next lookups read initial values, and the next update makes new
    rows: erase ids that the data has no more. Checkpoints that were saved
    before still hold the rows. It is an error if a server does not answer;
    the same command can then be run again.

    persia rows erase user 7 42 --servers ps0:8888,ps1:8888 --dry-run
    """
    wanted = _signed(_ids(words, table, None, None, None))
    store = _on_servers(table, servers, namespace, timeout, not dry_run)
    with store as s:
        if dry_run:
            found = s.rows_and_state(table, wanted)[2].tolist()
            rows = len({id for id, has in zip(wanted, found) if has})
        else:
            rows = s.erase(table, wanted)
    if json:
        print_json({"table": table, "rows": rows, "erased": not dry_run})
        return
    done = "would erase" if dry_run else "erased"
    print(f"{done} {counted(rows, 'row')} of {table}")


class _By(StrEnum):
    norm = "norm"
    state = "state"
    age = "age"


@commands.command()
def top(
    table: _Table,
    checkpoint: Annotated[
        str, typer.Option(help="Root of the checkpoint, a folder or URI.")
    ],
    by: Annotated[
        _By,
        typer.Option(
            help="What is largest. norm: that of the vector; state: the norm "
            "of the optimizer's state; "
            "age: updates of the table since the last one of the row."
        ),
    ] = _By.norm,
    count: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 10,
    step: Step = None,
    values: _Values = None,
    json: Json = False,
) -> None:
    """Print the ids of a checkpoint with the largest norm, state or age.

    With Adagrad the largest state belongs to the ids that had the most
    gradient.

    persia rows top user --checkpoint out --by state
    """
    import numpy as np

    from persia.checkpoint import files
    from persia.checkpoint.rows import read_rows

    root = files.root_of(checkpoint)
    found = files.find(root, step)
    tables = {t.name: t for t in found.manifest.tables}
    best: list[dict[str, Any]] = []
    for rows in read_rows(
        root, found, _find(table, tables, str(found.folder))
    ):
        figures = {
            "norm": np.linalg.norm(rows.vectors, axis=1),
            "state": np.linalg.norm(rows.state, axis=1),
            "age": rows.age,
        }
        for at in np.argsort(-figures[by], kind="stable")[:count].tolist():
            numbers = {name: v[at].item() for name, v in figures.items()}
            best.append({"id": int(rows.ids[at]), **numbers})
        best.sort(key=lambda row: -row[by])
        del best[count:]
    named = _named(values, table, [r["id"] for r in best], checkpoint, step)
    if values is not None:
        best = [row | {"value": named.get(row["id"])} for row in best]
    if json:
        print_json(best)
        return
    last = "" if values is None else "  value"
    print(f"{'id':>20} {'norm':>10} {'state':>10} {'age':>10}{last}")
    for row in best:
        last = "" if values is None else f"  {row['value'] or '(not found)'}"
        print(
            f"{row['id']:>20} {row['norm']:>10.4g} {row['state']:>10.4g} "
            f"{row['age']:>10,}{last}"
        )


class _Score(StrEnum):
    cosine = "cosine"
    dot = "dot"


@commands.command()
def near(
    table: _Table,
    word: Annotated[
        str,
        typer.Argument(
            help="Id, or a value of the column that is no integer.",
        ),
    ],
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint root, a folder or URI.")
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(help="Export, or a version of one; a folder or URL."),
    ] = None,
    score: Annotated[
        _Score,
        typer.Option(
            help="Measure: cosine of the angle between two vectors, or their "
            "dot product."
        ),
    ] = _Score.cosine,
    count: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 10,
    step: Step = None,
    values: _Values = None,
    json: Json = False,
) -> None:
    """Print the ids whose vectors are nearest to that of an id.

    All rows of the table are read, twice.

    persia rows near item 42 --checkpoint out

    persia rows near item shoe --export exported --score dot
    """
    from persia.serving.near import nearest

    if (checkpoint is None) == (export is None):
        raise InvalidArgument("give --checkpoint ROOT or --export PATH")
    if export is None:
        assert checkpoint is not None
        schema = None
        rows = _saved_rows(table, checkpoint, step)
    else:
        if step is not None:
            raise InvalidArgument("an export has no --step")
        schema, rows = _exported_rows(table, export)
    (id,) = _signed(_ids([word], table, values, checkpoint, step, schema))
    found = nearest(rows, id, count, score.value)
    ids = [one for one, _ in found]
    named = _named(values, table, ids, checkpoint, step, schema)
    lines: list[dict[str, Any]] = [
        {"id": one, score.value: value} for one, value in found
    ]
    if values is not None:
        lines = [one | {"value": named.get(one["id"])} for one in lines]
    if json:
        print_json(lines)
        return
    print(f"{'id':>20} {score.value:>10}{'' if values is None else '  value'}")
    for one in lines:
        last = "" if values is None else f"  {one['value'] or '(not found)'}"
        print(f"{one['id']:>20} {one[score.value]:>10.4g}{last}")


def _saved_rows(
    table: str, checkpoint: str, step: int | None
) -> Callable[[], Rows]:
    """The rows of a table of a checkpoint."""
    from persia.checkpoint import files
    from persia.checkpoint.rows import read_rows

    root = files.root_of(checkpoint)
    found = files.find(root, step)
    tables = {t.name: t for t in found.manifest.tables}
    one = _find(table, tables, str(found.folder))
    return lambda: ((b.ids, b.vectors) for b in read_rows(root, found, one))


def _exported_rows(
    table: str, export: str
) -> tuple[Schema | None, Callable[[], Rows]]:
    """The schema of an export, and the rows of a table."""
    from persia.serving.model import load_model

    model = load_model(export)
    tables = {t.options.name: t for t in model.manifest.tables}
    _find(table, tables, str(model.place))
    return model.schema, lambda: model.rows(table)


def _named(
    values: str | None,
    table: str,
    ids: list[int],
    checkpoint: str | None,
    step: int | None,
    schema: Schema | None = None,
) -> dict[int, str]:
    """The values of ids that are in the data of --values."""
    if values is None:
        return {}
    from persia.train.values import schema_for, values_of

    schema = schema or schema_for(values, checkpoint, step)
    return values_of(values, schema, table, ids)


def _ids(
    words: list[str],
    table: str,
    values: str | None,
    checkpoint: str | None,
    step: int | None,
    schema: Schema | None = None,
) -> list[int]:
    """What the command line names: integers are ids, other words values."""
    texts = [word for word in words if not re.fullmatch(r"[+-]?\d+", word)]
    if not texts:
        return [int(word) for word in words]
    if values is None and checkpoint is None and schema is None:
        raise InvalidArgument(
            f"{texts[0]!r} is no id, which is an integer: persia rows explain "
            f"{table} {texts[0]} --checkpoint ROOT prints the id of a value"
        )
    from persia.train.values import ids_of, schema_for

    schema = schema or schema_for(values, checkpoint, step)
    found = dict(zip(texts, ids_of(schema, table, texts)))
    return [found[word] if word in found else int(word) for word in words]


def _signed(ids: list[int]) -> list[int]:
    """Ids as tables have them."""
    for id in ids:
        if not -(1 << 63) <= id < 1 << 64:
            raise InvalidArgument(
                f"id {id} has more than 64 bits: give -2**63 to 2**64 - 1"
            )
    return [id - (1 << 64) if id >= 1 << 63 else id for id in ids]


def _opened(
    table: str,
    servers: str | None,
    checkpoint: str | None,
    step: int | None,
    namespace: str,
    timeout: float,
) -> Store:
    """A store with one table, as servers or a checkpoint have it."""
    if checkpoint is not None:
        return _restored(table, checkpoint, step)
    return _on_servers(table, servers, namespace, timeout, False)


def _on_servers(
    table: str,
    servers: str | None,
    namespace: str,
    timeout: float,
    writes: bool,
) -> Store:
    """A store with one table, as servers have it."""
    if not servers:
        raise InvalidArgument(
            "no rows to look at: give --servers HOST:PORT or --checkpoint "
            "ROOT, or set PERSIA_SERVERS"
        )
    from persia.checkpoint.shards import rows_of
    from persia.store.engine import engine_of
    from persia.store.store import Store

    store = Store(
        servers=servers,
        namespace=namespace,
        timeout=timeout,
        rank=0,
        world_size=1,
        read_only=not writes,
    )
    try:
        engine = engine_of(store)
        specs = {t["name"]: t for t in rows_of(engine.connection).tables()}
        engine.adopt(_find(table, specs, servers))
    except BaseException:
        store.close()
        raise
    return store


def _restored(table: str, checkpoint: str, step: int | None) -> Store:
    from persia.checkpoint import files
    from persia.store.engine import engine_of
    from persia.store.store import Store

    found = files.find(files.root_of(checkpoint), step)
    specs = {t.name: t.native() for t in found.manifest.tables}
    store = Store(servers="embedded", rank=0, world_size=1)
    try:
        engine_of(store).adopt(_find(table, specs, str(found.folder)))
        with warnings.catch_warnings():  # of tables that are not asked for
            warnings.simplefilter("ignore")
            store.load(
                checkpoint,
                step=found.manifest.step,
                strict=False,
                random_states=False,
            )
    except BaseException:
        store.close()
        raise
    return store


def _find(table: str, specs: dict[str, Any], where: str) -> Any:
    if table not in specs:
        raise InvalidArgument(
            f"no table {table!r} in {where}; there are {sorted(specs)}"
        )
    return specs[table]
