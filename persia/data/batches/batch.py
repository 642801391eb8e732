"""Batches of samples: :class:`Batch`, ids and named tensors.

A plain container of tensors, as :class:`persia.JaggedBatch` is: it works in
forked children (the workers of ``torch.utils.data.DataLoader``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor

from persia import errors
from persia.base.check import kind
from persia.base.torch_private import register_tree
from persia.data.batches.jagged import JaggedBatch, skip

Aligned = dict[str, dict[str, Tensor]]

_ODD = re.compile("[\0\x1f\ud800-\udfff]")  # in no name
_FIELDS = ("ids", "tensors", "aligned")
_DIMS = 16  # of a tensor that is sent
_UNIT = "\x1f"  # between feature and name of an aligned tensor, if it is sent


class _Named:
    """The tensor of a name, as an attribute; None where there is none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, batch: None, owner: type) -> Self: ...

    @overload
    def __get__(self, batch: Batch, owner: type) -> Tensor | None: ...

    def __get__(self, batch: Batch | None, owner: type) -> Any:
        return self if batch is None else batch.tensors.get(self.name)

    def __set__(self, batch: Batch, tensor: Tensor | None) -> None:
        if tensor is None:
            batch.tensors.pop(self.name, None)
        else:
            batch.tensors[self.name] = tensor


