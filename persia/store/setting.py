"""How weights from outside become rows: one rule for all ways.

Rows that are not there are set. Those that are there stay, for they may be
trained, or be what another process trains; one warning names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from persia.base.warning import warn
from persia.store.configs import float_rows

if TYPE_CHECKING:
    from persia.store.store import Store

_ROWS = 1 << 16  # looked at in one call


def set_absent(store: Store, table: str, ids: Tensor, values: Tensor) -> int:
    """Sets the rows of ``ids`` that are not there.

    Args:
        store: of the table.
        table: its name.
        ids: integers [n].
        values: floating [n, embedding_dim], finite.

    Returns:
        How many are there with other values, and stay.
    """
    kept = 0
    dim = store.tables[table].embedding_dim
    values = float_rows(f"table {table!r}: values", values, (len(ids), dim))
    for first in range(0, len(ids), _ROWS):
        some = ids[first : first + _ROWS]
        wanted = values[first : first + _ROWS]
        found, _, there = store.rows_and_state(table, some)
        kept += int((there & (found != wanted).any(1)).sum())
        if not there.all():
            store.set_rows(table, some[~there], wanted[~there])
    return kept


def warn_of_kept(store: Store, what: str, kept: Mapping[str, int]) -> None:
    """One warning of all rows that ``what`` has left as they were.

    Of several ranks the first one warns: the others find what it has set.
    """
    kept = {table: n for table, n in kept.items() if n}
    if not kept or store.rank:
        return
    named = ", ".join(f"{n:,} of table {t!r}" for t, n in kept.items())
    first = next(iter(kept))
    warn(
        f"{what}: rows that the store has already stay as they are, with "
        f"other values than the weights given: {named}. For the given ones, "
        f"empty the table before (store.clear({first!r})), or replace rows "
        "with store.set_rows(); for rows of its own, give the model another "
        "store or other names"
    )
