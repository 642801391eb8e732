"""Tables from torch's own embeddings, and back."""

from __future__ import annotations

import gc
import types
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from persia import errors
from persia.base.tensors import integers, vector
from persia.nn import embedding as ours
from persia.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from persia.nn.exported import as_parameters
from persia.nn.lookups import Collection
from persia.nn.weights import refuse_write
from persia.optim import SparseOptimizer
from persia.store.configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    TableConfig,
    as_config,
)
from persia.store.default import default_store
from persia.store.engine import engine_of
from persia.store.setting import set_absent, warn_of_kept
from persia.store.store import Store

_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: ours.Embedding,
    nn.EmbeddingBag: ours.EmbeddingBag,
}
#: What tables cannot do: such modules stay torch's.
_ALONE = ("max_norm", "scale_grad_by_freq")


def convert(
    module: nn.Module,
    *,
    store: Store | None = None,
    optimizer: SparseOptimizer | None = None,
    prefix: str = "",
    share: bool = False,
) -> nn.Module:
    """Moves the weights of all embeddings of a model into tables, in place.

    Each ``nn.Embedding`` and ``nn.EmbeddingBag`` becomes the module of that
    name of ``persia.nn``: the same object with the same call signature.
    One table has the rows of each distinct weight, so tied weights stay tied,
    also where another layer (a ``Linear``) shares them. The weights become
    rows where there are none yet; rows that the store or its servers have
    already stay, with a warning if they differ.

    Args:
        module: any model; converted itself if it is an embedding.
        store: where the tables go; None: a private store, or that of the
            servers of this process (see :class:`persia.Store`).
        optimizer: of the private store.
        prefix: of the tables' names, which are the modules' (``emb.user``),
            or the class's where the model is an embedding itself. Two models
            of one store have tables of other names.
        share: as of :class:`persia.EmbeddingCollection`.

    Returns:
        ``module``. Make the optimizer of its other parameters after this.

    Raises:
        InvalidArgument: a table of the store is that of another module; the
            model is as it was.

    Warns:
        Of modules that stay torch's: those with max_norm or
        scale_grad_by_freq, frozen ones, and subclasses with a forward of
        their own. Of rows that stayed as they were. Of lists, such as an
        optimizer's or a regulariser's, that still hold a weight which is not
        trained any more.
    """
    found = _weights_of(module)
    if not found:
        return module
    configs = {
        key: EmbeddingConfig(
            prefix + (name or type(modules[0]).__name__), weight.shape[1]
        )
        for key, (name, weight, modules) in found.items()
    }
    dtypes = {key: weight.dtype for key, (_, weight, _) in found.items()}
    rows = _tables(configs, dtypes, store, optimizer, share)
    kept = {}
    for key, (_, weight, _) in found.items():
        table = rows[key].tables[0].name
        numbers = torch.arange(len(weight), device="cpu")
        kept[table] = set_absent(rows[key].store, table, numbers, weight)
    warn_of_kept(next(iter(rows.values())).store, "convert", kept)
    for key, (name, weight, modules) in found.items():
        for one in modules:
            _switch(one, rows[key])
        for one in list(module.modules()):
            _tie(one, weight, rows[key])
        _warn_of_holders(name, weight, modules)
    return module


#: Name, weight and modules by the weight's identity.
_Found = dict[int, tuple[str, nn.Parameter, list[nn.Module]]]


def _weights_of(module: nn.Module) -> _Found:
    """What becomes tables; warns of what does not."""
    found: _Found = {}
    for name, one in module.named_modules():
        if not isinstance(one, nn.Embedding | nn.EmbeddingBag):
            continue
        if isinstance(one, ours.Embedding | ours.EmbeddingBag):
            continue
        if reason := _why_not(one):
            warnings.warn(
                f"{name or type(one).__name__} stays torch's: {reason}",
                stacklevel=3,
            )
            continue
        weight = one.get_parameter("weight")
        found.setdefault(id(weight), (name, weight, []))[2].append(one)
    return found


