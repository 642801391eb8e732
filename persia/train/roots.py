"""The checkpoint roots that a run of ``persia train`` saves into: a run never
removes or hides what another one has saved there, unless an option says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from persia import checkpoint, errors
from persia.base.urls import Url
from persia.checkpoint import files
from persia.checkpoint.manifest import MANIFEST, Manifest
from persia.distributed.ranks import side_group
from persia.train.config import TrainConfig
from persia.train.extra import Extra

T = TypeVar("T")

_REMEDY = (
    "continue that run (`resume=auto`), name another folder, or let the first "
    "save remove what is there (`overwrite`)"
)


def best_root(root: str) -> str:
    """The path or URI of the best model of runs that save to ``root``."""
    url = Url(root)
    return url.at(f"{url.path.rstrip('/')}-best")


def newest(root: str) -> str | None:
    """The newest checkpoint of a root, to continue from; None: there is none.

    Raises:
        StorageError: the root cannot be read.
    """
    place = files.root_of(root)
    steps = place.steps()
    if not steps:
        return None
    if place.read(files.LATEST) is None:  # killed before it was written
        return os.fspath(place.at(f"step-{steps[-1]}"))
    return root


def agreed(ranks: int, what: Callable[[], T]) -> T:
    """What a call returns, on all ranks; the error of any on all."""
    error: errors.PersiaError | None = None
    result: Any = None
    try:
        result = what()
    except errors.PersiaError as raised:
        error = raised
    if ranks > 1:
        group = torch.distributed
        every: list[Any] = [None] * ranks
        group.all_gather_object(
            every, (error, result), group=side_group(group)
        )
        error = next((one for one, _ in every if one is not None), None)
        if error is None and any(other != result for _, other in every):
            raise errors.StorageError(
                "the ranks find different checkpoints: `save` and `resume` "
                "need a folder that all of them share"
            )
    if error is not None:
        raise error
    found: T = result
    return found


class Roots(NamedTuple):
    """What the roots of a run hold, before it begins.

    Attributes:
        removed: the steps that the first save into a root removes, by root.
        best: the best score that the root of the best model has, or None.
    """

    removed: dict[str, list[int]]
    best: float | None

    @classmethod
    def of(
        cls, config: TrainConfig, resume: str | None, overwrite: bool
    ) -> Roots:
        """Looks at them.

        Raises:
            InvalidArgument: ``overwrite`` without a root, or the root is a
                checkpoint itself.
            StorageError: they hold what this run does not continue.
        """
        root = config.save
        if root is None:
            if overwrite:
                raise errors.InvalidArgument("`overwrite` goes with `save`")
            return cls({}, None)
        place = files.root_of(root)
        if place.read(MANIFEST) is not None:
            raise errors.InvalidArgument(
                f"`save={root}` is the folder of one checkpoint; name the "
                "folder above it, or another one"
            )
        place.check_place()
        from_ = None if resume is None else _manifest(resume)
        removed = {}
        if steps := place.steps():
            if overwrite:
                removed[root] = steps
            else:
                _check_continues(root, steps, from_)
        best = best_root(root)
        if not config.keep_best or not (steps := files.root_of(best).steps()):
            return cls(removed, None)
        if overwrite:
            return cls(removed | {best: steps}, None)
        return cls(removed, _best_score(best, config, from_))

    def lines(self) -> list[str]:
        """What is done to checkpoints that are there."""
        return [
            f"`overwrite`: the first save into {root} removes "
            f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''} of an "
            f"earlier run, the newest of step {steps[-1]}"
            for root, steps in self.removed.items()
        ]


def _manifest(path: str) -> Manifest:
    return files.find(files.root_of(path), None).manifest


def _check_continues(
    root: str, steps: list[int], from_: Manifest | None
) -> None:
    """Raises unless a run continues from the newest checkpoint of a root."""
    if from_ is None:
        raise errors.StorageError(
            f"`save={root}` has checkpoints of an earlier run, the newest of "
            f"step {steps[-1]}: {_REMEDY}"
        )
    there = newest(root)
    assert there is not None
    if _manifest(there).id != from_.id:
        raise errors.StorageError(
            f"`resume` continues from a checkpoint of step {from_.step}, and "
            f"`save={root}` has others, the newest of step {steps[-1]}: "
            f"{_REMEDY}"
        )


def _best_score(
    root: str, config: TrainConfig, from_: Manifest | None
) -> float | None:
    """Of the root of the best model, which the run that is continued made."""
    there = newest(root)
    assert there is not None
    if from_ is None or _manifest(there).training != from_.training:
        raise errors.StorageError(
            f"{root} has the best model of another run, which `keep_best` "
            f"would replace: {_REMEDY}"
        )
    best = Extra.of(checkpoint.read_extra(there), there).best or {}
    if best.get("metric") != config.best_by:
        raise errors.StorageError(
            f"{root} has the best model by {best.get('metric')}, which "
            f"`best_by={config.best_by}` would replace: {_REMEDY}"
        )
    value: float | None = best["value"]
    return value
