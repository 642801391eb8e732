"""What the modules return: vectors by feature, with torchrec's names.

To torch they are containers of tensors (pytrees), so that graphs give them
out. No method of theirs reads the elements of a tensor, but those whose result
has a size that depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from persia import errors
from persia.base.tensors import to_device
from persia.base.torch_private import register_tree


class KeyedTensor:
    """Pooled embeddings of all features side by side, like torchrec's
    KeyedTensor.

    ``values()`` is [B, sum of dims]; ``out["feature"]`` is a view [B, dim].
    """

    __slots__ = ("_keys", "_lengths", "_values")

    def __init__(
        self, keys: list[str], length_per_key: list[int], values: Tensor
    ) -> None:
        self._keys = keys
        self._lengths = length_per_key
        self._values = values

    def keys(self) -> list[str]:
        """The features, in the order of the columns."""
        return self._keys

    def values(self) -> Tensor:
        """[B, sum of dims]."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that the features share: 1."""
        return 1

    def length_per_key(self) -> list[int]:
        """The number of columns of each feature."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """The first column of each feature, and the width at the end."""
        offsets = [0]
        for length in self._lengths:
            offsets.append(offsets[-1] + length)
        return offsets

    def __getitem__(self, key: str) -> Tensor:
        """The columns of one feature, [B, dim]; a view."""
        try:
            at = self._keys.index(key)
        except ValueError:
            raise errors.MissingFeature(
                f"no feature {key!r} in the output; it has {self._keys}"
            ) from None
        return self._values.narrow(
            1, sum(self._lengths[:at]), self._lengths[at]
        )

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def to(
        self, device: torch.device | str, non_blocking: bool = False
    ) -> KeyedTensor:
        """The same with its values there."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._lengths, values)

    @staticmethod
    def regroup(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """The columns of each group of features, side by side.

        Args:
            keyed_tensors: whose features these are; of a name in several, the
                first has it.
            groups: names of features.

        Returns:
            [B, sum of dims of the group] for each group.

        Raises:
            MissingFeature: none of them has the feature.
        """
        columns: dict[str, Tensor] = {}
        for one in keyed_tensors:
            columns = one.to_dict() | columns
        try:
            return [
                torch.cat([columns[key] for key in group], 1)
                for group in groups
            ]
        except KeyError as missing:
            raise errors.MissingFeature(
                f"no feature {missing.args[0]!r} in the outputs; they have "
                f"{list(columns)}"
            ) from None

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor],
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
    ) -> dict[str, Tensor]:
        """:meth:`regroup`, by a name for each group."""
        parts = KeyedTensor.regroup(keyed_tensors, groups)
        return dict(zip(keys, parts, strict=True))

    def to_dict(self) -> dict[str, Tensor]:
        """Each feature's columns, [B, dim]; views."""
        parts = torch.split(self._values, self._lengths, 1)
        return dict(zip(self._keys, parts, strict=True))

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        columns = dict(zip(self._keys, self._lengths, strict=True))
        return f"KeyedTensor({columns}, values={self._values})"