def _why_not(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    for name in _ALONE:
        if getattr(module, name):
            return f"it has {name}, which tables have not"
    kind = next(k for k in _KINDS if isinstance(module, k))
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} has a forward of its own"
    if not module.weight.requires_grad:
        return "its weight is frozen"
    if not module.weight.is_floating_point():
        return "its weight is not of floats"
    return None


def _tables(
    configs: dict[int, EmbeddingConfig],
    dtypes: dict[int, torch.dtype],
    store: Store | None,
    optimizer: SparseOptimizer | None,
    share: bool,
) -> dict[int, EmbeddingCollection]:
    """A table each, all of one store."""
    if store is None:
        if share:
            raise errors.InvalidArgument(
                "share=True needs store=: a model without one has a store of "
                "its own"
            )
        store, named = default_store(optimizer, list(configs.values()))
        configs = dict(zip(configs, named, strict=True))
    elif optimizer is not None:
        raise errors.InvalidArgument(
            "optimizer= is for a model with a store of its own; a Store has "
            "its optimizer"
        )
    elif not share:
        engine_of(store).check_free({c.name: c for c in configs.values()})
    return {
        key: ours.make_rows(
            config, store, share=share, output_dtype=dtypes[key]
        )
        for key, config in configs.items()
    }


def _switch(module: nn.Module, rows: EmbeddingCollection) -> None:
    """The object stays, with its hooks; its class and its weight change."""
    theirs = type(module)
    kind = next(k for k in _KINDS if isinstance(module, k))
    mixed = _KINDS[kind]
    if theirs is not kind:
        mixed = type(theirs.__name__, (mixed, theirs), {})
    del module.weight
    module.__class__ = mixed
    module.__dict__["_torch_class"] = theirs
    module.add_module("rows", rows)
    assert isinstance(module, ours.Embedding | ours.EmbeddingBag)
    module.name_anchor()
    module.__dict__["_torch_sparse"], module.sparse = module.sparse, False


def _tie(module: nn.Module, weight: Tensor, rows: EmbeddingCollection) -> None:
    """Another layer that has the weight as its own parameter looks it up."""
    theirs = type(module)
    for name, parameter in list(
        module.named_parameters(recurse=False, remove_duplicate=False)
    ):
        if parameter is not weight:
            continue
        count = len(weight)

        def looked(self: nn.Module, count: int = count) -> Tensor:
            return ours.weight_of(rows, count)

        def refused(self: nn.Module, value: Tensor) -> None:
            raise refuse_write(rows, rows.tables[0].name)

        delattr(module, name)
        module.__class__ = type(
            theirs.__name__, (type(module),), {name: property(looked, refused)}
        )
        module.__dict__.setdefault("_torch_class", theirs)
        tied = module.__dict__.setdefault("_torch_tied", {})
        tied[name] = rows


def _warn_of_holders(
    name: str, weight: Tensor, modules: list[nn.Module]
) -> None:
    """Names what still has the old weight: it is trained no more there."""
    holders = []
    for one in gc.get_referrers(weight):
        if isinstance(one, types.FrameType | types.CellType | tuple):
            continue
        if one is modules or not isinstance(one, list | set | dict):
            continue
        if isinstance(one, dict) and "weight" in one and "modules" in one:
            continue  # the local names of a frame
        owners = [
            type(owner).__name__
            for thing in gc.get_referrers(one)
            if isinstance(thing, dict)
            for owner in gc.get_referrers(thing)
            if getattr(owner, "__dict__", None) is thing
        ]
        what = f"a {type(one).__name__}"
        holders.append(f"{what} of {owners[0]}" if owners else what)
    if holders:
        warnings.warn(
            f"the weight of {name or 'the module'} is a table now, but "
            f"{', '.join(sorted(set(holders)))} still has the old one: what "
            "it does (an update, a penalty) does not reach the rows; make it "
            "after convert(), and use weight_decay= of persia.optim for a "
            "penalty",
            stacklevel=3,
        )