@dataclass(init=False)
class Batch:
    """One batch of B samples: their ids, and tensors by name.

    Each tensor has one entry a sample. Some names have a meaning, and are
    attributes, which are None where the batch has no such tensor:

    - ``dense``: float32 [B, number of dense features];
    - ``label``: float32 [B], or [B, number of tasks] where a sample has
      several labels. NaN is one of several that a sample does not have: it
      counts neither in a loss nor in a metric (``batch.label.isnan()`` is the
      mask);
    - ``weight``: float32 [B], how much each sample counts;
    - ``timestamp``: float64 [B], seconds since 1970;
    - ``group``: int64 [B], the id of what samples belong to, such as the
      user, for :class:`persia.metrics.GAUC`.

    All others, such as columns that a schema carries, are ``batch[name]``,
    and attributes, too.

    Args:
        dense, label, weight, timestamp, group: tensors of these names, or
            None, in the place of those in ``tensors``.
        ids: the categorical features of the samples.
        tensors: tensors by name, [B, ...] each.
        aligned: by feature and name, tensors [n, ...] with one entry for each
            of the n ids that the feature has in this batch, in their order:
            the times of a sequence, for example.

    Raises:
        InvalidArgument: there are no ids, or a name is no string, or "ids".

    Attributes:
        ids: the categorical features of the samples.
        tensors: all tensors by name, those with attributes among them.
        aligned: see the argument.
    """

    ids: JaggedBatch
    tensors: dict[str, Tensor]
    aligned: Aligned

    dense = _Named()
    label = _Named()
    weight = _Named()
    timestamp = _Named()
    group = _Named()

    def __init__(
        self,
        dense: Tensor | EllipsisType | None = ...,
        ids: JaggedBatch | None = None,
        label: Tensor | EllipsisType | None = ...,
        weight: Tensor | EllipsisType | None = ...,
        timestamp: Tensor | EllipsisType | None = ...,
        group: Tensor | EllipsisType | None = ...,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        aligned: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        if ids is None:
            raise errors.InvalidArgument("a Batch needs ids: a JaggedBatch")
        self.ids = ids
        self.tensors = {_name(n): t for n, t in (tensors or {}).items()}
        for name, given in (
            ("dense", dense),
            ("label", label),
            ("weight", weight),
            ("timestamp", timestamp),
            ("group", group),
        ):
            if given is not ...:
                setattr(self, name, given)
        self.aligned = {
            feature: {_name(name): t for name, t in some.items()}
            for feature, some in (aligned or {}).items()
        }

    def __len__(self) -> int:
        """The number of samples, B."""
        return self.ids.stride()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of a name.

        Raises:
            MissingFeature: the batch has none.
        """
        try:
            return self.tensors[name]
        except (KeyError, TypeError):
            raise errors.MissingFeature(
                f"the batch has no tensor {name!r}; it has "
                f"{sorted(self.tensors)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.tensors

    if not TYPE_CHECKING:  # where batch[name] says that there is one

        def __getattr__(self, name: str) -> Tensor:
            tensors = self.__dict__.get("tensors", {})
            if name in tensors:
                return tensors[name]
            raise AttributeError(
                f"a Batch has no attribute {name!r}, and this one no tensor "
                f"of that name; it has {sorted(tensors)}"
            )

        def __setattr__(self, name: str, value: Any) -> None:
            known = name in _FIELDS or hasattr(type(self), name)
            if isinstance(value, Tensor) and not known:
                self.tensors[_name(name)] = value  # so that it travels, too
            else:
                object.__setattr__(self, name, value)

    def __copy__(self) -> Batch:
        """Another one, with the same tensors."""
        return self._mapped(self.ids, lambda t: t)

    def to(
        self, device: torch.device | str, non_blocking: bool = False
    ) -> Batch:
        """The batch on ``device``; tensors that are there already are
        shared.
        """
        return self._mapped(
            self.ids.to(device, non_blocking),
            lambda t: t.to(device, non_blocking=non_blocking),
        )

    def skip(self) -> None:
        """Gives this batch up: no backward will follow.

        A :class:`persia.DataLoader` that looked it up then need not wait for
        its gradients; a later backward of it raises TicketError. Batches of
        other sources are not concerned.
        """
        skip(self.ids)

    def pin_memory(self) -> Batch:
        """The batch with its tensors in page-locked memory (needs CUDA, as
        torch's own); its ids stay as they are, since they do not travel, and
        so do tensors on a device.
        """
        return self._mapped(
            self.ids.pin_memory(),
            lambda t: t if t.device.type != "cpu" else t.pin_memory(),
        )

    def _mapped(
        self, ids: JaggedBatch, change: Callable[[Tensor], Tensor]
    ) -> Batch:
        return Batch(
            ids=ids,
            tensors={n: change(t) for n, t in self.tensors.items()},
            aligned={
                feature: {n: change(t) for n, t in some.items()}
                for feature, some in self.aligned.items()
            },
        )


def _name(name: str) -> str:
    """A name that a tensor can have."""
    if kind("a tensor's name", name, str, "a string") == "ids":
        raise errors.InvalidArgument(
            "a tensor cannot have the name 'ids', which is that of the "
            "features; give it another"
        )
    if _ODD.search(name):
        raise errors.InvalidArgument(
            f"the name of the tensor {name!r} has a character that no name "
            "has: U+0000, U+001F or a lone surrogate; give it another"
        )
    return name


def flat(batch: Batch) -> dict[str, Tensor]:
    """All tensors by one name each, as they are sent."""
    out = dict(batch.tensors)
    for feature, some in batch.aligned.items():
        out |= {f"{feature}{_UNIT}{name}": t for name, t in some.items()}
    return out


def of_flat(ids: JaggedBatch, tensors: Mapping[str, Tensor]) -> Batch:
    """The batch that :func:`flat` gave these tensors of."""
    out = Batch(ids=ids)
    for name, tensor in tensors.items():
        feature, unit, rest = name.rpartition(_UNIT)
        if unit:
            out.aligned.setdefault(feature, {})[rest] = tensor
        else:
            out.tensors[name] = tensor
    return out


def check_tensors(batch: Batch) -> None:
    """Raises unless a batch can be sent: tensors have as many entries as
    there are samples, or ids.

    Raises:
        ShapeError: one has not, or has more than 16 dimensions.
        DtypeError: one is sparse or nested.
        InvalidArgument: a name that no tensor has.
        MissingFeature: there is no feature that one is aligned with.
    """
    samples = batch.ids.stride()
    for name, tensor in batch.tensors.items():
        _check(_name(name), tensor, samples, f"{samples} samples")
    if not batch.aligned:
        return
    counts = dict(zip(batch.ids, batch.ids.length_per_key(), strict=True))
    for feature, some in batch.aligned.items():
        if feature not in counts:
            raise errors.MissingFeature(
                f"{sorted(some)} are aligned with the feature {feature!r}, "
                f"and the ids have {list(counts)}"
            )
        n = counts[feature]
        for name, tensor in some.items():
            what = f"{_name(name)} of {feature!r}"
            _check(what, tensor, n, f"{n} ids of the feature")


def _check(what: str, tensor: Tensor, n: int, of: str) -> None:
    if tensor.layout != torch.strided:
        raise errors.DtypeError(
            f"{what} has the layout {tensor.layout}, need a dense tensor"
        )
    if not 0 < tensor.ndim <= _DIMS or len(tensor) != n:
        raise errors.ShapeError(
            f"{what}: its shape is {list(tensor.shape)}; need an entry for "
            f"each of the {of}, and at most {_DIMS} dimensions"
        )


def part_of(batch: Batch, first: int, end: int) -> Batch:
    """Samples first to end of a batch."""
    ids, lengths = batch.ids, batch.ids.lengths()
    at = torch.arange(len(batch))
    bags = ((at >= first) & (at < end)).repeat(len(ids.keys()))
    kept = bags.repeat_interleave(lengths)
    weights = ids.weights_or_none()
    places = dict(zip(ids, ids.offset_per_key(), strict=False))
    return Batch(
        ids=JaggedBatch(
            ids.keys(),
            ids.values()[kept],
            None if ids.lengths_or_none() is None else lengths[bags],
            weights=None if weights is None else weights[kept],
        ),
        tensors={n: t[first:end] for n, t in batch.tensors.items()},
        aligned={
            feature: {
                name: t[kept[places[feature] : places[feature] + len(t)]]
                for name, t in some.items()
            }
            for feature, some in batch.aligned.items()
        },
    )


def _flatten(batch: Batch) -> tuple[list[Any], list[str]]:
    named = flat(batch)
    return [batch.ids, *named.values()], list(named)


def _unflatten(parts: list[Any], names: list[str]) -> Batch:
    return of_flat(parts[0], dict(zip(names, parts[1:], strict=True)))


register_tree(Batch, _flatten, _unflatten)
