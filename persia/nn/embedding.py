"""Drop-in embeddings: torch's call signature, rows in a table.

A module here *is* an ``nn.Embedding`` or ``nn.EmbeddingBag`` whose weight is a
table of a :class:`persia.Store`: the table's optimizer updates its rows, and
the module has no such parameter.  :func:`persia.convert` makes them of the
modules of any model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from persia import errors
from persia.base.tensors import in_graph, integers
from persia.base.torch_private import jit_traces
from persia.data.batches.jagged import PADDING, JaggedBatch, split_off
from persia.nn.arithmetic import check_in_place
from persia.nn.collections import EmbeddingCollection
from persia.nn.lookups import Collection
from persia.nn.tracing import leaf
from persia.nn.weights import Weight, refuse_write
from persia.optim import SparseOptimizer
from persia.store.configs import EmbeddingConfig
from persia.store.engine import engine_of
from persia.store.setting import set_absent, warn_of_kept
from persia.store.store import Store


class Rows(EmbeddingCollection):
    """The table of a module here, which resets it."""

    @property
    def reset_parameters(self) -> Any:
        """Of the module: who resets all modules of a model asks it, too."""
        raise AttributeError("reset_parameters")


def make_rows(
    config: EmbeddingConfig,
    store: Store | None,
    optimizer: SparseOptimizer | None = None,
    share: bool = False,
    output_dtype: torch.dtype = torch.float32,
) -> EmbeddingCollection:
    """A table of its own."""
    return Rows(
        [config],
        store=store,
        optimizer=optimizer,
        share=share,
        output_dtype=output_dtype,
    )


def _config(
    kind: str, name: str | None, dim: int, options: dict[str, Any]
) -> EmbeddingConfig:
    if name is None:
        raise errors.InvalidArgument(
            f"persia.nn.{kind} needs name=, that of its table: checkpoints "
            "and servers find the rows by it. Take that of the attribute, as "
            'in self.user = persia.nn.Embedding(..., name="user")'
        )
    return EmbeddingConfig(name, dim, **options)


def look_up(
    rows: EmbeddingCollection, ids: Tensor, padding: int | None = None
) -> Tensor:
    """float32 [n, dim] of integer ids [n], with gradient; ``padding`` is what
    was left out of them."""
    ids = ids.long()
    if (found := rows.taken_ahead(ids, padding)) is not None:
        return found
    return rows.vectors(ids)


def look_up_but(
    rows: EmbeddingCollection, ids: Tensor, there: Tensor
) -> Tensor:
    """float32 [n, dim] of integer ids [n], with gradient, but where ``there``
    [n] says so: no row is looked up for these. For graphs, which do not know
    how many they are."""
    at, left = split_off(~there)
    ids = torch.zeros_like(ids).scatter(0, at, ids).long()
    end = left.new_full((1,), ids.shape[0])
    offsets = torch.cat((end - end, end - left, end))
    (feature,) = rows.features
    batch = JaggedBatch([feature, PADDING], ids, offsets=offsets)
    found: Tensor = rows(batch).rows()[at]
    return found


def weight_of(rows: EmbeddingCollection, count: int) -> Tensor:
    """Rows 0 to ``count`` - 1, looked up with gradient; to read."""
    found = look_up(rows, torch.arange(count))
    return Weight.of(found, rows, rows.tables[0].name)


def tables_of(model: nn.Module) -> list[EmbeddingCollection]:
    """The tables of all modules here that a model has, each once."""
    found = [m.rows for m in model.modules() if isinstance(m, _Looked)]
    return list(dict.fromkeys(found))


def lookups_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model whose forward looks up rows; some are within
    others."""
    kinds = Collection, _Looked
    return [m for m in model.modules() if isinstance(m, kinds)]


