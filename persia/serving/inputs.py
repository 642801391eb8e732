"""Requests as inputs of a model: ids where it was exported without a schema,
else columns with raw values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from persia.data.schema.schema import Schema
from persia.errors import (
    DtypeError,
    InvalidArgument,
    LimitReached,
    MissingFeature,
    OffsetsError,
    ShapeError,
)
from persia.serving.folder import ExportManifest
from persia.serving.form import DATATYPES, Form, TensorForm
from persia.serving.model import ExportedModel
from persia.serving.protocol import Array

LENGTHS = ".lengths"


def inputs_of(schema: Schema | None, form: Form) -> list[TensorForm]:
    """The tensors that a request has, as metadata say it.

    Args:
        schema: of the data; None: requests have ids.
        form: of the graph.
    """
    if schema is None:
        return form.inputs
    found = [
        TensorForm(name=one.column, datatype="FP32", shape=[-1])
        for one in schema.dense
    ]
    several = {c.column for c in schema.bags}
    for name in _columns(schema):
        if name in {one.name for one in found}:
            continue
        found.append(TensorForm(name=name, datatype="BYTES", shape=[-1]))
        if name in several:
            found.append(
                TensorForm(name=name + LENGTHS, datatype="INT32", shape=[-1])
            )
    return found


def outputs_of(manifest: ExportManifest) -> list[TensorForm]:
    """The tensors that an answer has, as metadata say it."""
    if not manifest.clicks:
        return manifest.form.outputs
    names = [f"score.{task}" for task in manifest.tasks] or ["score"]
    return [
        TensorForm(name=name, datatype="FP32", shape=[-1]) for name in names
    ]


def _columns(schema: Schema) -> list[str]:
    dense = [c.column for c in schema.dense]
    names = [n for f in schema.features for n in f.columns]
    return list(dict.fromkeys([*dense, *names]))


def tensors_of(
    model: ExportedModel,
    inputs: Mapping[str, Array],
    limit: int,
) -> list[Tensor]:
    """The inputs of the graph, checked. What has one sample beside others of n
    is repeated n times: the user beside the candidates.

    Args:
        model: that is asked.
        inputs: of the request.
        limit: samples that a request may have.

    Raises:
        InvalidArgument, MissingFeature, DtypeError, ShapeError, OffsetsError,
        MalformedData: they are not inputs of this model.
        LimitReached: there are too many samples.
    """
    if model.schema is None:
        tensors = _of_ids(model, inputs, limit)
        model.form.check(tensors)
        return tensors
    columns = _of_columns(model, inputs, limit)
    n = len(columns)
    if not n:
        raise ShapeError("the request has no samples")
    (batch,) = model.batches_of(columns, n)
    return model.tensors_of(batch)


def _check_names(given: Mapping[str, Array], need: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(need))
    if unknown:
        raise InvalidArgument(
            f"the model has no inputs {unknown}; it has {list(need)}"
        )


def _samples(sizes: Mapping[str, int], limit: int) -> int:
    """How many there are: 1 and n may stand beside each other."""
    several = {name: n for name, n in sizes.items() if n != 1}
    if len(set(several.values())) > 1:
        raise ShapeError(
            f"the inputs differ in their samples: {several}; need 1 or the "
            "same"
        )
    n = next(iter(several.values()), 1)
    if n > limit:
        raise LimitReached(
            f"{n:,} samples, and a request has at most {limit:,}"
        )
    return n


def _of_ids(
    model: ExportedModel, inputs: Mapping[str, Array], limit: int
) -> list[Tensor]:
    forms = model.form.inputs
    _check_names(inputs, [one.name for one in forms])
    found = {}
    for one in forms:
        if one.name not in inputs:
            raise MissingFeature(f"the request has no input {one.name!r}")
        found[one.name] = _tensor(one, inputs[one.name])
    sizes = {
        one.name: found[one.name].shape[0]
        for one in forms
        if one.samples and found[one.name].dim()
    }
    n = _samples(sizes, limit)
    for one in forms:
        if not one.samples or sizes.get(one.name, n) == n:
            continue
        feature = one.name.removesuffix(LENGTHS)
        if feature != one.name:  # the ids of one sample
            for name in feature, f"{feature}.weights":
                if name in found:
                    found[name] = found[name].repeat(n)
        x = found[one.name]
        found[one.name] = x.expand(n, *x.shape[1:]).contiguous()
    return [found[one.name] for one in forms]


def _tensor(form: TensorForm, array: Array) -> Tensor:
    if form.datatype == "INT64" and array.dtype == np.uint64:
        array = array.view(np.int64)  # ids are 64 bits
    elif form.datatype == "INT64" and array.dtype.kind in "iu":
        array = array.astype(np.int64)
    if array.dtype == object:
        raise DtypeError(
            f"{form.name} is of BYTES, need {form.datatype}: the model was "
            "exported without a schema, which says how values are hashed"
        )
    found = torch.from_numpy(array if array.flags.writeable else array.copy())
    if found.dtype != DATATYPES[form.datatype]:
        raise DtypeError(
            f"{form.name} is of {found.dtype}, need {form.datatype}"
        )
    if found.dim() == 2 and len(form.shape) == 1 and found.shape[1] == 1:
        found = found[:, 0]
    return found


def _of_columns(
    model: ExportedModel, inputs: Mapping[str, Array], limit: int
) -> pa.Table:
    assert model.schema is not None
    names = _columns(model.schema)
    several = {c.column for c in model.schema.bags}
    _check_names(inputs, [*names, *(name + LENGTHS for name in several)])
    columns: dict[str, Any] = {}
    for name in names:
        if name not in inputs:
            raise MissingFeature(f"the request has no input {name!r}")
        columns[name] = _column(name, inputs[name])
        lengths = inputs.get(name + LENGTHS)
        if lengths is not None:
            columns[name] = _lists(name, columns[name], lengths)
    sizes = {name: len(column) for name, column in columns.items()}
    n = _samples(sizes, limit)
    alone = {c.column for c in model.schema.bags if not c.aligned}
    for name, column in columns.items():
        if len(column) == n:
            continue
        same = pa.array(np.zeros(n, np.int64))
        if name in alone and pa.types.is_large_list(column.type):
            # A history: its ids are made once.
            columns[name] = pa.DictionaryArray.from_arrays(same, column)
        else:
            columns[name] = column.take(same)
    return pa.table(columns)


def _column(name: str, array: Array) -> Any:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ShapeError(
            f"{name} has shape {list(array.shape)}, need one value a sample, "
            f"or values and {name}{LENGTHS}"
        )
    if array.dtype != object:
        return pa.array(array)
    try:
        return pa.array([one.decode() for one in array], pa.string())
    except UnicodeDecodeError:
        raise DtypeError(f"{name} has bytes that are no UTF-8") from None


def _lists(name: str, values: Any, lengths: Array) -> Any:
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise DtypeError(f"{name}{LENGTHS} are no integers [n]")
    sizes = lengths.astype(np.int64)
    if (sizes < 0).any() or (sizes > len(values)).any():
        raise OffsetsError(
            f"{name}{LENGTHS} has a length below 0, or above {len(values)}"
        )
    if sizes.sum() != len(values):
        raise OffsetsError(
            f"{name}{LENGTHS} add up to {sizes.sum()}, and there are "
            f"{len(values)} values"
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)
