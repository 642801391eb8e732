"""Loads of a part of a checkpoint: what fits, by name and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def names_of(parts: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the parameters of each optimizer, in its order; "" for
    one that is in no model."""
    known: dict[int, str] = {}
    for part, model in parts.items():
        if isinstance(model, nn.Module):
            several = part != "model"
            for name, one in model.named_parameters():
                known[id(one)] = f"{part}: {name}" if several else name
    return {
        part: [known.get(id(one), "") for one in _parameters(optimizer)]
        for part, optimizer in parts.items()
        if isinstance(optimizer, torch.optim.Optimizer)
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def fitted(
    part: Any,
    state: Any,
    saved: Sequence[str] | None,
    now: Sequence[str] | None,
) -> tuple[Any, list[str]]:
    """A state of which a part can be loaded, and what is left out.

    Args:
        part: an object with ``state_dict()``.
        state: that of a checkpoint.
        saved: of an optimizer: the names of its parameters then.
        now: and now.
    """
    if isinstance(part, nn.Module):
        return _of_model(part, state)
    if isinstance(part, torch.optim.Optimizer):
        if saved is None and now is not None:
            many = len(state["state"]) > len(now)
            return (part.state_dict(), ["all"]) if many else (state, [])
        if saved and now:
            return _of_optimizer(part, state, saved, now)
    return state, []


def _of_model(
    model: nn.Module, state: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    mine, left = model.state_dict(), []
    for name, value in mine.items():
        if name.endswith("_extra_state"):
            mine[name] = state.get(name, value)
        elif name not in state:
            left.append(f"{name} (not there)")
        elif state[name].shape != value.shape:
            shapes = tuple(state[name].shape), tuple(value.shape)
            left.append(f"{name} ({shapes[0]} there, {shapes[1]} here)")
        else:
            mine[name] = state[name]
    left += [f"{name} (not here)" for name in state if name not in mine]
    return mine, left


def _of_optimizer(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    saved: Sequence[str],
    now: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    mine, left = optimizer.state_dict(), []
    at = {name or i: i for i, name in enumerate(saved)}
    for i, (name, one) in enumerate(
        zip(now, _parameters(optimizer), strict=True)
    ):
        theirs = state["state"].get(at.get(name or i))
        if theirs is None:
            if one.numel() and state["state"]:
                left.append(name or str(i))
            continue
        if any(_other_shape(value, one) for value in theirs.values()):
            left.append(name or str(i))
        else:
            mine["state"][i] = theirs
    groups = mine["param_groups"], state["param_groups"]
    if len(groups[0]) == len(groups[1]):
        for group, theirs in zip(*groups, strict=True):
            group.update({k: v for k, v in theirs.items() if k != "params"})
    return mine, left


def _other_shape(value: Any, parameter: Tensor) -> bool:
    """Whether an optimizer's state is of a parameter of another shape."""
    is_number = not isinstance(value, Tensor) or value.dim() == 0
    return not is_number and value.shape != parameter.shape