def export_torch(module: nn.Module) -> nn.Module:
    """Gives a model torch's own modules in place of Persia's, in place.

    An ``nn.Embedding`` or ``nn.EmbeddingBag`` that was converted, and a
    :class:`persia.nn.Embedding` or ``EmbeddingBag``, becomes torch's class.
    An :class:`EmbeddingBagCollection` or :class:`EmbeddingCollection` is
    replaced by a module with the same forward, whose parameters have the
    names of torchrec's: ``embedding_bags.<table>.weight`` or
    ``embeddings.<table>.weight``.

    Weights are the rows 0 to num_embeddings - 1 as they are now; the store
    stays open. A warning counts rows of other ids, which a weight cannot
    hold.

    Returns:
        ``module``, with the weights as parameters; a collection itself is not
        changed, and the module in its place is returned.

    Raises:
        InvalidArgument: it has no module of Persia; or a table of a
            collection has no ``num_embeddings``. The model is as it was.
    """
    apart = [
        m
        for m in module.modules()
        if "_torch_class" in m.__dict__
        or isinstance(m, ours.Embedding | ours.EmbeddingBag)
    ]
    within = set(ours.tables_of(module))
    collections = [
        m
        for m in module.modules()
        if isinstance(m, EmbeddingBagCollection | EmbeddingCollection)
        and m not in within
    ]
    if not apart and not collections:
        raise errors.InvalidArgument(
            "no module of this model is Persia's: neither a collection, nor "
            "an Embedding, nor made by persia.convert()"
        )
    outside: dict[str, int] = {}
    weights: dict[int, nn.Parameter] = {}
    for one in apart:
        if isinstance(one, ours.Embedding | ours.EmbeddingBag):
            (table,) = one.rows.tables
            found = _weight(one.rows, table.name, one.num_embeddings, outside)
            weights[id(one.rows)] = nn.Parameter(found)
    replaced: dict[nn.Module, nn.Module] = {
        m: _exported(m, outside) for m in collections
    }
    if outside:
        warnings.warn(
            f"export_torch leaves out {sum(outside.values()):,} rows, of ids "
            "that are no numbers of a row of their weight: "
            + ", ".join(f"{n:,} of table {t!r}" for t, n in outside.items())
            + ". Hashed ids have no place there; store.to_torch(table) gives "
            "all rows with their ids",
            stacklevel=2,
        )
    for one in apart:
        _switch_back(one, weights)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child in replaced:
                setattr(parent, name, replaced[child])
    return replaced.get(module, module)


def _weight(
    rows: Collection, table: str, count: int, outside: dict[str, int]
) -> Tensor:
    """Rows 0 to count - 1 in the dtype of the module, [count, dim]; notes how
    many others there are."""
    ids = rows.store.ids(table)
    if n := int(((ids < 0) | (ids >= count)).sum()):
        outside[table] = n
    found = rows.store.rows(table, torch.arange(count, device="cpu"))
    return found.to(device=rows.device, dtype=rows.output_dtype)


def _exported(collection: Collection, outside: dict[str, int]) -> nn.Module:
    """The module in place of a collection."""
    for config in collection.tables:
        if not config.num_embeddings:
            raise errors.InvalidArgument(
                f"table {config.name!r} has no num_embeddings, and a weight "
                "has as many rows: give it in its config, or take all rows "
                f"with their ids by store.to_torch({config.name!r})"
            )
    weights = {
        c.name: _weight(collection, c.name, c.num_embeddings, outside)
        for c in collection.tables
    }
    return as_parameters(collection, weights)


def _switch_back(module: nn.Module, weights: dict[int, nn.Parameter]) -> None:
    """The object stays; its class and its weight are torch's again."""
    tied = module.__dict__.pop("_torch_tied", {})
    theirs = module.__dict__.pop("_torch_class", None)
    if isinstance(module, ours.Embedding | ours.EmbeddingBag):
        tied = tied or {"weight": module.rows}
        module.sparse = module.__dict__.pop("_torch_sparse", False)
        if theirs is None:  # it was made as it is
            theirs = next(k for k in _KINDS if isinstance(module, k))
        del module.rows
    module.__class__ = theirs
    for name, rows in tied.items():
        module.register_parameter(name, weights[id(rows)])


