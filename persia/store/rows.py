"""The rows of a store's tables: looks at them, and changes by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from persia import _core, errors
from persia.base.tensors import integers, vector
from persia.store.configs import float_rows, word
from persia.store.engine import HasEngine

if TYPE_CHECKING:
    import pyarrow


def _floats(*shape: int) -> Tensor:
    """Room for the C core, whatever torch's defaults are."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


class Rows(HasEngine):
    """What a :class:`persia.Store` can do with rows."""

    @staticmethod
    def _ids(ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        t = vector("ids", integers("ids", ids, "cpu"), "pass a list of ids")
        return t.to(device="cpu").contiguous().numpy()

    def rows_and_state(
        self, table: str, ids: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors of ``ids``, state of their optimizer, and which have a row.

        Args:
            table: its name.
            ids: integers [n].

        Returns:
            float32 [n, embedding_dim], float32 [n, state_floats] and bool
            [n]; an id without a row has the values of a new one.
        """
        t = self._engine.find(table)
        wanted = self._ids(ids)
        n = len(wanted)
        vectors = _floats(n, t.config.embedding_dim)
        state = _floats(n, self._engine.core.state_floats(t.number))
        found = torch.empty(n, dtype=torch.uint8, device="cpu")
        self._engine.core.get(
            t.number, wanted, vectors.numpy(), state.numpy(), found.numpy()
        )
        return vectors, state, found.bool()

    def rows(self, table: str, ids: Any) -> Tensor:
        """The vectors of ``ids``; the table is not changed.

        Args:
            table: its name.
            ids: integers [n].

        Returns:
            float32 [n, embedding_dim]; an id without a row has its initial
            value.
        """
        return self.rows_and_state(table, ids)[0]

    def contains(self, table: str, ids: Any) -> Tensor:
        """Which of ``ids`` (integers [n]) have a row: bool [n]."""
        return self.rows_and_state(table, ids)[2]

    def set_rows(
        self, table: str, ids: Any, values: Any, state: Any = None
    ) -> None:
        """Creates or replaces rows.

        Args:
            table: its name.
            ids: integers [n].
            values: floating [n, embedding_dim], finite.
            state: floating [n, state_floats] of the optimizer; None: as in a
                new row.
        """
        self._engine.check_writable("set_rows")
        t = self._engine.find(table)
        wanted = self._ids(ids)
        n = len(wanted)
        vectors = float_rows(
            "values", values, (n, t.config.embedding_dim)
        ).numpy()
        if state is not None:
            floats = self._engine.core.state_floats(t.number)
            state = float_rows("state", state, (n, floats)).numpy()
        self._engine.core.set(t.number, wanted, vectors, state)
        self._engine.rename_rows(table=table)

    def ids(self, table: str) -> Tensor:
        """The ids of all rows: int64 [rows], in no particular order."""
        data = self._engine.core.ids(self._engine.find(table).number)
        return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.int64))

    def explain(self, table: str, id: int) -> dict[str, Any]:
        """What the store knows of one id, for a person to read."""
        wanted = integers("id", [id], "cpu")
        vectors, state, found = self.rows_and_state(table, wanted)
        id = int(wanted)
        t = self._engine.find(table)
        stats = self._engine.core.stats(t.number)
        out: dict[str, Any] = {
            "table": table,
            "id": id,
            "shard": _core.cluster_shard(self._engine.handle, id),
            "present": bool(found[0]),
            "norm": float(vectors[0].norm()),
            "trainable": t.config.trainable,
        }
        if out["present"]:
            out["state_norm"] = float(state[0].norm())
            return out
        reasons = ["it occurred in no update yet"]
        if stats["refused"]:
            reasons.append(
                f"it was not admitted (admission={t.config.admission!r})"
            )
        if stats["evicted"]:
            reasons.append(f"it was evicted (capacity={t.config.capacity})")
        out["why"] = ", or ".join(reasons)
        return out

    def erase(self, table: str, ids: Any) -> int:
        """Removes the rows of ``ids``, with their optimizer state.

        Their next lookups read initial values. Updates of this store are
        applied first. An update of a batch that is looked up already, or of
        another process, makes the rows of its ids again, from their initial
        values. Checkpoints written afterwards lack the rows.

        Args:
            table: its name.
            ids: integers [n]; those without a row are passed over.

        Returns:
            How many rows there were. A server whose answer was lost is asked
            again, and the rows that it had removed by then do not count.
        """
        self._engine.check_writable("erase")
        number = self._engine.find(table).number
        erased = self._engine.core.erase(number, self._ids(ids))
        self._engine.rename_rows(table=table)
        return erased

    def clear(self, table: str | None = None) -> None:
        """Removes all rows of a table (None: of all); it stays declared."""
        self._engine.check_writable("clear")
        chosen = (
            list(self._engine.tables.values())
            if table is None
            else [self._engine.find(table)]
        )
        for t in chosen:
            self._engine.core.clear(t.number)
        self._engine.rename_rows()

    def to_torch(self, table: str) -> tuple[Tensor, torch.nn.EmbeddingBag]:
        """A table as a torch module.

        Returns:
            ids, int64 [rows], sorted, and an ``EmbeddingBag`` whose row i is
            that of ids[i].

        Raises:
            InvalidArgument: a table with pooling "sqrtn", which an
                ``EmbeddingBag`` does not know.
        """
        config = self._engine.find(table).config
        pooling = word(getattr(config, "pooling", "sum"))
        if pooling == "sqrtn":
            raise errors.InvalidArgument(
                f"table {table!r} has pooling 'sqrtn', which no EmbeddingBag "
                "of torch does; take store.ids() and store.rows()"
            )
        ids = self.ids(table).sort().values
        weight = self.rows(table, ids) if len(ids) else None
        bag = torch.nn.EmbeddingBag(
            max(len(ids), 1),
            config.embedding_dim,
            mode=pooling,
            _weight=weight,
        )
        return ids, bag

    def to_arrow(self, table: str, *, state: bool = False) -> pyarrow.Table:
        """All rows of a table as a ``pyarrow.Table``, sorted by id.

        Columns: ``id`` int64, ``vector`` lists of ``embedding_dim`` float32
        and, with ``state=True``, ``state`` lists of float32 (not there if the
        optimizer keeps none).
        """
        from persia.store import arrow

        ids = self.ids(table).sort().values
        vectors, states, _ = self.rows_and_state(table, ids)
        return arrow.to_arrow(ids, vectors, states if state else None)

    def set_arrow(self, table: str, rows: Any) -> None:
        """Creates or replaces rows, as :meth:`set_rows`.

        Args:
            table: its name.
            rows: a ``pyarrow.Table`` or ``RecordBatch`` with the columns of
                :meth:`to_arrow`; without ``state``, that of new rows. Other
                columns are ignored.

        Raises:
            InvalidArgument: a column is missing or has nulls.
            DtypeError, ShapeError: a column of another type or width.
        """
        from persia.store import arrow

        found = self._engine.find(table)
        floats = self._engine.core.state_floats(found.number)
        dim = found.config.embedding_dim
        self.set_rows(table, *arrow.from_arrow(rows, dim, floats))
