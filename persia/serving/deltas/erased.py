"""Ids that were erased by hand: no version of an export answers for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from persia.errors import CorruptFile

if TYPE_CHECKING:
    from persia.serving.folder import Versions

#: The file of a root.
ERASED = "erased.json"
_Id = Annotated[int, pydantic.Field(strict=True, ge=-(1 << 63), lt=1 << 63)]
_VERSION = re.compile(r"v-([0-9]{6,12})")


class ErasedIds(pydantic.BaseModel):
    """Ids by table, of all versions up to one, which is the newest then.

    Attributes:
        number: 1, 2, ... in the order of the erasing.
        until: the name of that version.
        tables: the ids of each.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    number: int
    until: str = pydantic.Field(pattern=f"^{_VERSION.pattern}$")
    tables: dict[str, list[_Id]]

    def concerns(self, version: str) -> bool:
        """Whether a version may have rows of these ids."""
        return _number(version) <= _number(self.until)


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    format: Literal["persia-erased-1"]
    erased: list[ErasedIds]


def _number(version: str) -> int:
    found = _VERSION.fullmatch(version)
    return int(found.group(1)) if found else 0


def read_erased(root: Versions) -> Sequence[ErasedIds]:
    """What was erased, from the oldest on.

    Raises:
        CorruptFile: the file is no list of ids.
        StorageError: it cannot be read.
    """
    raw = root.read(ERASED)
    if raw is None:
        return []
    try:
        return _File.model_validate_json(raw).erased
    except pydantic.ValidationError as error:
        raise CorruptFile(f"{root}/{ERASED} is damaged: {error}") from None


def add_erased(root: Versions, tables: Mapping[str, list[int]]) -> None:
    """Notes that ids were erased now. Of versions that are there no more
    nothing stays noted."""
    names = root.names()
    if not names:
        return
    oldest, newest = names[0], names[-1]
    every = read_erased(root)
    if every and every[-1].tables == tables and every[-1].until == newest:
        return  # written before, by a call that failed later
    found = [one for one in every if one.concerns(oldest)]
    one = ErasedIds(
        number=every[-1].number + 1 if every else 1,
        until=newest,
        tables=dict(tables),
    )
    document = _File(format="persia-erased-1", erased=[*found, one])
    root.write_file(ERASED, [json.dumps(document.model_dump()).encode()])
