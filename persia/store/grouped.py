"""Distinct rows of a batch that are pooled on the device: where ids repeat,
fewer bytes travel so than as pooled values.

Rows travel as float32, so that the output has the bits of one that was
pooled on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persia.base.tensors import to_device
from persia.store.device import Link
from persia.store.operators import ops, typed


@dataclass(frozen=True)
class Columns:
    """The output of a module.

    Attributes:
        features: int32 [F, 3], on the host: pooling, dim, first column.
        columns: of the output.
        width: the largest dim.
    """

    features: Tensor
    columns: int
    width: int


@dataclass
class Grouped:
    """The ids of a batch, by table.

    Attributes:
        ids: int64 [R], distinct in each table, on the host as ``starts``.
        starts: int64 [tables + 1], where those of each table begin.
        places: int32 [N] of each id of the batch among them, feature after
            feature; int32 [F * B + 1] offsets (empty: one id a bag); float32
            [N] weights (empty: none). On the host until they are sent.
        bags: B.
    """

    ids: Tensor
    starts: Tensor
    places: tuple[Tensor, Tensor, Tensor]
    bags: int
    arrived: Any = None  # the event of their copy

    @classmethod
    def of(
        cls,
        values: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        keys: int,
        store: int,
        plan: int,
    ) -> Grouped:
        """Groups the ids of a batch on the host."""
        try:
            ids, starts, *places = ops.distinct_v1(
                values, offsets, weights, store, plan
            )
        except RuntimeError as error:
            raise typed(error) from None
        bags = values.numel() if offsets is None else offsets.numel() - 1
        inverse, bounds, scales = places
        return cls(ids, starts, (inverse, bounds, scales), bags // keys)

    def travels(self, out: Columns, bytes_: int) -> bool:
        """Whether fewer bytes travel than as pooled values, whose elements
        have so many bytes."""
        inverse, bounds, _ = self.places
        return bool(
            ops.rows_travel_v1(
                self.bags * out.columns * bytes_ // 4,
                len(self.ids) * out.width,
                len(inverse),
                max(len(bounds) - 1, 0),
                4,
            )
        )

    def send(self, link: Link) -> None:
        """Starts the copy of the places."""
        if link.side is None:
            return
        with link.aside():
            inverse, bounds, scales = (
                to_device(x, link.device) for x in self.places
            )
            self.places = inverse, bounds, scales
            self.arrived = link.side.record_event()

    def arrive(self, link: Link) -> None:
        """The stream that computes now uses the places."""
        if self.arrived is not None:
            torch.cuda.current_stream(link.device).wait_event(self.arrived)
            for x in self.places:
                link.arrived(x)


class _Pool(torch.autograd.Function):
    """Distinct rows, float32 [R, width], to pooled values [B, columns]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: Grouped,
        features: Tensor,
        columns: int,
        link: Link,
    ) -> Tensor:
        ctx.of = group, features, rows.shape, link
        out: Tensor = ops.pool_v1(
            rows,
            *group.places,
            features,
            group.bags,
            columns,
            link.kind,
            link.stream(),
        )
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, features, (rows, width), link = ctx.of
        inverse, bounds, scales = group.places
        # Sorted without a change of order, so a row's gradients are added in
        # the order of its ids, as on the host.
        places, order = torch.sort(inverse, stable=True)
        numbers = torch.arange(
            max(rows, len(inverse)) + 1, dtype=torch.int32, device=grad.device
        )
        starts = torch.searchsorted(
            places, numbers[: rows + 1], out_int32=True
        )
        bag = bounds
        if len(bounds):
            bag = torch.searchsorted(
                bounds[1:], numbers[: len(inverse)], right=True, out_int32=True
            )
        sums = ops.sum_v1(
            grad.contiguous(),
            order,
            starts,
            bag,
            bounds,
            scales,
            features,
            group.bags,
            width,
            link.kind,
            link.stream(),
        )
        return sums, None, None, None, None


def pooled(
    rows: Tensor, group: Grouped, features: Tensor, columns: int, link: Link
) -> Tensor:
    """Pooled values, float32 [B, columns], of rows on the device."""
    group.arrive(link)
    out: Tensor = _Pool.apply(rows, group, features, columns, link)  # type: ignore[no-untyped-call]
    return out
