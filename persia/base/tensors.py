"""Checks of tensors where they are given, and of what becomes one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from persia import errors
from persia.base.torch_private import jit_traces

# Integer dtypes that widen to int64 without changing a value.
_WIDENED = (torch.int32, torch.int16, torch.int8, torch.uint8)
_HASH = "ids are int64: hash strings with persia.hash_ids first"


def in_graph() -> bool:
    """Whether torch records a graph (torch.compile, torch.export,
    torch.jit.trace): then nothing may depend on the elements of a tensor."""
    return torch.compiler.is_compiling() or jit_traces()


def tensor(
    what: str,
    x: Any,
    remedy: str,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Tensor:
    """``x`` as a tensor with elements; if it is none, made on ``device``."""
    if isinstance(x, Tensor):
        if x.is_meta:
            raise errors.InvalidArgument(
                f"{what} is on the meta device, where tensors have no "
                "elements; pass one on the CPU"
            )
        return x
    try:
        return torch.as_tensor(x, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(x, (list, tuple)):
            sizes = {len(e) for e in x if isinstance(e, (list, tuple))}
            if len(sizes) > 1:
                raise errors.ShapeError(
                    f"{what} is a list of lists of {min(sizes)} to "
                    f"{max(sizes)} elements; pad them to one length, or pass "
                    "a tuple (values, lengths)"
                ) from None
        if "verflow" in str(error):
            remedy = (
                "an element is outside of int64; of unsigned ids pass the "
                "same 64 bits, u - 2**64 for u >= 2**63"
            )
        raise errors.DtypeError(
            f"{what} is a {type(x).__name__} that makes no tensor of numbers "
            f"({error}); {remedy}"
        ) from None


def integers(what: str, x: Any, device: str | None = None) -> Tensor:
    """``x`` as an int64 tensor; DtypeError if that could change a value."""
    t = tensor(what, x, _HASH, device=device)
    if t.dtype == torch.int64:
        return t
    if t.dtype in _WIDENED:
        return t.to(torch.int64)
    if t.numel() == 0 and not isinstance(x, Tensor):  # [] has no dtype
        return t.to(torch.int64)
    remedy = (
        "pass t.view(torch.int64), the same 64 bits"
        if t.dtype == torch.uint64
        else "ids and lengths are integers: convert with .to(torch.int64)"
    )
    raise errors.DtypeError(
        f"{what} has dtype {t.dtype}, need torch.int64; {remedy}"
    )


def vector(what: str, t: Tensor, remedy: str) -> Tensor:
    """``t``, if it has one dimension."""
    if t.dim() != 1:
        raise errors.ShapeError(
            f"{what} has shape {tuple(t.shape)}, need one dimension; {remedy}"
        )
    return t


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on a device; the host does not wait for its copy to a GPU, which
    torch makes from pinned memory alone."""
    if (
        device.type == "cuda"
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
    ):
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