class JaggedTensor:
    """One sequence feature: values [n_f, dim], offsets int64 [B + 1].

    With ``need_indices`` of the module its weights are the ids, int64 [n_f],
    as torchrec has them.
    """

    __slots__ = ("_bounds", "_offsets", "_part", "_values", "_weights")

    def __init__(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        self._values = values
        self._offsets = offsets
        self._weights = weights
        self._part = False
        self._bounds: tuple[int, int] | None = None

    @classmethod
    def within(
        cls,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        bounds: tuple[int, int] | None = None,
    ) -> JaggedTensor:
        """Some of these values and weights: those between the first of the
        offsets and the last. They are cut out when they are asked for, for
        how many they are depends on the elements of a tensor, unless
        ``bounds`` says it."""
        out = cls(values, offsets, weights)
        out._part = True
        out._bounds = bounds
        return out

    def _cut(self, whole: Tensor) -> Tensor:
        if not self._part:
            return whole
        if self._bounds is not None:
            start, stop = self._bounds
        else:
            first, last = self._offsets[0], self._offsets[-1]
            start, stop = first.item(), last.item()  # type: ignore[assignment]
        return whole[start:stop]

    def values(self) -> Tensor:
        """One vector an id: [n_f, dim]."""
        return self._cut(self._values)

    def offsets(self) -> Tensor:
        """Where each sample begins, and n_f at the end: int64 [B + 1]."""
        offsets = self._offsets
        if self._part:
            offsets = offsets - offsets[0]
        return to_device(offsets, self._values.device)

    def lengths(self) -> Tensor:
        """Vectors of each sample: int64 [B]."""
        return to_device(torch.diff(self._offsets), self._values.device)

    def weights_or_none(self) -> Tensor | None:
        """The weights, [n_f]; None without."""
        if self._weights is None:
            return None
        return to_device(self._cut(self._weights), self._values.device)

    def weights(self) -> Tensor:
        """The weights, [n_f].

        Raises:
            InvalidArgument: there are none.
        """
        weights = self.weights_or_none()
        if weights is None:
            raise errors.InvalidArgument(
                "this JaggedTensor has no weights; "
                "EmbeddingCollection(need_indices=True) gives it the ids"
            )
        return weights

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """[B, length, dim], cut or padded to a length (None: the longest)."""
        lengths = torch.diff(self._offsets)
        if (size := desired_length) is None:
            size = int(lengths.max()) if lengths.shape[0] else 0
        at = torch.arange(size, device=lengths.device)
        present = at < lengths[:, None]
        index = (self._offsets[:-1, None] + at).masked_fill(~present, 0)
        if self._values.shape[0] == 0:
            shape = (lengths.shape[0], size, self._values.shape[1])
            return self._values.new_full(shape, padding_value)
        picked = self._values[index.to(self._values.device)]
        return picked.masked_fill(
            ~present.to(picked.device)[..., None], padding_value
        )

    def to_dense(self) -> list[Tensor]:
        """One tensor [length, dim] a sample; views."""
        lengths = torch.diff(self._offsets).tolist()
        return list(torch.split(self.values(), lengths))


class Sequences(Mapping[str, JaggedTensor]):
    """Sequence embeddings by feature; ``values()`` of a feature are cut out
    when asked for.

    ``rows()`` is the whole: one vector for each id of the batch, [n, dim].

    Args:
        names: of the outputs: the feature's place in the batch, and which of
            the lookups has its vectors.
        rows: the lookups, each [n, dim]: one, unless a feature has several
            tables.
        offsets: of the batch, int64 [features * B + 1]; None: one id a bag.
        features: of the batch.
        ids: of the batch, int64 [n], to be the weights of each feature; or
            None.
        sizes: ids of each feature, where they are known.
    """

    def __init__(
        self,
        names: dict[str, tuple[int, int]],
        rows: Sequence[Tensor],
        offsets: Tensor | None,
        features: int,
        ids: Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._sizes = sizes
        self._names = names
        self._rows = rows
        self._offsets = offsets
        self._features = features
        self._ids = ids

    def rows(self) -> Tensor:
        """One vector an id, in the order of the batch's values: [n, dim];
        of a feature with several tables, those of the first."""
        return self._rows[0]

    def __getitem__(self, key: str) -> JaggedTensor:
        try:
            at, which = self._names[key]
        except KeyError:
            raise errors.MissingFeature(
                f"no feature {key!r} in the output; it has {list(self._names)}"
            ) from None
        rows, ids, offsets = self._rows[which], self._ids, self._offsets
        if offsets is None:
            bags = rows.shape[0] // self._features
            one_each = torch.arange(bags + 1, device=rows.device)
            if self._features == 1:
                return JaggedTensor(rows, one_each, ids)
            some = slice(at * bags, (at + 1) * bags)
            return JaggedTensor(
                rows[some], one_each, None if ids is None else ids[some]
            )
        if self._features == 1:
            return JaggedTensor(rows, offsets, ids)
        bags = (offsets.shape[0] - 1) // self._features
        some = slice(at * bags, (at + 1) * bags + 1)
        bounds = None
        if self._sizes is not None:
            start = sum(self._sizes[:at])
            bounds = start, start + self._sizes[at]
        return JaggedTensor.within(rows, offsets[some], ids, bounds)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _jagged(parts: list[Any], part: bool) -> JaggedTensor:
    out = JaggedTensor(*parts)
    out._part = part
    return out


def _sequences(parts: list[Any], context: list[Any]) -> Sequences:
    names, features = context
    offsets, ids, *rows = parts
    places = {name: (at, which) for name, at, which in names}
    return Sequences(places, rows, offsets, features, ids)


register_tree(
    KeyedTensor,
    lambda x: ([x._values], [x._keys, x._lengths]),
    lambda parts, context: KeyedTensor(*context, *parts),
)
register_tree(
    JaggedTensor,
    lambda x: ([x._values, x._offsets, x._weights], x._part),
    _jagged,
)
register_tree(
    Sequences,
    lambda x: (
        [x._offsets, x._ids, *x._rows],
        [[[name, *place] for name, place in x._names.items()], x._features],
    ),
    _sequences,
)
