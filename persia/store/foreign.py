"""Configs of torchrec, read as ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from persia import errors

_init = torch.nn.init
# torch's functions: the form of init=, and which of their arguments it has.
_FORMS: dict[Callable[..., Any], tuple[str, tuple[str, ...]]] = {
    _init.uniform_: ("uniform", ("a", "b")),
    _init.normal_: ("normal", ("mean", "std")),
    _init.constant_: ("constant", ("val",)),
}
_CONSTANTS = {_init.zeros_: 0.0, _init.ones_: 1.0}


def is_foreign(config: Any) -> bool:
    """Whether it looks like a config of torchrec."""
    return hasattr(config, "embedding_dim") and hasattr(
        config, "feature_names"
    )


def options_of(config: Any) -> dict[str, Any]:
    """The fields of a :class:`~persia.store.configs.TableConfig`; pooling
    apart.

    Raises:
        InvalidArgument: it asks for what no table here does.
    """
    _check(config)
    options: dict[str, Any] = {
        "name": config.name,
        "embedding_dim": config.embedding_dim,
        "feature_names": list(config.feature_names),
        "num_embeddings": getattr(config, "num_embeddings", 0),
    }
    if hasattr(config, "data_type"):
        options["data_type"] = config.data_type
    low = getattr(config, "weight_init_min", None)
    high = getattr(config, "weight_init_max", None)
    if (init := getattr(config, "init_fn", None)) is not None:
        options["init"] = _init_of(f"table {config.name!r}", init)
    elif low is not None and high is not None:
        options["init"] = ("uniform", low, high)
    return options


def _check(config: Any) -> None:
    where = f"table {getattr(config, 'name', '')!r}"
    given = [
        name
        for name in ("need_pos", "virtual_table_eviction_policy")
        if getattr(config, name, None)
    ]
    if given:
        raise errors.InvalidArgument(
            f"{where}: {' and '.join(given)} cannot be honoured here; leave "
            "it out, or describe the table with a persia.EmbeddingBagConfig "
            "(eviction=)"
        )


def _init_of(where: str, init: Any) -> tuple[Any, ...]:
    """What ``init=`` says, of one of torch's functions or a partial of it."""
    function = getattr(init, "func", init)
    if function in _CONSTANTS:
        return "constant", _CONSTANTS[function]
    if function not in _FORMS:
        raise errors.InvalidArgument(
            f"{where}: init_fn is {init!r}, need torch.nn.init.uniform_, "
            "normal_, constant_, zeros_, ones_ or a functools.partial of one; "
            "or give the rows with store.set_rows"
        )
    form, names = _FORMS[function]
    signature = inspect.signature(function)
    bound = signature.bind_partial(
        None, *getattr(init, "args", ()), **getattr(init, "keywords", {})
    )
    bound.apply_defaults()
    return form, *(bound.arguments[name] for name in names)


def positional(config: Any) -> None:
    """Arguments in torchrec's order, put into the fields that they mean:
    ``num_embeddings, embedding_dim, name, data_type, feature_names``.
    """
    count, name = config.name, config.feature_names
    data_type, features = config.num_embeddings, config.init
    config.name = name if isinstance(name, str) else ""
    config.num_embeddings = count
    if data_type != 0:
        config.data_type = data_type
    config.feature_names, config.init = [], 0.01
    if isinstance(features, list | tuple):
        config.feature_names = list(features)
