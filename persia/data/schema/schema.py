"""What the columns of a table or file are: dense, categorical, label, ...

A schema is a Python object or a YAML file::

    delimiter: ","
    strip: true                 # spaces around values do not count
    label:
      column: income
      values: {"<=50K": 0, ">50K": 1}
    dense:
      - age
      - {column: capital-gain, log: true}
    categorical: [workclass, education]
    multivalued:
      - {column: history, separator: "|"}
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from persia import errors
from persia.base.check import kind


def _named(value: Any) -> Any:
    """A column given by its name alone."""
    return {"column": value} if isinstance(value, str) else value


def _texts_of(value: Any) -> Any:
    """Keys of ``values``: the text of a boolean or a number is meant."""
    if not isinstance(value, dict):
        return value
    out: dict[Any, Any] = {}
    for key, number in value.items():
        if isinstance(key, bool):
            out |= {str(key).lower(): number, str(key): number}
        else:
            out[str(key) if isinstance(key, int | float) else key] = number
    return out


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Character = Annotated[str, Field(pattern=r"^[\x01-\x09\x0b\x0c\x0e-\x7f]$")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Moments(_Model):
    """What :attr:`DenseColumn.standardise` subtracts and divides by."""

    mean: Number
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DenseColumn(_Model):
    """A number a sample; it becomes a column of ``batch.dense``.

    Attributes:
        column: the name in the file.
        missing: the value of an empty or missing field (see
            ``Schema.missing``), before the transformation.
        log: take log(1 + max(x, 0)).
        standardise: subtract a mean and divide by a standard deviation
            (after the logarithm); True: those of the first rows.
        scale: multiplies the value in the end.
        decimal: the mark of decimals in texts; with a comma, points mark
            thousands.
    """

    column: str
    missing: Number = 0.0
    log: bool = False
    standardise: bool | Moments = False
    scale: Number = 1.0
    decimal: Literal[".", ","] = "."


class CarryColumn(_Model):
    """A column that does not go into the model's ids or dense features: a
    batch has it as ``batch[name]``.

    Attributes:
        column: the name in the file.
        name: of the tensor; the column's by default.
        dtype: of the tensor: "int64", "float32", "float64" or "bool"; or
            "id": the ids of the values, int64, as :func:`persia.hash_ids`
            gives them. None: that of the column in the first rows; texts that
            are numbers are "int64" or "float64". Dates and times are seconds
            since 1970, float64. A value that is missing is NaN in floats;
            elsewhere its row is malformed.
    """

    column: str
    name: str = ""
    dtype: Literal["int64", "float32", "float64", "bool", "id"] | None = None

    @property
    def tensor(self) -> str:
        """The name of the tensor."""
        return self.name or self.column


class CategoricalColumn(_Model):
    """A value a sample, or several; it becomes a feature of ``batch.ids``.

    Attributes:
        column: the name in the file.
        name: the name of the feature; the column's by default.
        separator: divides a text into values, and there may be none; None:
            every field is one value, the empty one too. A column of lists
            needs none.
        max_length: keep so many values of a sample at most: the first, or
            the last ones of a sequence.
        hash: False: the column holds 64-bit ids already: integers, or texts
            of integers. Those from 2**63 to 2**64 - 1 are less 2**64.
        type: "number", "boolean" or "time": what the texts of CSV, or of
            JSON, mean. They have the ids of the values then, as a typed
            column has them: ``7.0`` and ``7`` that of 7. Texts that are none
            are malformed. None: texts are texts.
        buckets: the column holds numbers, and their bucket is the value: a
            list of rising bounds, or how many quantiles of the first rows.
        decimal: the mark of decimals in the texts of these numbers, as of
            :class:`DenseColumn`.
        hash_salt: another id for the same value, for columns that share a
            table with others but not their vocabulary.
    """

    column: str
    name: str = ""
    separator: Character | None = None
    max_length: int | None = Field(default=None, ge=1)
    hash: bool = True
    type: Literal["number", "boolean", "time"] | None = None
    buckets: Annotated[int, Field(ge=2, le=65536)] | list[Number] | None = None
    decimal: Literal[".", ","] = "."
    hash_salt: int = Field(default=0, ge=0, lt=2**64)

    @property
    def feature(self) -> str:
        """The name of the feature."""
        return self.name or self.column

    @property
    def columns(self) -> list[str]:
        """The columns that it is made of."""
        return [self.column]


class MultivaluedColumn(CategoricalColumn):
    """Any number of values a sample.

    Attributes:
        aligned: columns of lists, or of texts with the same separator, that
            have an entry for each value, such as its time. A batch has their
            entries beside the ids: ``batch.aligned[feature][name]``. A row
            that has more or fewer of them is malformed.
    """

    separator: Character | None = ","
    aligned: list[Annotated[CarryColumn, BeforeValidator(_named)]] = []


class SequenceColumn(MultivaluedColumn):
    """The same, in order."""


class CrossColumn(_Model):
    """Two columns or more as one value: the pair of their values.

    Its id is the hash of the texts of the values, in this order, with U+001F
    between them.

    Attributes:
        columns: their names.
        name: the name of the feature; "a_x_b" by default.
        hash_salt: as of :class:`CategoricalColumn`.
    """

    columns: list[str] = Field(min_length=2)
    name: str = ""
    hash_salt: int = Field(default=0, ge=0, lt=2**64)

    @property
    def feature(self) -> str:
        """The name of the feature."""
        return self.name or "_x_".join(self.columns)


class LabelColumn(_Model):
    """What is to be predicted.

    Attributes:
        column: the name in the file.
        name: of the task, where there are several; the column's by default.
        values: the number for each text of the column; other texts are
            malformed. None: 0 and 1, yes and no, true and false.
        threshold: the label is 1 where the column's number is at least this.
        number: the column holds any number (a regression), for a loop of
            your own: ``persia train`` has no loss for it.
    """

    column: str
    name: str = ""
    values: Annotated[dict[str, Number], BeforeValidator(_texts_of)] | None = (
        None
    )
    threshold: Number | None = None
    number: bool = False

    @model_validator(mode="after")
    def _one(self) -> LabelColumn:
        given = [self.values is not None, self.threshold is not None]
        if sum([*given, self.number]) > 1:
            raise ValueError("values, threshold and number exclude each other")
        return self

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.name or self.column

    @property
    def is_click(self) -> bool:
        """Whether it can only be 0 or 1."""
        values = self.values or {}
        return not self.number and set(values.values()) <= {0, 1}


Labels = Annotated[
    Annotated[LabelColumn, BeforeValidator(_named), Tag("label")]
    | Annotated[
        list[Annotated[LabelColumn, BeforeValidator(_named)]],
        Field(min_length=1),
        Tag("labels"),
    ],
    Discriminator(
        lambda v: "labels" if isinstance(v, list | tuple) else "label"
    ),
]
_TAGS = {"label", "labels"}

#: Names of tensors of a batch that have a meaning.
_RESERVED = {"ids", "dense", "label", "weight", "timestamp", "group"}


class Schema(_Model):
    """The columns of a table or file.

    The features of ``batch.ids`` are the categorical ones, then crosses,
    multi-valued ones and sequences.

    Attributes:
        dense: columns of ``batch.dense``, in this order.
        categorical: features with one id a sample.
        crosses: pairs of columns as one feature.
        multivalued: features with any number of ids a sample.
        sequences: the same, in order; ``max_length`` keeps the last ones.
        label: what is to be predicted: ``batch.label`` [B]. A list of columns
            is several tasks: ``batch.label`` [B, tasks], in which a label
            that is missing is NaN; a sample without its only label is
            malformed. None for data without labels.
        weight: the column of ``batch.weight``, numbers of at least 0.
        group: what samples belong to, such as the user: the ids of its values
            are ``batch.group``, for GAUC. It may be a feature, too.
        carry: columns that batches have as they are, as ``batch[name]``.
        time_format: of a timestamp in texts or digits, as strptime has it:
            "%y%m%d%H"; in UTC. Others are ISO 8601, or seconds since 1970.
        time_unit: of a timestamp in numbers: "s", "ms", "us" or "ns".
        timestamp: the column of ``batch.timestamp``: dates and times, or
            numbers since 1970 (see ``time_unit``).
        delimiter: between fields, one character.
        quote: around fields that hold the delimiter; None if nothing is.
        header: whether the first line has the names of the columns; "auto":
            if it names all columns that are used here.
        columns: the names of all columns in their order; needed for files
            without a header.
        strip: leave out spaces and tabs around names and values.
        missing: texts that count as a missing number.
        hash_version: of the texts that ids are hashes of: 2, or 1 for models
            trained before it. What the versions differ in is in
            :doc:`/data`.
    """

    dense: list[Annotated[DenseColumn, BeforeValidator(_named)]] = []
    categorical: list[
        Annotated[CategoricalColumn, BeforeValidator(_named)]
    ] = []
    multivalued: list[
        Annotated[MultivaluedColumn, BeforeValidator(_named)]
    ] = []
    sequences: list[Annotated[SequenceColumn, BeforeValidator(_named)]] = []
    crosses: list[CrossColumn] = []
    label: Labels | None = None
    weight: str | None = None
    group: Annotated[CategoricalColumn, BeforeValidator(_named)] | None = None
    carry: list[Annotated[CarryColumn, BeforeValidator(_named)]] = []
    timestamp: str | None = None
    time_format: str | None = None
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    delimiter: Character = ","
    quote: Character | None = '"'
    header: bool | Literal["auto"] = True
    columns: list[str] | None = None
    strip: bool = False
    missing: list[str] = [
        *("", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "null", "NULL"),
        *("None", r"\N", "-", "?"),
    ]
    hash_version: Literal[1, 2] = 2

    @classmethod
    def missing_texts(cls) -> list[str]:
        """The default of ``missing``."""
        return list(cls.model_fields["missing"].default)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            wrong = [_explain(dict(one)) for one in error.errors()]
            raise errors.InvalidArgument("; ".join(wrong)) from None
        except UnicodeError as error:  # half a character
            raise errors.InvalidArgument(f"a schema: {error}") from None

    @model_validator(mode="after")
    def _check(self) -> Schema:
        names = [c.feature for c in self.features]
        if not names:
            raise ValueError(
                "no categorical and no multivalued column; need at least one"
                " (or a sequence, or a cross)"
            )
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(
                f"features {twice} occur more than once; give one a name"
            )
        for c in self.categorical:
            if c.separator is not None:
                raise ValueError(
                    f"categorical column {c.column!r} has a separator; list"
                    " it under multivalued"
                )
        for c in [*self.categorical, *self.bags]:
            if not c.hash and (c.buckets is not None or c.hash_salt):
                raise ValueError(
                    f"column {c.column!r}: hash: false goes with neither"
                    " buckets nor hash_salt"
                )
        if twice := sorted({t for t in self.tasks if self.tasks.count(t) > 1}):
            raise ValueError(
                f"labels {twice} occur more than once; give one a name"
            )
        for bag in self.bags:
            beside = [c.tensor for c in bag.aligned]
            if "ids" in beside or len(set(beside)) < len(beside):
                raise ValueError(
                    f"columns aligned with {bag.feature!r}: give each a name "
                    "of its own, and not 'ids'"
                )
        carried = [c.tensor for c in self.carry]
        taken = {n for n in carried if carried.count(n) > 1 or n in _RESERVED}
        if taken:
            raise ValueError(
                f"carried columns {sorted(taken)}: a batch has another tensor "
                "of that name; give each a name of its own"
            )
        if self.time_format is not None and self.timestamp is None:
            raise ValueError("time_format needs a timestamp")
        if self.delimiter == self.quote:
            raise ValueError(
                f"delimiter and quote are both {self.quote!r}; give another, "
                "or quote: null where nothing is quoted"
            )
        if self.header is not True and self.columns is None:
            raise ValueError(
                f"header is {self.header!r}, so columns must list the names"
            )
        if self.columns is not None:
            unknown = sorted(self.used_columns - set(self.columns))
            if unknown:
                raise ValueError(f"{unknown} are not among columns")
        return self

    @property
    def singles(self) -> list[CategoricalColumn | CrossColumn]:
        """The features of one id a sample."""
        return [*self.categorical, *self.crosses]

    @property
    def bags(self) -> list[MultivaluedColumn]:
        """The features of any number of ids a sample."""
        return [*self.multivalued, *self.sequences]

    @property
    def features(self) -> list[CategoricalColumn | CrossColumn]:
        """All features of ``batch.ids``, in their order."""
        return [*self.singles, *self.bags]

    @property
    def columns_of_features(self) -> set[str]:
        """The names of the columns that a model predicts by."""
        names = {c.column for c in self.dense}
        for feature in self.features:
            names.update(feature.columns)
        return names

    @property
    def columns_of_ids(self) -> set[str]:
        """The names of the columns whose values become ids or integers, of
        which no digit may be lost."""
        names = {n for feature in self.features for n in feature.columns}
        if self.group:
            names.add(self.group.column)
        beside = [one for bag in self.bags for one in bag.aligned]
        return names | {
            one.column
            for one in [*self.carry, *beside]
            if one.dtype in ("id", "int64")
        }

    @property
    def used_columns(self) -> set[str]:
        """The names of the columns that are read."""
        names = self.columns_of_features
        names.update(one.column for one in self.labels)
        names.update(one.column for one in self.carry)
        names.update(one.column for bag in self.bags for one in bag.aligned)
        if self.group:
            names.add(self.group.column)
        return names | {n for n in (self.weight, self.timestamp) if n}

    @property
    def labels(self) -> list[LabelColumn]:
        """All labels, in the order of the columns of ``batch.label``."""
        if self.label is None:
            return []
        return self.label if isinstance(self.label, list) else [self.label]

    @property
    def tasks(self) -> list[str]:
        """The names of the labels."""
        return [label.task for label in self.labels]

    def chosen(
        self, label: Sequence[str] = (), group: str | None = None
    ) -> Schema:
        """The schema with other labels, or another group.

        Args:
            label: columns of labels; several are tasks. Those that the
                schema describes stay as they are there. None of them: those
                of the schema.
            group: the column of the group; None: as it is.

        Raises:
            InvalidArgument: a label is a feature of the schema, too.
        """
        if not label and group is None:
            return self
        fields: dict[str, Any] = self.model_dump(exclude_unset=True)
        if label:
            known = {one.column: one for one in self.labels}
            if leaks := sorted(self.columns_of_features & set(label)):
                raise errors.InvalidArgument(
                    f"labels {leaks}: the schema has them as features, which "
                    "the model would predict them by; take them out of it"
                )
            every = [
                known[n].model_dump(exclude_unset=True)
                if n in known
                else {"column": n}
                for n in label
            ]
            fields["label"] = every if len(every) > 1 else every[0]
        if group is not None:
            fields["group"] = {"column": group}
        return type(self)(**fields)

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Schema:
        """The schema in a YAML file, or a preset.

        Args:
            source: a path, or "adult", "avazu", "movielens" or "taobao".

        Raises:
            StorageError: there is no such file.
            InvalidArgument: it is no schema.
        """
        need = "a Schema, the path of a YAML file, or the name of a preset"
        path = Path(kind("schema", source, (str, os.PathLike), need))
        preset = _presets() / f"{source}.yaml"
        try:
            if not path.is_file() and path.name == str(source):
                text = preset.read_text(encoding="utf-8")
            else:
                text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeEncodeError) as error:
            raise errors.StorageError(
                f"no schema {os.fspath(source)!r}: neither a file nor one of"
                f" the presets {cls.presets()}"
            ) from error
        except UnicodeDecodeError as error:
            raise errors.InvalidArgument(
                f"schema {os.fspath(source)!r} is no text in UTF-8: {error}"
            ) from error
        return cls.of_yaml(text, os.fspath(source))

    @classmethod
    def of_yaml(cls, text: str, source: str) -> Schema:
        """The schema that a text of YAML is.

        Args:
            text: of it.
            source: where it is from, for the message.

        Raises:
            InvalidArgument: it is no schema.
        """
        try:
            content = yaml.load(text, _Loader)
            return cls(**kind("it", content, dict, "lines 'field: value'"))
        except (yaml.YAMLError, TypeError, errors.InvalidArgument) as error:
            raise errors.InvalidArgument(
                f"schema {source!r}: {error}"
            ) from error

    @classmethod
    def of_checkpoint(cls, text: str) -> Schema:
        """The schema that a checkpoint holds as JSON.

        One without a version of the hash is of a model that was trained
        before there were two: its version is 1.

        Raises:
            CorruptFile: it is no schema.
        """
        try:
            return cls(**({"hash_version": 1} | json.loads(text)))
        except (ValueError, TypeError) as error:
            raise errors.CorruptFile(
                f"the checkpoint holds no schema: {error}"
            ) from None

    def to_yaml(self) -> str:
        """The schema as the text of a YAML file that :meth:`load` reads.

        It says all that was given or measured, and the version of the hash,
        so that later versions of Persia give the same ids.
        """
        content = {
            name: value
            for name, value in self.model_dump(
                mode="json", exclude_unset=True
            ).items()
            if value or type(self).model_fields[name].default
        }
        content["hash_version"] = self.hash_version
        for name, value in content.items():
            if isinstance(value, list):
                content[name] = [_short(entry) for entry in value]
            elif name in ("label", "group"):
                content[name] = _short(value)
        text: str = yaml.safe_dump(
            content, sort_keys=False, allow_unicode=True, width=79
        )
        return text

    @staticmethod
    def presets() -> list[str]:
        """The names of the schemas that Persia has."""
        return sorted(
            file.name.removesuffix(".yaml") for file in _presets().iterdir()
        )


def _short(entry: Any) -> Any:
    """The name alone of a column of which nothing else is said."""
    alone = isinstance(entry, dict) and list(entry) == ["column"]
    return entry["column"] if alone else entry


def _presets() -> Any:
    return resources.files("persia.datasets") / "presets"


class _Loader(yaml.SafeLoader):
    """YAML whose keys are texts: ``yes: 1`` means the text "yes"."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        self.flatten_mapping(node)
        out: dict[Any, Any] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                name: Any = key.value
            else:
                name = self.construct_object(key, deep=True)
            out[name] = self.construct_object(value, deep=True)
        return out


def _explain(error: dict[str, Any]) -> str:
    """One error of pydantic: where, what, and the name that may be meant."""
    where = [str(part) for part in error["loc"]]
    where = where[:1] + [part for part in where[1:] if part not in _TAGS]
    text = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        fields = _fields_at(where)
        text += " (no such field"
        close = difflib.get_close_matches(where[-1], fields, 1, 0.5)
        text += f"; is {close[0]!r} meant?" if close else ""
        text += f"; there are {', '.join(fields)})" if fields else ")"
    return f"{'.'.join(where)}: {text}" if where else text


def _fields_at(where: list[str]) -> list[str]:
    """The fields that could stand where one is wrong."""
    if len(where) == 1:
        return list(Schema.model_fields)
    kinds: dict[str, type[BaseModel]] = {
        "dense": DenseColumn,
        "label": LabelColumn,
        "carry": CarryColumn,
        "crosses": CrossColumn,
        "multivalued": MultivaluedColumn,
        "sequences": SequenceColumn,
    }
    return list(kinds.get(where[0], CategoricalColumn).model_fields)