class _Looked:
    """What both modules share.  ``rows`` has the table."""

    rows: EmbeddingCollection
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    _parameters: dict[str, Any]
    __jit_unused_properties__ = ("weight",)

    @property
    def weight(self) -> Tensor:
        """All rows, float32 [num_embeddings, embedding_dim], looked up now:
        a loss that uses them trains them. What writes into it raises
        InvalidArgument; its ``requires_grad`` is the module's."""
        return weight_of(self.rows, self.num_embeddings)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        raise refuse_write(self.rows, self.rows.tables[0].name)

    def check_anchor(self) -> None:
        """Raises if ``functional_call`` has put other values in its place
        under one of its two names."""
        if torch.compiler.is_compiling() or jit_traces():
            return
        given = self._parameters.get("weight")
        if given is not None and given is not self.rows.anchor:
            check_in_place(self.rows, given)

    def name_anchor(self) -> None:
        """To those who go over parameters, the anchor is the weight."""
        self._parameters["weight"] = self.rows.anchor

    @contextlib.contextmanager
    def _anchor_unnamed(self) -> Iterator[None]:
        """Within, torch sees the anchor in ``rows`` alone."""
        anchor = self._parameters.pop("weight")
        try:
            yield
        finally:
            self._parameters["weight"] = anchor

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # not as torch sets a parameter
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":  # as to parametrize it
            raise refuse_write(self.rows, self.rows.tables[0].name)
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with self._anchor_unnamed():
            return super()._apply(fn, recurse)  # type: ignore[misc]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._anchor_unnamed():
            super()._save_to_state_dict(*args, **kwargs)  # type: ignore[misc]

    def register_parameter(self, name: str, param: Any) -> None:
        """As torch's; the weight is no parameter."""
        if name == "weight" or isinstance(param, Weight):  # as to prune it
            raise refuse_write(self.rows, self.rows.tables[0].name)
        super().register_parameter(name, param)  # type: ignore[misc]

    def extra_repr(self) -> str:
        """As torch's, and the name of the table."""
        (config,) = self.rows.embedding_configs()
        padding = (
            ""
            if self.padding_idx is None
            else f", padding_idx={self.padding_idx}"
        )
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, "
            f"table={config.name!r}"
        )

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor):  # a state of torch's own module
            weights = {self.rows.tables[0].name: weight}
            self.rows.set_weights("load_state_dict", weights)
            del state_dict[f"{prefix}weight"]
            state_dict[f"{prefix}rows._extra_state"] = (
                self.rows.get_extra_state()
            )
        with self._anchor_unnamed():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]

    def reset_parameters(self) -> None:
        """Removes all rows of the table: they have its initial values again.
        A converted module draws them again, as torch does."""
        name = self.rows.tables[0].name
        store = self.rows.store
        self.rows.clear_rows()
        theirs: Any = self.__dict__.get("_torch_class")
        if theirs is not None:
            weight = torch.empty(self.num_embeddings, self.embedding_dim)
            nn.init.normal_(weight)
            if self.padding_idx is not None:
                weight[self.padding_idx] = 0
            store.set_rows(name, torch.arange(len(weight)), weight)
        elif self.padding_idx is not None and isinstance(self, Embedding):
            _zero(self.rows, self.padding_idx)


