"""Batches of ids: :class:`JaggedBatch`.

It is a plain container of tensors: it knows no store and no table, so it
works in forked children (the workers of ``torch.utils.data.DataLoader``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from persia import errors
from persia.base.check import kind, whole
from persia.base.tensors import in_graph, integers, tensor, vector
from persia.base.torch_private import register_tree, version_of

#: In graphs: the feature that has the ids which are left out, for how many
#: others there are depends on the elements of a tensor.
PADDING = "(padding)"

_PADDED = "JaggedBatch.from_dict takes 2-D tensors of padded ids"
_BAGS = "bags lie feature after feature, one a sample"


def _weights(what: str, w: Any, n: int) -> Tensor:
    need = "need one weight an id"
    t = tensor(what, w, need, torch.float32)
    if not t.dtype.is_floating_point:
        raise errors.DtypeError(
            f"{what} has dtype {t.dtype}, need a floating dtype such as "
            "torch.float32"
        )
    vector(what, t, need)
    if t.numel() != n:
        raise errors.ShapeError(
            f"{what} has {t.numel()} elements for {n} ids; {need}"
        )
    return t


def _check_lengths(
    lengths: Tensor,
    total: Tensor,
    n: int,
    bag: Callable[[int], str],
    every: str,
) -> None:
    """Raises if lengths cannot be those of the bags of n ids.

    Args:
        lengths: int64 [bags].
        total: their sum, where it does not overflow.
        n: how many ids there are.
        bag: names one of the bags.
        every: names all of them.

    In graphs the lookup alone checks them.
    """
    if in_graph():
        return
    if lengths.numel():
        low, high = map(int, torch.aminmax(lengths))
        wrong = low < 0
        if wrong or high > n:  # else the sum cannot overflow
            length = low if wrong else high
            need = (
                "lengths are 0 or more, offsets never fall"
                if wrong
                else f"but there are {n} ids"
            )
            at = int((lengths == length).nonzero()[0])
            raise errors.OffsetsError(
                f"{bag(at)}: the length is {length}; {need}"
            )
    if int(total) != n:
        raise errors.OffsetsError(
            f"{every} add up to {int(total)}, but there are {n} ids; "
            "each id is in one bag"
        )


class JaggedBatch:
    """Ids of F features for B samples, feature-major like a KeyedJaggedTensor.

    The ids of feature f and sample b are
    ``values[offsets[f * B + b] : offsets[f * B + b + 1]]``.

    Args:
        keys: F distinct feature names.
        values: ids, int64 [n]; narrower integers are widened.
        lengths: ids in each bag, int64 or int32 [F * B], or None.
        offsets: where each bag begins, and n at the end, int64 or int32
            [F * B + 1], or None. Give one of the two (both is allowed).
            With neither, every bag has exactly one id and B = n / F.
        weights: one weight an id, floating [n], or None.

    Raises:
        DtypeError, ShapeError: an argument of the wrong dtype or rank.
        OffsetsError: lengths or offsets that are negative, fall, or do not
            add up to n.
        InvalidArgument: no keys, or a key twice.

    Ids are looked up on the host, so they stay there: :meth:`to` another
    device decides where the output of a module goes, and what the methods of
    the batch return. Those make copies when they are asked.

    Attributes:
        ticket: set by ``persia.DataLoader`` on ids that it looked up ahead;
            kept by :meth:`to` and :meth:`pin_memory`, never pickled.
        given_by: the pass that gave them out, likewise.
    """

    ticket: Tensor | None
    given_by: Callable[[], Any] | None = None  # the pass, while it lives
    #: Ids of each feature, where a graph knows them without the elements of a
    #: tensor.
    sizes: Sequence[int] | None = None
    _device: torch.device | None = None  # None: where the tensors are

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise errors.InvalidArgument(
                f"keys is the string {keys!r}; pass a list of names"
            )
        self._keys = list(kind("keys", keys, Iterable, "a list of names"))
        if set(map(type, self._keys)) != {str}:  # mostly they are
            for key in self._keys:
                kind("a key", key, str, "a name")
        if not self._keys:
            raise errors.InvalidArgument(
                "keys is empty; a JaggedBatch has at least one feature"
            )
        if len(set(self._keys)) != len(self._keys):
            twice = sorted({k for k in self._keys if self._keys.count(k) > 1})
            raise errors.InvalidArgument(
                f"keys {twice} occur more than once; names are distinct"
            )
        self._values = vector("values", integers("values", values), _PADDED)
        self._lengths: Tensor | None = None
        self._offsets: Tensor | None = None
        self._weights: Tensor | None = None
        self._copies: dict[str, Tensor] = {}  # on the device, by field
        self.ticket = None

        n, count = self._values.numel(), len(self._keys)
        if lengths is None and offsets is None:
            if n % count:
                raise errors.OffsetsError(
                    f"{n} ids do not divide into {count} features of one id "
                    "a sample; "
                    "pass lengths or offsets"
                )
            self._stride = n // count
        else:
            self._set_bags(lengths, offsets)
        if weights is not None:
            self._weights = _weights("weights", weights, n)

    def _set_bags(
        self, lengths: Tensor | None, offsets: Tensor | None
    ) -> None:
        """Checks lengths and offsets, and keeps both."""
        n, count = self._values.numel(), len(self._keys)
        if lengths is not None:
            lengths = vector("lengths", integers("lengths", lengths), _BAGS)
            bags = lengths.numel()
            ends = torch.cumsum(lengths, 0)
            running = torch.cat((ends.new_zeros(1), ends))
            if offsets is not None:
                given = vector("offsets", integers("offsets", offsets), _BAGS)
                if not in_graph() and not torch.equal(given, running):
                    raise errors.OffsetsError(
                        "offsets are not the running sums of lengths; pass "
                        "one of the two"
                    )
            offsets = running
        else:
            assert offsets is not None
            offsets = vector("offsets", integers("offsets", offsets), _BAGS)
            if offsets.numel() == 0:
                raise errors.OffsetsError(
                    "offsets is empty; need F * B + 1 elements, the first is 0"
                )
            bags = offsets.numel() - 1
            lengths = torch.diff(offsets)
            if not in_graph() and int(offsets[0]) != 0:
                raise errors.OffsetsError(
                    f"offsets begin with {int(offsets[0])}, need 0: they "
                    "count from the first of values"
                )
        if bags % count:
            raise errors.OffsetsError(
                f"{bags} bags do not divide by {count} features; "
                "every feature has one bag a sample (variable stride is not "
                "taken)"
            )
        self._stride = bags // count
        _check_lengths(lengths, offsets[-1], n, self._bag, "the lengths")
        self._lengths, self._offsets = lengths, offsets

    def _bag(self, at: int) -> str:
        """The name of a bag in messages."""
        feature, sample = divmod(at, self._stride)
        return f"feature {self._keys[feature]!r}, sample {sample}"

    @classmethod
    def from_dict(
        cls, features: Mapping[str, Any], *, padding_value: int | None = None
    ) -> JaggedBatch:
        """Builds a batch from one entry a feature.

        Args:
            features: name to one of: ids [B], one id a sample; ids [B, L],
                up to L ids a sample; a tuple (values [n], lengths [B]); a
                tuple (values, lengths, weights [n]).
            padding_value: in 2-D tensors, ids of this value are left out;
                None keeps all L.

        Raises:
            ShapeError: another rank, or features that differ in B.
            DtypeError, OffsetsError: as for the constructor.
        """
        need = "a dict of tensors, one entry a feature"
        if not kind("features", features, Mapping, need):
            raise errors.InvalidArgument(
                "features is empty; a JaggedBatch has at least one feature"
            )
        if padding_value is not None:
            padding_value = whole(
                "padding_value", padding_value, -(2**63), 2**63 - 1
            )
        values: list[Tensor] = []
        lengths: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        kept: list[Tensor | None] = []
        first: tuple[str, int] | None = None
        for key, entry in features.items():
            v, le, w, there = _entry(key, entry, padding_value)
            kept.append(there)
            size = v.numel() if le is None else le.numel()
            if first is None:
                first = (key, size)
            elif size != first[1]:
                raise errors.ShapeError(
                    f"feature {key!r} has {size} samples, but {first[0]!r} "
                    f"has {first[1]}; "
                    "all features of a batch have the same samples"
                )
            values.append(v)
            lengths.append(le)
            weights.append(w)
        devices = {str(v.device) for v in values}
        if len(devices) > 1:
            raise errors.InvalidArgument(
                f"the features are on several devices, {sorted(devices)}; "
                "move them to one"
            )
        if all(le is None for le in lengths):
            return cls(list(features), torch.cat(values))
        every = torch.cat(
            [
                torch.ones_like(v) if le is None else le
                for v, le in zip(values, lengths, strict=True)
            ]
        )
        weighted = None
        if any(w is not None for w in weights):
            dtype = next(w.dtype for w in weights if w is not None)
            weighted = torch.cat(
                [
                    torch.ones_like(v, dtype=dtype)
                    if w is None
                    else w.to(dtype)
                    for v, w in zip(values, weights, strict=True)
                ]
            )
        keys, ids = list(features), torch.cat(values)
        if any(one is not None for one in kept):
            assert first is not None
            which = torch.cat(
                [
                    torch.ones_like(v, dtype=torch.bool)
                    if one is None
                    else one
                    for v, one in zip(values, kept, strict=True)
                ]
            )
            keys.append(PADDING)
            at, left = split_off(which)
            ids = torch.zeros_like(ids).scatter(0, at, ids)
            if weighted is not None:
                weighted = torch.zeros_like(weighted).scatter(0, at, weighted)
            bag = torch.arange(first[1], device=ids.device)
            every = torch.cat((every, torch.where(bag == 0, left, 0)))
        return cls(keys, ids, lengths=every, weights=weighted)

    @classmethod
    def from_arrow(
        cls,
        table: Any,
        columns: Sequence[str] | None = None,
        *,
        hash: bool = True,
        salt: int = 0,
    ) -> JaggedBatch:
        """Builds a batch from the columns of a table.

        Args:
            table: of B rows: an Arrow table or record batch, or what
                :class:`persia.data.Table` takes.
            columns: those that become features; all by default. A column of
                lists has any number of ids a sample, others one.
            hash: ids are :func:`persia.hash_ids` of the values; False: the
                values are ids, integers of 64 bits.
            salt: of the hash.

        Raises:
            MissingFeature: there is no such column.
            DtypeError: values of a type that has no ids.
        """
        from persia.data.table import ids_of

        return ids_of(table, columns, hash, salt)

    @classmethod
    def from_pandas(
        cls,
        frame: Any,
        columns: Sequence[str] | None = None,
        *,
        hash: bool = True,
        salt: int = 0,
    ) -> JaggedBatch:
        """:meth:`from_arrow` of a pandas DataFrame."""
        return cls.from_arrow(frame, columns, hash=hash, salt=salt)

    def keys(self) -> list[str]:
        """The F feature names, in the order of the values."""
        return self._keys

    def values(self) -> Tensor:
        """All ids, int64 [n], feature-major."""
        return self._placed("_values", self._values)

    def _placed(self, field: str, tensor: Tensor) -> Tensor:
        """A tensor of this batch, on the device of the batch."""
        if self._device is None or tensor.device == self._device:
            return tensor
        if field not in self._copies:
            self._copies[field] = tensor.to(self._device, non_blocking=True)
        return self._copies[field]

    def lengths(self) -> Tensor:
        """Ids in each bag, int64 [F * B]."""
        if self._lengths is None:
            return torch.ones_like(self.values())
        return self._placed("_lengths", self._lengths)

    def offsets(self) -> Tensor:
        """Where each bag begins in values, and n at the end: int64 [F * B +
        1].
        """
        if self._offsets is None:
            return torch.arange(self._values.numel() + 1, device=self.device())
        return self._placed("_offsets", self._offsets)

    def lengths_or_none(self) -> Tensor | None:
        """lengths(), or None when every bag has exactly one id."""
        return None if self._lengths is None else self.lengths()

    def offsets_or_none(self) -> Tensor | None:
        """offsets(), or None when every bag has exactly one id."""
        return None if self._offsets is None else self.offsets()

    def weights(self) -> Tensor:
        """One weight an id, floating [n]; raises MissingFeature without
        weights.
        """
        if self._weights is None:
            raise errors.MissingFeature(
                "this JaggedBatch has no weights; pass weights= when it is "
                "made"
            )
        return self._placed("_weights", self._weights)

    def weights_or_none(self) -> Tensor | None:
        """One weight an id, floating [n], or None."""
        if self._weights is None:
            return None
        return self._placed("_weights", self._weights)

    def with_weights(self, weights: Mapping[str, Tensor]) -> JaggedBatch:
        """The same ids with other weights, such as learned ones.

        A weighted module that is given it belongs to the batch of a
        ``persia.DataLoader`` that these ids are of.

        Args:
            weights: by feature, floating [n_f]: one an id of the feature.
                Other features keep theirs; without any each is 1.

        Raises:
            MissingFeature: there is no feature of a name.
            DtypeError, ShapeError: weights that are not one an id.
        """
        for key in weights:
            if key not in self._keys:
                raise errors.MissingFeature(
                    f"no feature {key!r} in this JaggedBatch; it has "
                    f"{self._keys}"
                )
        parts = []
        bounds = itertools.pairwise(self.offset_per_key())
        for key, (start, stop) in zip(self._keys, bounds, strict=True):
            if key in weights:
                what = f"weights of feature {key!r}"
                part = _weights(what, weights[key], stop - start)
            elif self._weights is not None:
                part = self._weights[start:stop]
            else:
                part = torch.ones(stop - start, device=self._values.device)
            parts.append(part.to(torch.float32))
        out = type(self).__new__(type(self))
        out.__dict__.update(self.__dict__)
        out._copies = {}
        out._weights = torch.cat(parts)
        if out.ticket is not None:  # what was looked up has other weights
            again = torch.tensor(-1, device="cpu")
            out.ticket = torch.stack((out.ticket[0], again))
        return out

    def stride(self) -> int:
        """The number of samples, B."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """B for each of the F features."""
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """False: every feature has B bags."""
        return False

    def offset_per_key(self) -> list[int]:
        """Where each feature begins in values, and n at the end: F + 1
        numbers.
        """
        if self._offsets is None:
            return [f * self._stride for f in range(len(self._keys) + 1)]
        if self._stride == 0:
            return [0] * (len(self._keys) + 1)
        starts: list[int] = self._offsets[:: self._stride].tolist()
        return starts

    def length_per_key(self) -> list[int]:
        """The number of ids of each of the F features."""
        at = self.offset_per_key()
        return [b - a for a, b in itertools.pairwise(at)]

    def device(self) -> torch.device:
        """Where the tensors of the methods are, and a module's output."""
        return self._device or self._values.device

    def __getitem__(self, key: str) -> tuple[Tensor, Tensor]:
        """(values [n_f], lengths [B]) of one feature, both int64; views."""
        part = self._part(key)
        return part[0], part[1]

    def __contains__(self, key: object) -> bool:
        """Whether there is a feature of this name."""
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        """The feature names, as of a dict."""
        return iter(self._keys)

    def to_dict(self) -> dict[str, tuple[Tensor, ...]]:
        """name to (values, lengths) or (values, lengths, weights);
        from_dict() reverses it.
        """
        return {key: self._part(key) for key in self._keys}

    def _part(self, key: str) -> tuple[Tensor, ...]:
        try:
            f = self._keys.index(key)
        except ValueError:
            raise errors.MissingFeature(
                f"no feature {key!r} in this JaggedBatch; it has {self._keys}"
            ) from None
        bags = slice(f * self._stride, (f + 1) * self._stride)
        if self._lengths is None or self._offsets is None:
            values = self.values()[bags]
            ids, lengths = bags, torch.ones_like(values)
        else:
            ids = slice(
                int(self._offsets[bags.start]), int(self._offsets[bags.stop])
            )
            values, lengths = self.values()[ids], self.lengths()[bags]
        if self._weights is None:
            return values, lengths
        return values, lengths, self.weights()[ids]

    def to(
        self, device: torch.device | str, non_blocking: bool = False
    ) -> JaggedBatch:
        """The batch on ``device`` (this very batch if it is there), ticket
        kept.

        Tensors on the host stay there, see above; weights that require grad
        move, and so do the tensors of a batch that was made on a device.
        """
        if self.device() == torch.device(device):
            return self
        there = torch.empty(0, device=device).device  # with its index
        out = type(self).__new__(type(self))
        out.__dict__.update(self.__dict__)
        out._copies = {}
        if self._values.device.type == "cpu":
            out._device = None if there.type == "cpu" else there
            if self._weights is not None and self._weights.requires_grad:
                out._weights = self._weights.to(
                    there, non_blocking=non_blocking
                )
            return out
        for field in ("_values", "_lengths", "_offsets", "_weights"):
            tensor = getattr(self, field)
            if tensor is not None:
                setattr(
                    out, field, tensor.to(there, non_blocking=non_blocking)
                )
        out._device = None
        return out

    def pin_memory(self) -> JaggedBatch:
        """This very batch: ids do not travel, see :meth:`to`."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.__dict__.items() if k != "given_by"}
        return kept | {"ticket": None, "_copies": {}}

    def __repr__(self) -> str:
        return (
            f"JaggedBatch(keys={self._keys}, samples={self._stride}, "
            f"ids={self._values.numel()}, "
            f"weighted={self._weights is not None})"
        )


def split_off(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Where the elements go if those that are not kept go behind the others,
    all in their order.

    Args:
        kept: bool [n].

    Returns:
        The place of each, int64 [n], and how many are left out, int64 [1].
    """
    front, back = kept.cumsum(0), (~kept).cumsum(0)
    left = (~kept).sum().reshape(1)
    return torch.where(kept, front, kept.sum() + back) - 1, left