def from_torch(
    module: nn.Module,
    ids: Tensor | None = None,
    *,
    name: str | None = None,
    feature_names: list[str] | None = None,
    store: Store | None = None,
    optimizer: SparseOptimizer | None = None,
    share: bool = False,
) -> EmbeddingBagCollection | EmbeddingCollection:
    """A collection whose rows are the weights of a torch module: of an
    ``nn.Embedding``, which does not pool, an :class:`EmbeddingCollection`.

    Args:
        module: an ``nn.EmbeddingBag``, an ``nn.Embedding``, or torchrec's
            ``EmbeddingBagCollection``.
        ids: the id of each row, int64 [num_embeddings]; default: the row's
            number. For one table only.
        name: of the table; needed where the module has no names.
        feature_names: of that table; default: its name.
        store: where the rows go; None: a private store with ``optimizer``.
        optimizer: of the private store.
        share: as of :class:`persia.EmbeddingCollection`.

    Raises:
        InvalidArgument: another kind of module, or one with max_norm,
            padding_idx or scale_grad_by_freq; no name, or that of another
            module's table.
        ShapeError: ids of another number than the rows.

    Warns:
        Of rows that were there already, and stayed as they were.
    """
    weights: list[Tensor]
    configs: list[TableConfig]
    if name is None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise errors.InvalidArgument(
            "from_torch needs name=, that of the table: checkpoints and "
            "servers find the rows by it"
        )
    name = name or ""
    if isinstance(module, nn.Embedding):
        _check_settings(module)
        rows, dim = module.weight.shape
        configs = [EmbeddingConfig(name, dim, feature_names or [name], rows)]
        weights = [module.weight]
    elif isinstance(module, nn.EmbeddingBag):
        _check_settings(module)
        configs = [
            EmbeddingBagConfig(
                name,
                module.embedding_dim,
                feature_names or [name],
                module.num_embeddings,
                pooling=module.mode,
            )
        ]
        weights = [module.weight]
    elif hasattr(module, "embedding_bag_configs"):
        theirs: Any = module
        configs = [
            as_config(c, EmbeddingBagConfig)
            for c in theirs.embedding_bag_configs()
        ]
        weights = [theirs.embedding_bags[c.name].weight for c in configs]
        if ids is not None and len(configs) > 1:
            raise errors.InvalidArgument(
                "ids= is for one table; convert the tables one by one"
            )
    else:
        raise errors.InvalidArgument(
            f"cannot convert a {type(module).__name__}; need an "
            "nn.EmbeddingBag, an nn.Embedding or torchrec's "
            "EmbeddingBagCollection"
        )
    kind = (
        EmbeddingCollection
        if isinstance(module, nn.Embedding)
        else EmbeddingBagCollection
    )
    if ids is not None:
        ids = vector("ids", integers("ids", ids, "cpu"), "pass one a row")
        if len(ids) != len(weights[0]):
            raise errors.ShapeError(
                f"{len(ids)} ids for {len(weights[0])} rows of "
                f"{configs[0].name!r}"
            )
    out = kind(tables=configs, store=store, optimizer=optimizer, share=share)
    kept = {}
    for config, weight in zip(out.tables, weights, strict=True):
        wanted = torch.arange(len(weight)) if ids is None else ids
        kept[config.name] = set_absent(out.store, config.name, wanted, weight)
    warn_of_kept(out.store, "from_torch", kept)
    return out


def _check_settings(module: nn.EmbeddingBag | nn.Embedding) -> None:
    """Refuses a module whose settings would be lost."""
    remedies = {
        "max_norm": "pass persia.optim.*(max_norm=...) as optimizer",
        "padding_idx": "leave these ids out of the batches (padding_value=)",
        "scale_grad_by_freq": "a row has one gradient, the sum of its ids'",
    }
    for name, remedy in remedies.items():
        value = getattr(module, name)
        if value is not None and value is not False:
            raise errors.InvalidArgument(
                f"the module has {name}={value}, which "
                f"tables cannot have; {remedy}, and make the module without it"
            )
