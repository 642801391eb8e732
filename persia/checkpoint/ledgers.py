"""The updates of a stream that shards have, as numbers.

Nothing of torch: a server reads manifests, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BYTES = 512  # of a window
_STREAMS = 65536  # that a shard keeps, see csrc/shard/ledger.h
_FAR = 1 << 22  # numbers between watermarks that are looked at one by one


class Numbers(NamedTuple):
    """A stream's ledger; window: 512 bytes, little-endian."""

    stream: int
    watermark: int
    window: bytes
    skipped: int = 0
    incarnation: int = 0

    def applied(self) -> int:
        """How many are in and were not skipped."""
        return self.watermark - self.skipped + self._bits().bit_count()

    def lacks(self, other: Numbers) -> int:
        """How many that are in the other are not in this one."""
        ahead = other.watermark - self.watermark
        mine, theirs = self._bits(), other._bits()
        if ahead <= 0:
            return (theirs >> min(-ahead, 8 * BYTES) & ~mine).bit_count()
        near = min(ahead, 8 * BYTES)
        between = ahead - (mine & (1 << near) - 1).bit_count()
        return between + (theirs & ~(mine >> near)).bit_count()

    def behind(self, number: int) -> int:
        """Bit i: whether number + 1 + i is in."""
        ones = self.watermark - number
        if ones < 0:
            return self._bits() >> min(-ones, 8 * BYTES)
        return self._bits() << ones | (1 << ones) - 1

    def _bits(self) -> int:
        return int.from_bytes(self.window, "little")


def of_streams(
    shards: Sequence[Sequence[Numbers]],
) -> list[list[Numbers]]:
    """The ledgers of each stream, one a shard. A shard that does not know it
    has none of its numbers. But one with as many as it keeps may have
    forgotten it, and is left out.
    """
    known = [{each.stream: each for each in shard} for shard in shards]
    names = dict.fromkeys(name for shard in known for name in shard)
    return [
        [
            shard.get(name, Numbers(name, 0, b""))
            for shard in known
            if name in shard or len(shard) < _STREAMS
        ]
        for name in names
    ]


def merge(ledgers: Sequence[Numbers]) -> Numbers:
    """Of one stream at several shards: a number is in if any shard has it.

    The rows of a shard that lacks it do not get it any more, as the others
    would get it twice. So it counts as skipped where it is :func:`in_part`.
    """
    last = max(each.watermark for each in ledgers)
    bits = 0
    for each in ledgers:
        bits |= each.behind(last)
    while bits & 1:
        last, bits = last + 1, bits >> 1
    return Numbers(
        ledgers[0].stream,
        last,
        bits.to_bytes(BYTES, "little"),
        max(each.skipped for each in ledgers) + in_part(ledgers),
        max(each.incarnation for each in ledgers),
    )


def in_part(ledgers: Sequence[Numbers]) -> int:
    """How many numbers of one stream some shards have and others lack. Of
    more than four million the first ones are estimated.
    """
    last = max(each.watermark for each in ledgers)
    lowest = min(each.watermark for each in ledgers)
    first = max(lowest, last - _FAR)
    near = [each.behind(first) for each in ledgers]
    every, some = near[0], 0
    for bits in near:
        every, some = every & bits, some | bits
    return first - lowest + (some & ~every).bit_count()