class Embedding(_Looked, nn.Embedding):
    """An ``nn.Embedding`` whose rows are in a table.

    Ids may be any 64-bit integers: ``num_embeddings`` bounds ``weight``
    alone. The vector of ``padding_idx`` is zero and has no gradient, unless
    the module was converted from one with another vector.

    Args:
        num_embeddings: rows of ``weight``.
        embedding_dim: elements of a vector.
        padding_idx: an id without gradient.
        name: of the table, by which checkpoints and servers find its rows;
            always needed.
        store: where the rows go; None: as for
            :class:`persia.EmbeddingCollection`.
        optimizer: of that store.
        share: as of :class:`persia.EmbeddingCollection`.
        output_dtype: of the vectors that it gives out; rows have ``dtype``.
            ``.to(dtype)`` of the module changes it, as torch's.
        options: further ones of :class:`persia.EmbeddingConfig`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        name: str | None = None,
        store: Store | None = None,
        optimizer: SparseOptimizer | None = None,
        share: bool = False,
        output_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        config = _config("Embedding", name, embedding_dim, options)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = None, 2.0
        # No gradients of the anchor are sparse, as those of rows would be:
        # DistributedDataParallel asks.
        self.scale_grad_by_freq, self.sparse = False, False
        self.rows = make_rows(config, store, optimizer, share, output_dtype)
        self.name_anchor()
        if self.padding_idx is not None:
            _zero(self.rows, self.padding_idx)

    @leaf
    def forward(self, input: Tensor) -> Tensor:
        """Vectors of integer ids of any shape: float32 [...,
        embedding_dim].

        Raises:
            DtypeError: they are no integers, as for torch's module.
        """
        self.check_anchor()
        input = integers("input", input)
        ids = input.reshape(-1)
        shape = (*input.shape, self.embedding_dim)
        padding = self.padding_idx
        if padding is None:
            found = look_up(self.rows, ids)
            return found if input.dim() == 1 else found.reshape(shape)
        there = ids == padding
        if in_graph():
            found = look_up_but(self.rows, ids, there)
            vector = self._padding_vector(padding)
            return torch.where(there[:, None], vector, found).reshape(shape)
        if not bool(there.any()):
            return look_up(self.rows, ids, padding).reshape(shape)
        at = (~there).nonzero()[:, 0]
        found = look_up(self.rows, ids[at], padding)
        out = self._padding_vector(padding).expand(len(ids), -1).clone()
        return out.index_copy(0, at, found).reshape(shape)

    def _padding_vector(self, padding: int) -> Tensor:
        """float32 [1, dim]; no gradient."""
        if not torch.compiler.is_compiling():
            ahead = engine_of(self.rows.store).ahead
            found = ahead.take(self.rows, padding, None)
            if found is not None:
                return found.detach()
        with torch.no_grad():
            return look_up(self.rows, torch.full((1,), padding))


class EmbeddingBag(_Looked, nn.EmbeddingBag):
    """An ``nn.EmbeddingBag`` whose rows are in a table.

    Args:
        num_embeddings: rows of ``weight``; ids may be any 64-bit integers.
        embedding_dim: elements of a vector.
        mode: "sum", "mean" or "max".
        include_last_offset: whether ``offsets`` ends with the number of ids.
        padding_idx: an id that takes no part.
        name: of the table, by which checkpoints and servers find its rows;
            always needed.
        store: where the rows go; None: as for
            :class:`persia.EmbeddingCollection`.
        optimizer: of that store.
        share: as of :class:`persia.EmbeddingCollection`.
        output_dtype: of the vectors that it gives out; rows have ``dtype``.
            ``.to(dtype)`` of the module changes it, as torch's.
        options: further ones of :class:`persia.EmbeddingConfig`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        name: str | None = None,
        store: Store | None = None,
        optimizer: SparseOptimizer | None = None,
        share: bool = False,
        output_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        config = _config("EmbeddingBag", name, embedding_dim, options)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = None, 2.0
        # No gradients of the anchor are sparse, as those of rows would be:
        # DistributedDataParallel asks.
        self.scale_grad_by_freq, self.sparse = False, False
        self.rows = make_rows(config, store, optimizer, share, output_dtype)
        self.name_anchor()

    @leaf
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pooled vectors: float32 [bags, embedding_dim].

        Args:
            input: integer ids [bags, n], or [n] with ``offsets`` [bags].
            offsets: where each bag begins.
            per_sample_weights: as ``input``; of mode "sum" alone.

        Raises:
            DtypeError: ids are no integers, as for torch's module.
        """
        self.check_anchor()
        input = integers("input", input)
        ids = input.reshape(-1)
        count = ids.shape[0]
        # Positions in place of ids, and padding as the position before all:
        # in a graph the number of the last one is no constant.
        places = torch.arange(count, device=ids.device)
        at: int | None = None
        if self.padding_idx is not None:
            at = 0
            there = ids == self.padding_idx
            places = (places + 1).masked_fill(there, 0)
            if in_graph():
                found = look_up_but(self.rows, ids, there)
                vectors = functional.pad(found, (0, 0, 1, 0))
            else:
                ids = ids[~there]
                kept = (~there).nonzero()[:, 0]
                found = look_up(self.rows, ids, self.padding_idx)
                vectors = found.new_zeros(count + 1, self.embedding_dim)
                vectors = vectors.index_copy(0, kept + 1, found)
        else:
            vectors = look_up(self.rows, ids)
        return functional.embedding_bag(
            places.reshape(input.shape),
            vectors,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=at,
        )


def _zero(rows: EmbeddingCollection, padding: int) -> None:
    """The row of an id: zeros."""
    name = rows.tables[0].name
    zeros = torch.zeros(1, rows.embedding_dim())
    kept = set_absent(rows.store, name, torch.tensor([padding]), zeros)
    warn_of_kept(rows.store, "padding_idx", {name: kept})


def _padding(padding: int | None, rows: int) -> int | None:
    """A number from 0 on, as torch takes it: -1 is the last row."""
    if padding is None:
        return None
    if not -rows <= padding < rows:
        raise errors.InvalidArgument(
            f"padding_idx is {padding}, need one of {rows} rows"
        )
    return padding % rows
