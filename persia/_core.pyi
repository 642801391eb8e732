# The C core: csrc/py. Buffers are any object with the buffer protocol.
from typing import Any, final

import numpy.typing as npt
from typing_extensions import Buffer as _Buffer

Buffer = _Buffer | npt.NDArray[Any]

def __getattr__(name: str) -> Any: ...

# --- csrc/py/data.c ---

def value_hash(value: Buffer, salt: int = 0, /) -> int: ...
def strings_hash(
    offsets: Buffer,
    bytes: Buffer | None,
    first: int,
    n: int,
    wide: bool,
    strip: bool,
    salt: int,
    ids: Buffer,
    /,
) -> None: ...
def strings_split(
    offsets: Buffer,
    bytes: Buffer | None,
    first: int,
    n: int,
    wide: bool,
    strip: bool,
    separator: bytes,
    salt: int,
    ids: Buffer,
    lengths: Buffer,
    /,
) -> int: ...
def lines_skip(text: Buffer, final: bool, lines: int, /) -> tuple[int, int]: ...
@final
class CriteoReader:
    lines: int
    faults: int
    def __init__(
        self, has_label: bool, salts: tuple[int, ...], /
    ) -> None: ...
    def read(
        self,
        text: Buffer,
        final: bool,
        n: int,
        room: int,
        label: Buffer | None,
        integers: Buffer,
        ids: Buffer,
        /,
    ) -> tuple[int, int]: ...
    def take_faults(self) -> list[tuple[int, int, int]]: ...
    def pass_lines(self, n: int, /) -> None: ...
@final
class Synth:
    def __init__(
        self,
        *,
        seed: int = ...,
        singles: int = ...,
        multis: int = ...,
        max_length: int = ...,
        dense: int = ...,
        vocabulary: int = ...,
        zipf: float = ...,
        ctr: float = ...,
        signal: float = ...,
    ) -> None: ...
    def ids_room(self, n: int, /) -> int: ...
    def read(
        self,
        first: int,
        n: int,
        label: Buffer,
        logit: Buffer | None,
        dense: Buffer,
        ids: Buffer,
        lengths: Buffer,
        /,
    ) -> int: ...
