"""What goes into a model, and what it gives: named tensors and back.

A model takes any arguments: tensors, batches of ids, dicts. A request has
named tensors. A :class:`Form` says which tensor is which part of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic
import torch
from torch import Tensor

from persia import errors
from persia.base.torch_private import constant_sizes
from persia.data.batches.ids import unpack
from persia.data.batches.jagged import PADDING, JaggedBatch

#: Types of elements, by the names that the inference protocol has.
DATATYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
_SCALARS = (bool, int, float, str, type(None))


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class TensorForm(_Entry):
    """A tensor: -1 is a size that may change.

    Attributes:
        name: of the tensor.
        datatype: see :data:`DATATYPES`.
        shape: its sizes.
        samples: whether its first size is the number of samples.
    """

    name: str = pydantic.Field(min_length=1)
    datatype: str
    shape: list[int]
    samples: bool = True


class _Feature(NamedTuple):
    """A feature of a batch: the places of its tensors; without lengths it has
    one id a sample."""

    name: str
    values: int
    lengths: int | None = None
    weights: int | None = None


class Form(pydantic.BaseModel):
    """The inputs and outputs of a model.

    Attributes:
        inputs: the tensors that go in.
        args, kwargs: of the call: trees of ``{"tensor": number}``,
            ``{"constant": value}``, ``{"batch": [[feature, values, lengths,
            weights], ...]}``, ``{"list": [...]}``, ``{"tuple": [...]}`` and
            ``{"dict": {...}}``.
        outputs: the tensors that it returns.
        result: the tree of these.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    inputs: list[TensorForm] = []
    args: list[dict[str, Any]] = []
    kwargs: dict[str, dict[str, Any]] = {}
    outputs: list[TensorForm] = []
    result: dict[str, Any] = {}

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        single: Iterable[str] = (),
    ) -> tuple[Form, list[Tensor]]:
        """The form of a call, and its tensors.

        Args:
            names: of the positional arguments.
            args, kwargs: of the call, with at least two samples.
            single: features with one id a sample.

        Raises:
            InvalidArgument: an argument that no request can have.
        """
        maker = _Maker(frozenset(single))
        trees = [
            maker.tree(name, x) for name, x in zip(names, args, strict=True)
        ]
        named = {name: maker.tree(name, x) for name, x in kwargs.items()}
        form = cls(inputs=maker.inputs, args=trees, kwargs=named)
        maker.check(form)
        return form, maker.tensors

    def call(
        self, tensors: Sequence[Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments that these tensors make."""
        return (
            [_build(tree, tensors) for tree in self.args],
            {name: _build(t, tensors) for name, t in self.kwargs.items()},
        )

    def flatten(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """The tensors of a call of this form; the reverse of :meth:`call`.

        Raises:
            InvalidArgument, MissingFeature, ShapeError, DtypeError: it is
                another call.
        """
        trees = [*self.args, *(self.kwargs[name] for name in kwargs)]
        given = [*args, *kwargs.values()]
        if len(args) != len(self.args) or len(kwargs) != len(self.kwargs):
            raise errors.InvalidArgument(
                f"the model was exported for {len(self.args)} positional "
                f"arguments and {sorted(self.kwargs)}, not for {len(args)} "
                f"and {sorted(kwargs)}"
            )
        found: dict[int, Tensor] = {}
        for tree, x in zip(trees, given, strict=True):
            self._take(tree, x, found)
        tensors = [found[i] for i in range(len(self.inputs))]
        self.check(tensors)
        return tensors

    def _take(self, tree: Any, x: Any, found: dict[int, Tensor]) -> None:
        ((kind, part),) = tree.items()
        if kind == "tensor":
            if not isinstance(x, Tensor):
                raise errors.InvalidArgument(
                    f"{self.inputs[part].name} is a {type(x).__name__}, need "
                    "a tensor"
                )
            found[part] = x
        elif kind == "batch":
            _take_features(part, x, found)
        elif kind in ("list", "tuple"):
            for one, y in zip(part, x, strict=True):
                self._take(one, y, found)
        elif kind == "dict":
            for key, one in part.items():
                if key not in x:
                    raise errors.MissingFeature(f"there is no entry {key!r}")
                self._take(one, x[key], found)
        elif x != part:
            raise errors.InvalidArgument(
                f"the model was exported for the value {part!r}, not for {x!r}"
            )

    def samples(self, tensors: Sequence[Tensor]) -> int:
        """How many samples these have."""
        at = next(i for i, one in enumerate(self.inputs) if one.samples)
        return tensors[at].shape[0]

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Checks tensors from outside.

        Raises:
            DtypeError, ShapeError: they are not of this form.
            OffsetsError: lengths that do not add up.
        """
        samples = None
        for form, x in zip(self.inputs, tensors, strict=True):
            wanted = DATATYPES[form.datatype]
            if x.dtype != wanted:
                raise errors.DtypeError(
                    f"{form.name} is of {x.dtype}, need {wanted}"
                )
            sizes = zip(form.shape, x.shape, strict=False)
            if len(x.shape) != len(form.shape) or any(
                need not in (-1, size) for need, size in sizes
            ):
                raise errors.ShapeError(
                    f"{form.name} has shape {list(x.shape)}, need {form.shape}"
                )
            if not form.samples:
                continue
            if samples is None:
                samples = form.name, x.shape[0]
            elif samples[1] != x.shape[0]:
                raise errors.ShapeError(
                    f"{form.name} has {x.shape[0]} samples, and {samples[0]} "
                    f"has {samples[1]}"
                )
        for tree in (*self.args, *self.kwargs.values()):
            for feature in (_Feature(*f) for f in tree.get("batch", ())):
                single = self.inputs[feature.values].samples
                _check_feature(feature, tensors, single)

    def dynamic_shapes(self, example: Sequence[Tensor]) -> tuple[Any, ...]:
        """For torch.export: the sizes that may change."""
        batch = torch.export.Dim("batch")
        shapes = []
        for form, x in zip(self.inputs, example, strict=True):
            one: dict[int, Any] = {
                i: torch.export.Dim.AUTO
                for i in range(x.dim())
                if form.shape[i] == -1
            }
            if form.samples:
                one[0] = batch
            shapes.append(one)
        return tuple(shapes)

    def note_outputs(self, name: str, result: Any) -> list[Tensor]:
        """The tensors of what a model gives; keeps their form."""
        maker = _Maker(frozenset())
        self.result = maker.tree(name, result)
        self.outputs = [
            one.model_copy(update={"shape": _sizes(x)})
            for one, x in zip(maker.inputs, maker.tensors, strict=True)
        ]
        return maker.tensors

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """Sizes that a graph takes for constant, or for the number of
        samples, from its own inputs."""
        samples = str(self.samples(tensors))
        self.inputs = [
            one.model_copy(
                update={
                    "shape": _sizes(x),
                    "samples": x.dim() > 0 and str(x.shape[0]) == samples,
                }
            )
            for one, x in zip(self.inputs, tensors, strict=True)
        ]

    def give(self, tensors: Sequence[Tensor]) -> Any:
        """What the model gave, of these outputs."""
        return _build(self.result, tensors)


def _sizes(x: Tensor) -> list[int]:
    """The sizes of a tensor; -1 where a graph has a variable."""
    return [-1 if size is None else size for size in constant_sizes(x)]


def _build(tree: Any, tensors: Sequence[Tensor]) -> Any:
    ((kind, part),) = tree.items()
    if kind == "tensor":
        return tensors[part]
    if kind == "list":
        return [_build(one, tensors) for one in part]
    if kind == "tuple":
        return tuple(_build(one, tensors) for one in part)
    if kind == "dict":
        return {key: _build(one, tensors) for key, one in part.items()}
    if kind == "batch":
        return _batch([_Feature(*f) for f in part], tensors)
    return part


def _batch(
    features: Sequence[_Feature], tensors: Sequence[Tensor]
) -> JaggedBatch:
    keys = [f.name for f in features]
    values = torch.cat([tensors[f.values] for f in features])
    if all(f.lengths is None for f in features):
        return JaggedBatch(keys, values)
    lengths = torch.cat(
        [
            torch.ones_like(tensors[f.values])
            if f.lengths is None
            else tensors[f.lengths].long()
            for f in features
        ]
    )
    weights = None
    if any(f.weights is not None for f in features):
        weights = torch.cat(
            [
                torch.ones_like(tensors[f.values], dtype=torch.float32)
                if f.weights is None
                else tensors[f.weights]
                for f in features
            ]
        )
    batch = JaggedBatch(keys, values, lengths=lengths, weights=weights)
    batch.sizes = [tensors[f.values].shape[0] for f in features]
    return batch


def _split(batch: JaggedBatch) -> dict[str, tuple[Tensor, Tensor, Any]]:
    """Values, lengths and weights of each feature."""
    found = {}
    for key in batch:
        if key == PADDING:
            raise errors.InvalidArgument(
                "padded ids within a graph cannot be exported"
            )
        values, lengths = batch[key]
        found[key] = values, lengths, None
    weights = batch.weights_or_none()
    if weights is not None:
        sizes = [len(values) for values, *_ in found.values()]
        parts: Any = torch.split(weights, sizes)
        for key, part in zip(found, parts, strict=True):
            found[key] = (*found[key][:2], part)
    return found


def _as_batch(x: Any) -> JaggedBatch:
    if isinstance(x, JaggedBatch):
        return x
    keys, values, offsets, weights, *_ = unpack(x, None)
    return JaggedBatch(keys, values, offsets=offsets, weights=weights)


def _take_features(part: Any, x: Any, found: dict[int, Tensor]) -> None:
    parts = _split(_as_batch(x))
    for feature in (_Feature(*f) for f in part):
        if feature.name not in parts:
            raise errors.MissingFeature(
                f"the batch has no feature {feature.name!r}; it has "
                f"{list(parts)}"
            )
        values, lengths, weights = parts[feature.name]
        found[feature.values] = values
        if feature.lengths is not None:
            found[feature.lengths] = lengths
        elif not bool((lengths == 1).all()):
            raise errors.ShapeError(
                f"feature {feature.name!r} was exported with one id a sample"
            )
        if feature.weights is not None:
            found[feature.weights] = (
                torch.ones(len(values)) if weights is None else weights.float()
            )


def _check_feature(
    feature: _Feature, tensors: Sequence[Tensor], single: bool
) -> None:
    values = tensors[feature.values]
    if feature.lengths is not None:
        lengths = tensors[feature.lengths].long()
        if bool((lengths < 0).any()) or bool((lengths > len(values)).any()):
            raise errors.OffsetsError(
                f"{feature.name}.lengths has values below 0, or above the "
                f"{len(values)} ids"
            )
        if int(lengths.sum()) != len(values):
            raise errors.OffsetsError(
                f"{feature.name}.lengths add up to {int(lengths.sum())}, but "
                f"there are {len(values)} ids"
            )
        if single and not bool((lengths == 1).all()):
            raise errors.ShapeError(
                f"the model needs one {feature.name!r} a sample"
            )
    if feature.weights is not None and tensors[feature.weights].shape != (
        values.shape
    ):
        raise errors.ShapeError(
            f"{feature.name}.weights has {len(tensors[feature.weights])} "
            f"elements for {len(values)} ids"
        )


class _Maker:
    """The tree of an object, and its tensors with their names."""

    def __init__(self, single: frozenset[str]) -> None:
        self.single = single
        self.inputs: list[TensorForm] = []
        self.tensors: list[Tensor] = []
        self._batched = False

    def tree(self, name: str, x: Any) -> dict[str, Any]:
        if isinstance(x, Tensor):
            return {"tensor": self._add(name, x)}
        if isinstance(x, _SCALARS):
            return {"constant": x}
        if isinstance(x, list | tuple):
            parts = [self.tree(f"{name}.{i}", y) for i, y in enumerate(x)]
            return {"tuple" if type(x) is tuple else "list": parts}
        if isinstance(x, JaggedBatch) or hasattr(x, "offsets_or_none"):
            return {"batch": self._features(_as_batch(x))}
        if isinstance(x, Mapping):
            parts_of = {str(k): self.tree(str(k), y) for k, y in x.items()}
            return {"dict": parts_of}
        if callable(getattr(x, "to_dict", None)):
            return self.tree(name, x.to_dict())
        raise errors.InvalidArgument(
            f"{name} is a {type(x).__name__}: a model that is exported takes "
            "and gives tensors, batches of ids, and lists and dicts of these"
        )

    def _features(self, batch: JaggedBatch) -> list[list[Any]]:
        one_each = batch.offsets_or_none() is None
        features = []
        for key, (values, lengths, weights) in _split(batch).items():
            one = one_each or key in self.single
            if not one:
                # A graph takes sizes of 0 and 1 for constant. What has one id
                # a sample here may be needed so.
                if not bool((lengths == 1).all()):
                    lengths = torch.arange(len(lengths)) % 3 + 1
                values = values.new_zeros(int(lengths.sum()))
                if weights is not None:
                    weights = torch.ones(len(values))
            part = _Feature(
                name=key,
                values=self._add(key, values, samples=one),
                lengths=None if one else self._add(f"{key}.lengths", lengths),
                weights=None
                if weights is None
                else self._add(f"{key}.weights", weights.float(), False),
            )
            features.append(list(part))
        return features

    def _add(self, name: str, x: Tensor, samples: bool | None = None) -> int:
        if any(name == one.name for one in self.inputs):
            name = f"{name}_{len(self.inputs)}"
        if x.dtype not in _NAMES:
            raise errors.DtypeError(
                f"{name} is of {x.dtype}, which requests cannot have"
            )
        self.inputs.append(
            TensorForm(
                name=name,
                datatype=_NAMES[x.dtype],
                shape=[-1] * x.dim(),
                samples=x.dim() > 0 if samples is None else samples,
            )
        )
        self.tensors.append(x)
        return len(self.tensors) - 1

    def check(self, form: Form) -> None:
        """Of an example: there are samples, two or more."""
        sizes = {
            one.name: int(x.shape[0])
            for one, x in zip(form.inputs, self.tensors, strict=True)
            if one.samples
        }
        if not sizes:
            raise errors.InvalidArgument("the example has no tensor")
        if len(set(sizes.values())) > 1:
            raise errors.ShapeError(
                f"the tensors of the example differ in their samples: {sizes}"
            )
        if min(sizes.values()) < 2:
            raise errors.InvalidArgument(
                "the example has fewer than two samples: torch.export takes "
                "a size of 1 for one that never changes"
            )
