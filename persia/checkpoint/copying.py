"""Rows of one store into another of this process, as a checkpoint has them:
with the state of their optimizer, their clocks and all counters.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import TYPE_CHECKING

from persia.checkpoint import saving
from persia.store.engine import engine_of

if TYPE_CHECKING:
    from persia.store.store import Store


def copy_rows(source: Store, target: Store) -> None:
    """Gives ``target`` all rows of ``source``; both are embedded, and the
    tables of both are the same. What each knows of its own checkpoints stays.
    """
    mine, other = engine_of(source), engine_of(target)
    known = mine.checkpoint_id, mine.saved
    training = other.training
    with tempfile.TemporaryDirectory(prefix="persia-copy-") as folder:
        try:
            saving.save(source, folder)
        finally:
            mine.checkpoint_id, mine.saved = known
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tables that are the same
            saving.load(target, folder, random_states=False)
    other.checkpoint_id, other.saved = known[0], dict(known[1])
    other.training = training
