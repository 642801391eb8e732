"""The values that ids are hashes of: a look into data that have them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from persia import errors
from persia.data import Files, Schema, Table
from persia.data.schema.schema import MultivaluedColumn, SequenceColumn
from persia.train.predictions import Kept
from persia.train.saved import saved_schema

_NOTHING: dict[str, Any] = {
    "label": None,
    "weight": None,
    "group": None,
    "timestamp": None,
    "dense": [],
    "categorical": [],
    "multivalued": [],
    "sequences": [],
    "crosses": [],
    "carry": [],
}


def schema_for(
    data: str | None,
    checkpoint: str | os.PathLike[str] | None,
    step: int | None,
) -> Schema:
    """That of the training which wrote a checkpoint; without one, what is
    inferred of the data.

    Raises:
        InvalidArgument: the training had no schema.
    """
    if checkpoint is None:
        assert data is not None
        return Files(data, None, 1).schema
    schema = saved_schema(checkpoint, step)
    if schema is None:
        raise errors.InvalidArgument(
            f"{checkpoint} is of a training without a schema: its values "
            "cannot be looked for"
        )
    return schema


def _alone(schema: Schema, feature: str) -> tuple[Any, Schema]:
    """The column of a feature, and the schema with nothing else."""
    one = next((f for f in schema.features if f.feature == feature), None)
    if one is None:
        known = ", ".join(f.feature for f in schema.features)
        raise errors.InvalidArgument(
            f"no feature {feature!r} in the data; there are {known}"
        )
    kinds = [k for k in _NOTHING if isinstance(getattr(schema, k), list)]
    kind = next(k for k in kinds if one in getattr(schema, k))
    return one, schema.model_copy(update=_NOTHING | {kind: [one]})


def ids_of(schema: Schema, feature: str, texts: Sequence[str]) -> list[int]:
    """The ids of values, as the training has hashed them.

    Args:
        schema: of the training.
        feature: as of :func:`values_of`.
        texts: a value each; of a list, one of its values.

    Raises:
        InvalidArgument: there is no such feature, or it is a cross of
            columns.
        MalformedData: this feature cannot have a value.
    """
    one, alone = _alone(schema, feature)
    if len(one.columns) > 1:
        raise errors.InvalidArgument(
            f"feature {feature!r} is a cross of {', '.join(one.columns)}: "
            "give an id, which is an integer"
        )
    many = isinstance(one, MultivaluedColumn | SequenceColumn)
    listed = many and one.separator is None
    cells = [[text] if listed else text for text in texts]
    table = Table({one.columns[0]: cells}, alone, strict=True)
    return [id for batch in table for id in batch.ids[feature][0].tolist()]


def values_of(
    data: str, schema: Schema, feature: str, ids: Iterable[int]
) -> dict[int, str]:
    """The values of ids, of those that occur in files.

    Args:
        data: a file, glob or URL.
        schema: of the training.
        feature: whose ids they are; ``persia train`` names its table so.
        ids: as tables have them, with a sign.

    Returns:
        The text of the first value that was found; of a cross of columns,
        those of all with " x " between them.

    Raises:
        InvalidArgument: there is no such feature.
        MalformedData: a value of the feature is malformed.
    """
    one, alone = _alone(schema, feature)
    files = Files(data, alone, 4096, strict=True)
    kept = Kept(files.files, files, one.columns)
    wanted = torch.tensor(sorted(set(ids)))
    found: dict[int, str] = {}
    for batch in files:
        columns = kept.take(len(batch))
        values, lengths = batch.ids[feature]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths])
        offsets = offsets.cumsum(0)
        for at in torch.isin(values, wanted).nonzero().flatten().tolist():
            id = int(values[at])
            if id in found:
                continue
            row = int(torch.searchsorted(offsets, at, right=True)) - 1
            cells = [column[row].as_py() for column in columns]
            if isinstance(one, MultivaluedColumn | SequenceColumn):
                place, n = at - int(offsets[row]), int(lengths[row])
                cells = [_element(cells[0], one.separator, place, n)]
            found[id] = " x ".join(str(cell) for cell in cells)
        if len(found) == len(wanted):
            break
    return found


def _element(cell: object, separator: str | None, at: int, n: int) -> object:
    """The value at a place of the n that are kept of a list; the whole cell
    where it is not known which that is."""
    parts = cell
    if isinstance(cell, str) and separator is not None:
        parts = [part.strip() for part in cell.split(separator)]
    if not isinstance(parts, list) or len(parts) != n:
        return cell
    return parts[at]
