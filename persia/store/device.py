"""The way of embeddings between the host and a device.

Values are sent from pinned memory on a stream of their own, and gradients are
fetched on another, which waits for their backward. Nothing else here waits for
a device but the update that needs a gradient.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from persia import errors
from persia.base.warning import warn
from persia.store.operators import ops, typed

_KINDS = {"host": 0, "cuda": 1}
_SENT = (torch.float32, torch.float16, torch.bfloat16)
open_links: dict[torch.device, Link | None] = {}
_opening = threading.RLock()  # of open_links


class Link:
    """The streams of one device.

    Args:
        kind: "cuda"; or "host", for tests: the host stands for a device.
        device: where its tensors are.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.kind = _KINDS[kind]
        self.device = device
        self.side: Any = None  # of what is sent
        self.back: Any = None  # of what is fetched
        handles = (0, 0)
        if kind == "cuda":
            stream: Any = torch.cuda.Stream
            self.side, self.back = stream(device), stream(device)
            handles = (self.side.cuda_stream, self.back.cuda_stream)
        try:
            self.number: int = ops.link_open_v1(
                self.kind, device.index or 0, *handles
            )
        except RuntimeError as error:
            raise typed(error) from None

    def stream(self) -> int:
        """The handle of the stream that computes now."""
        if self.side is None:
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def aside(self) -> Any:
        """A context in which tensors are allocated for what is sent."""
        if self.side is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.side)

    def arrived(self, tensor: Tensor) -> None:
        """The stream that computes now uses a tensor that was sent."""
        if self.side is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def leaves(self, tensor: Tensor) -> None:
        """The copy to the host uses a tensor that was computed."""
        if self.back is not None:
            tensor.record_stream(self.back)


def link_of(device: torch.device) -> Link | None:
    """The link of a device; None: values go there by torch's copies."""
    if device.type != "cuda":
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _opening:
        if device not in open_links:
            open_links[device] = _open(device)
        return open_links[device]


def _open(device: torch.device) -> Link | None:
    try:
        return Link("cuda", device)
    except errors.Unavailable as error:
        warn(
            f"embeddings go to {device} by torch's copies, for which "
            f"each forward and backward waits: {error}. Build persia "
            "where nvcc is (docs/howto/gpu.md)"
        )
        return None


class Flight:
    """A gradient on its way to the host; given up with the object, unless it
    is pushed."""

    __slots__ = ("_grad", "_number", "link", "there")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.there: Tensor | None = None  # the values, until they are handed
        self._number = 0
        self._grad: Tensor | None = None

    def start(self, grad: Tensor) -> None:
        """Starts the copy of a gradient on the device."""
        self.give_up()
        self._grad = grad.contiguous()
        self._number = ops.fetch_v1(
            self._grad, self.link.number, self.link.stream()
        )
        self.link.leaves(self._grad)

    def take(self) -> tuple[Tensor | None, int, int]:
        """What is to be kept until it is here; its number; its link. Once."""
        number, self._number = self._number, 0
        grad, self._grad = self._grad, None
        # torch's allocator knows of copies on a device, see leaves().
        return (
            grad if self.link.side is None else None,
            number,
            self.link.number,
        )

    def give_up(self) -> None:
        """Nothing will push it."""
        grad, number, link = self.take()  # which waits as long as it is used
        if number:
            ops.drop_fetch_v1(number, link)
        del grad

    def __del__(self) -> None:
        self.give_up()


@dataclass(frozen=True)
class Way:
    """Where and as what the values of a module travel."""

    link: Link
    dtype: torch.dtype

    @classmethod
    def of(cls, link: Link, dtype: torch.dtype) -> Way:
        """As the output, if that is a dtype that travels; else float32."""
        return cls(link, dtype if dtype in _SENT else torch.float32)

    def flight(self) -> Flight:
        """For the gradient of one forward."""
        return Flight(self.link)

    def like(self) -> Tensor:
        """What values on the device are like."""
        return torch.empty(0, dtype=self.dtype, device=self.link.device)

    def prefetch(
        self,
        values: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        store: int,
        plan: int,
        number: int,
    ) -> None:
        """Adds a lookup to a data loader's batch; its values are sent."""
        with self.link.aside():
            ops.prefetch_to_v1(
                values,
                offsets,
                weights,
                self.like(),
                store,
                plan,
                number,
                self.link.number,
            )

    def pull(
        self,
        values: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        anchor: Tensor,
        ticket: Tensor,
        store: int,
        plan: int,
    ) -> tuple[Tensor, Tensor]:
        """The values on the device, and row numbers on the host."""
        stream = self.link.stream()
        with self.link.aside():
            there, rows = ops.pull_to_v1(
                values,
                offsets,
                weights,
                anchor,
                ticket,
                self.like(),
                store,
                plan,
                self.link.number,
                stream,
            )
        self.link.arrived(there)
        return there, rows
