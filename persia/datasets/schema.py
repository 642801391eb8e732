"""What the columns of a CSV file are: dense, categorical, multi-valued, label.

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

import os
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from persia import errors
from persia._check import kind

__all__ = ["CategoricalColumn", "DenseColumn", "LabelColumn", "Schema"]


def _named(value: Any) -> Any:
    """A column given by its name alone."""
    return {"column": value} if isinstance(value, str) else value


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Character = Annotated[str, Field(pattern=r"^[\x01-\x09\x0b\x0c\x0e-\x7f]$")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class DenseColumn(_Model):
    """A number a sample; it becomes a column of ``batch.dense``.

    Attributes:
        column: the name in the file.
        missing: the value of an empty or missing field (see
            ``Schema.missing``), before the transformation.
        log: take log(1 + max(x, 0)).
        scale: multiplies the value in the end.
    """

    column: str
    missing: Number = 0.0
    log: bool = False
    scale: Number = 1.0


class CategoricalColumn(_Model):
    """A value a sample, or several; it becomes a feature of ``batch.ids``.

    Attributes:
        column: the name in the file.
        name: the name of the feature; the column's by default.
        separator: divides a field into values, and there may be none; None:
            every field is one value, the empty one too.
        hash_salt: another id for the same value, for columns that share a
            table with others but not their vocabulary.
    """

    column: str
    name: str = ""
    separator: Character | None = None
    hash_salt: int = Field(default=0, ge=0, lt=2**64)

    @property
    def feature(self) -> str:
        """The name of the feature."""
        return self.name or self.column


class _MultivaluedColumn(CategoricalColumn):
    separator: Character | None = ","


class LabelColumn(_Model):
    """What is to be predicted.

    Attributes:
        column: the name in the file.
        values: the number for each text of the column; other texts are
            malformed. None: the column holds numbers.
    """

    column: str
    values: dict[str, Number] | None = None


class Schema(_Model):
    """The columns of a CSV file.

    Attributes:
        dense: columns of ``batch.dense``, in this order.
        categorical: features with one id a sample.
        multivalued: features with any number of ids a sample.
        label: None for files without labels.
        delimiter: between fields, one character.
        quote: around fields that hold the delimiter; None if nothing is.
        header: whether the first line has the names of the columns; "auto":
            if it names all columns that are used here.
        columns: the names of all columns in their order; needed for files
            without a header.
        strip: leave out spaces and tabs around names and values.
        missing: texts that count as a missing number.
    """

    dense: list[Annotated[DenseColumn, BeforeValidator(_named)]] = []
    categorical: list[
        Annotated[CategoricalColumn, BeforeValidator(_named)]
    ] = []
    multivalued: list[
        Annotated[_MultivaluedColumn, BeforeValidator(_named)]
    ] = []
    label: Annotated[LabelColumn, BeforeValidator(_named)] | None = None
    delimiter: Character = ","
    quote: Character | None = '"'
    header: bool | Literal["auto"] = True
    columns: list[str] | None = None
    strip: bool = False
    missing: list[str] = ["", "NA", "NaN", "nan", "null", "NULL", "?"]

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            wrong = [
                ".".join(map(str, (*one["loc"], ""))).removesuffix(".")
                + ": "
                + one["msg"].removeprefix("Value error, ")
                for one in error.errors()
            ]
            raise errors.InvalidArgument(
                "; ".join(text.removeprefix(": ") for text in wrong)
            ) from None

    @model_validator(mode="after")
    def _check(self) -> Schema:
        names = [c.feature for c in self.features]
        if not names:
            raise ValueError(
                "no categorical and no multivalued column; need at least one"
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
    def features(self) -> list[CategoricalColumn]:
        """All features of ``batch.ids``: categorical, then multivalued."""
        return [*self.categorical, *self.multivalued]

    @property
    def used_columns(self) -> set[str]:
        """The names of the columns that are read."""
        names = {c.column for c in self.dense}
        names |= {c.column for c in self.features}
        return names | ({self.label.column} if self.label else set())

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Schema:
        """The schema in a YAML file, or a preset.

        Args:
            source: a path, or "adult", "avazu" or "movielens".

        Raises:
            StorageError: there is no such file.
            InvalidArgument: it is no schema.
        """
        need = "a Schema, the path of a YAML file, or the name of a preset"
        path = Path(kind("schema", source, (str, os.PathLike), need))
        preset = resources.files(__package__) / "presets" / f"{source}.yaml"
        try:
            if not path.is_file() and path.name == str(source):
                text = preset.read_text(encoding="utf-8")
            else:
                text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise errors.StorageError(
                f"no schema {os.fspath(source)!r}: neither a file nor one of"
                f" the presets {cls.presets()}"
            ) from error
        except UnicodeDecodeError as error:
            raise errors.InvalidArgument(
                f"schema {os.fspath(source)!r} is no text in UTF-8: {error}"
            ) from error
        try:
            content = yaml.safe_load(text)
            return cls(**kind("it", content, dict, "lines 'field: value'"))
        except (yaml.YAMLError, TypeError, errors.InvalidArgument) as error:
            raise errors.InvalidArgument(
                f"schema {os.fspath(source)!r}: {error}"
            ) from error

    @staticmethod
    def presets() -> list[str]:
        """The names of the schemas that come with Persia."""
        folder = resources.files(__package__) / "presets"
        return sorted(
            file.name.removesuffix(".yaml") for file in folder.iterdir()
        )
