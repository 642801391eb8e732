"""Ids that were erased by hand: no version of an export answers for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from persia.errors import CorruptFile

if TYPE_CHECKING:
    from persia.serving.deltas.packet import ChainPlace
    from persia.serving.folder import Versions

#: The file of a root.
ERASED = "erased.json"
_Id = Annotated[int, pydantic.Field(strict=True, ge=-(1 << 63), lt=1 << 63)]
_VERSION = re.compile(r"v-([0-9]{6,12})")


class ErasedIds(pydantic.BaseModel):
    """Ids by table, of all versions up to one, which is the newest then; and
    of one that is being written then, whose rows are those of a packet before.

    Attributes:
        number: 1, 2, ... in the order of the erasing.
        until: the name of that version.
        chain, packet: that says so to who follows; "": none does.
        tables: the ids of each.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    number: int
    until: str = pydantic.Field(pattern=f"^{_VERSION.pattern}$")
    chain: str = ""
    packet: int = 0
    tables: dict[str, list[_Id]]

    def concerns(self, version: str, place: ChainPlace | None) -> bool:
        """Whether a version, at its place, may have rows of these ids."""
        if _number(version) <= _number(self.until):
            return True
        if place is None or place.chain != self.chain:
            return False
        return place.number < self.packet


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


def add_erased(
    root: Versions,
    tables: Mapping[str, list[int]],
    chain: str = "",
    packet: int = 0,
) -> None:
    """Notes that ids were erased now, as a packet says. Of versions that are
    there no more nothing stays noted."""
    names = root.names()
    if not names:
        return
    oldest, newest = names[0], names[-1]
    every = read_erased(root)
    one = ErasedIds(
        number=every[-1].number + 1 if every else 1,
        until=newest,
        chain=chain,
        packet=packet,
        tables=dict(tables),
    )
    if every and every[-1] == one.model_copy(
        update={"number": every[-1].number}
    ):
        return  # written before, by a call that failed later
    # The one behind `until` was being written.
    first = _number(oldest) - 1
    found = [old for old in every if _number(old.until) >= first]
    document = _File(format="persia-erased-1", erased=[*found, one])
    root.write_file(ERASED, [json.dumps(document.model_dump()).encode()])