def _entry(
    key: str, entry: Any, padding_value: int | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """One value of from_dict() as (values, lengths or None, weights or
    None); and, of values that are not left out yet, which are kept.
    """
    what = f"feature {key!r}"
    if isinstance(entry, Tensor) and entry.is_nested:
        if entry.layout != torch.jagged or entry.dim() != 2:
            raise errors.ShapeError(
                f"{what} is a nested tensor that is not [B, L] with "
                "layout=torch.jagged; pass one, or a tuple (values, lengths)"
            )
        nested: Any = entry
        entry = nested.values(), nested.offsets().diff()
    if isinstance(entry, tuple):
        if len(entry) not in (2, 3):
            raise errors.ShapeError(
                f"{what} is a tuple of {len(entry)}; need (values, lengths) "
                "or "
                "(values, lengths, weights)"
            )
        values = vector(
            f"{what}: values", integers(f"{what}: values", entry[0]), _PADDED
        )
        lengths = vector(
            f"{what}: lengths", integers(f"{what}: lengths", entry[1]), _BAGS
        )
        # Checked for each feature: a surplus in one could hide a lack in the
        # next.
        _check_lengths(
            lengths,
            lengths.sum(),
            values.numel(),
            lambda at: f"{what}, sample {at}",
            f"{what}: the lengths",
        )
        if len(entry) == 2 or entry[2] is None:
            return values, lengths, None, None
        return (
            values,
            lengths,
            _weights(f"{what}: weights", entry[2], values.numel()),
            None,
        )
    ids = integers(what, entry)
    if ids.dim() == 1:
        return ids, None, None, None
    if ids.dim() != 2:
        raise errors.ShapeError(
            f"{what} has shape {tuple(ids.shape)}; need [B], [B, L] or a "
            "tuple (values, lengths)"
        )
    if padding_value is None:
        return (
            ids.reshape(-1),
            torch.full((ids.shape[0],), ids.shape[1]).to(ids.device),
            None,
            None,
        )
    kept = ids != padding_value
    if in_graph():
        return ids.reshape(-1), kept.sum(1), None, kept.reshape(-1)
    return ids[kept], kept.sum(1), None, None


def tensors_of(
    ids: JaggedBatch,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, offsets (None: one id a bag) and weights to look up: those of
    the host, unless a copy on a device was changed in place."""
    if any(version_of(copy) for copy in ids._copies.values()):
        return ids.values(), ids.offsets_or_none(), ids.weights_or_none()
    return ids._values, ids._offsets, ids._weights


def _unflatten(parts: list[Any], context: list[Any]) -> JaggedBatch:
    """A batch of whatever stands for its tensors."""
    out = JaggedBatch.__new__(JaggedBatch)
    keys, place = context
    values, lengths, offsets, weights = parts
    out._keys = list(keys)
    out._values, out._weights = values, weights
    out._lengths, out._offsets = lengths, offsets
    out._device = None if place is None else torch.device(place)
    out._copies, out.ticket = {}, None
    bags = 0
    if isinstance(offsets, Tensor):
        bags = offsets.numel() - 1
    elif isinstance(values, Tensor):
        bags = values.numel()
    out._stride = bags // len(out._keys)
    return out


def _flatten(batch: JaggedBatch) -> tuple[list[Any], list[Any]]:
    place = None if batch._device is None else str(batch._device)
    parts = [batch._values, batch._lengths, batch._offsets, batch._weights]
    return parts, [batch._keys, place]


register_tree(JaggedBatch, _flatten, _unflatten)


def skip(ids: Any) -> None:
    """Gives up the batch that these ids are of; see
    :meth:`persia.Batch.skip`."""
    loader = getattr(ids, "given_by", None)
    if loader is not None and (one := loader()) is not None:
        one.skip(ids.ticket)
    if (taken := getattr(ids, "taken", None)) is not None:
        taken.skip()
