"""Which ids of data have no row in an export."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from persia.data.batches.batch import Batch
from persia.errors import InvalidArgument
from persia.serving.model import ExportedModel


def unknown_ids(
    model: ExportedModel, batches: Iterable[Batch]
) -> list[dict[str, Any]]:
    """Counts the ids of each feature that has a table of its name, as those
    of ``persia train`` have.

    Returns:
        A dict for each feature: ``feature``; ``ids``, as often as they occur;
        ``unknown``, those of them without a row.

    Raises:
        InvalidArgument: a feature has no table of its name.
    """
    tables = [t.options.name for t in model.manifest.tables]
    found: dict[str, dict[str, Any]] = {}
    for batch in batches:
        for feature in batch.ids:
            if feature not in tables:
                raise InvalidArgument(
                    f"feature {feature!r} has no table of its name; there "
                    f"are {', '.join(tables)}"
                )
            none = {"feature": feature, "ids": 0, "unknown": 0}
            one = found.setdefault(feature, none)
            ids = batch.ids[feature][0]
            one["ids"] += len(ids)
            one["unknown"] += int((~model.has_rows(feature, ids)).sum())
    return list(found.values())
