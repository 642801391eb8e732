"""Batches of ids of any kind as the tensors that a lookup takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from persia import errors
from persia.data.batches.jagged import JaggedBatch, tensors_of

# What a batch is to a module: keys, values, offsets, weights, ticket; and
# values, offsets and weights as the batch has them: those before may be
# copies, which would not show that the batch was changed.
Ids = tuple[
    tuple[str, ...],
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    tuple[Tensor | None, ...],
]


def device_of(features: Any, ids: Ids) -> torch.device:
    """Where the output for these ids goes, if the module does not say."""
    if isinstance(features, JaggedBatch):
        return features.device()
    return ids[1].device


def unpack(
    features: Any, padding_value: int | None, names: tuple[str, ...] = ()
) -> Ids:
    """The tensors of a JaggedBatch, a KeyedJaggedTensor or a dict; of a dict
    that has all of the names, these alone."""
    if isinstance(features, JaggedBatch):
        values, offsets, weights = tensors = tensors_of(features)
        return (
            tuple(features.keys()),
            values.contiguous(),
            None if offsets is None else offsets.contiguous(),
            weights,
            features.ticket,
            tensors,
        )
    if isinstance(features, Mapping):
        if names and all(name in features for name in names):
            features = {name: features[name] for name in names}
        return unpack(
            JaggedBatch.from_dict(features, padding_value=padding_value), None
        )
    if isinstance(features, Tensor):
        raise errors.InvalidArgument(
            "ids are a Tensor, whose features have no names; pass a dict "
            "such as {'item': ids}, or a persia.JaggedBatch"
        )
    try:
        variable = getattr(features, "variable_stride_per_key", None)
        if variable is not None and variable():
            raise errors.ShapeError(
                "the batch has a variable stride per key; a module pools one "
                "bag a sample for every feature: pass features of equal "
                "batch size"
            )
        values, offsets = features.values(), features.offsets()
        weights = features.weights_or_none()
        keys = tuple(features.keys())
    except (AttributeError, TypeError) as error:
        raise errors.InvalidArgument(
            f"ids are a {type(features).__name__}; need a persia.JaggedBatch, "
            "a KeyedJaggedTensor, an object like it, or a dict of tensors; "
            "persia.data.Table makes batches of a DataFrame "
            f"({error})"
        ) from None
    for name, t in (
        ("values", values),
        ("offsets", offsets),
        ("weights", weights),
    ):
        if not isinstance(t, Tensor) and (t is not None or name != "weights"):
            raise errors.InvalidArgument(
                f"{name} of the {type(features).__name__} are a "
                f"{type(t).__name__}, need a torch.Tensor"
            )
    if not keys:
        raise errors.InvalidArgument(
            f"the {type(features).__name__} has no keys; a batch has at "
            "least one feature"
        )
    for name, t in (("values", values), ("offsets", offsets)):
        if t.dtype != torch.int64 and t.dtype != torch.int32:
            raise errors.DtypeError(
                f"{name} have dtype {t.dtype}, need torch.int64"
            )
        if t.dim() != 1:
            raise errors.ShapeError(
                f"{name} have shape {tuple(t.shape)}, need one dimension"
            )
    if offsets.numel() == 0 or (offsets.numel() - 1) % len(keys):
        raise errors.OffsetsError(
            f"{offsets.numel()} offsets for {len(keys)} features; need "
            "features * samples + 1"
        )
    return (
        keys,
        values.to(torch.int64).contiguous(),
        offsets.to(torch.int64).contiguous(),
        weights,
        getattr(features, "ticket", None),
        (values, offsets, weights),
    )
