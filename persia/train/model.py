"""The models that ``persia train`` knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

import persia
from persia import errors, models, optim
from persia.base.cpus import processors
from persia.train.config import TrainConfig

MODELS: dict[str, Callable[..., nn.Module]] = {
    "dlrm": models.DLRM,
    "deepfm": models.DeepFM,
    "dcn": models.DCNv2,
    "widedeep": models.WideDeep,
    "mmoe": models.MMoE,
    "sharedbottom": models.SharedBottom,
}
_OF_TASKS = ("mmoe", "sharedbottom")


def make_optimizer(config: TrainConfig) -> optim.SparseOptimizer:
    """That of the embeddings."""
    eps = {} if config.eps is None else {"eps": config.eps}
    kind: Callable[..., optim.SparseOptimizer]
    kind = optim.ALGORITHMS[config.optimizer]
    return kind(lr=config.learning_rate, **eps)


def make_model(
    config: TrainConfig,
    store: persia.Store,
    keys: Iterable[str],
    dense_features: int,
    tasks: Sequence[str] = (),
) -> nn.Module:
    """A model with a table for each key, all in ``store``.

    Args:
        config: of the run.
        store: of the tables.
        keys: the features.
        dense_features: the number of dense columns.
        tasks: the names of the labels, where a sample has several.

    Raises:
        InvalidArgument: the model has one logit, and there are several tasks.
    """
    options = {}
    if config.model in _OF_TASKS:
        options["tasks"] = len(tasks) or 1
    elif tasks:
        raise errors.InvalidArgument(
            f"`model={config.model}` predicts one label, and the data have "
            f"{', '.join(tasks)}: choose `model={' or '.join(_OF_TASKS)}`, or "
            "one of them with `label`"
        )
    bags = persia.EmbeddingBagCollection(
        store=store,
        tables=[
            persia.EmbeddingBagConfig(
                key, config.dim, [key], **config.table_options()
            )
            for key in keys
        ],
    )
    return MODELS[config.model](bags, dense_features, **options)


# Floating-point operations of a step that are worth a thread: with fewer, the
# threads of one operation wait for each other longer than they compute.
_WORTH_A_THREAD = 50_000_000


def threads_of(model: nn.Module, batch_size: int) -> int:
    """How many threads of torch compute a model: as many as the processors
    that this process may use, and as a step has work for; or what
    ``OMP_NUM_THREADS`` says, which torchrun sets, too."""
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return threads
    parameters = sum(p.numel() for p in model.parameters())
    work = 6 * parameters * batch_size  # 2 forward, 4 backward
    most = min(threads, int(processors()), work // _WORTH_A_THREAD)
    return max(1, most)


def device_of(name: str) -> torch.device:
    """The device of the dense part: "cpu", "cuda" (that of this rank) or
    "auto".

    Raises:
        InvalidArgument: "cuda", and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise errors.InvalidArgument(
            "`device=cuda`: torch finds no CUDA device here (persia doctor "
            "says more)"
        )
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # a device a rank
        name = f"cuda:{int(os.environ['LOCAL_RANK'])}"
        torch.cuda.set_device(torch.device(name))
    return torch.device(name)
