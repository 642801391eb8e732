"""Oracles for the data sets: plain Python, nothing of Persia's own."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
M = 2**64 - 1


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & M


def _round(lane: int, word: int) -> int:
    return _rotate(lane + word * P2 & M, 31) * P1 & M


def xxh64(data: bytes, seed: int = 0) -> int:
    """XXH64 after its specification, as a signed number."""
    at, n = 0, len(data)
    if n >= 32:
        lanes = [seed + P1 + P2 & M, seed + P2 & M, seed, seed - P1 & M]
        while n - at >= 32:
            for i in range(4):
                word = int.from_bytes(data[at : at + 8], "little")
                lanes[i] = _round(lanes[i], word)
                at += 8
        h = sum(_rotate(x, r) for x, r in zip(lanes, (1, 7, 12, 18))) & M
        for lane in lanes:
            h = ((h ^ _round(0, lane)) * P1 + P4) & M
    else:
        h = seed + P5 & M
    h = h + n & M
    while n - at >= 8:
        word = int.from_bytes(data[at : at + 8], "little")
        h = (_rotate(h ^ _round(0, word), 27) * P1 + P4) & M
        at += 8
    if n - at >= 4:
        word = int.from_bytes(data[at : at + 4], "little")
        h = (_rotate(h ^ (word * P1 & M), 23) * P2 + P3) & M
        at += 4
    for byte in data[at:]:
        h = _rotate(h ^ (byte * P5 & M), 11) * P1 & M
    h = (h ^ h >> 33) * P2 & M
    h = (h ^ h >> 29) * P3 & M
    h ^= h >> 32
    return h - 2**64 if h >= 2**63 else h


def criteo_lines(text: bytes, columns: int = 40) -> tuple[list, list[int]]:
    """([label, integers, categories] of good lines, numbers of bad ones)."""
    good, bad = [], []
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        fields = line.removesuffix(b"\r").split(b"\t")
        row = _criteo_row(fields, columns)
        if row is None:
            bad.append(number)
        else:
            good.append(row)
    return good, bad


def _criteo_row(fields: list[bytes], columns: int) -> list | None:
    if len(fields) != columns:
        return None
    label = None
    if columns == 40:
        first, *fields = fields
        if first not in (b"0", b"1"):
            return None
        label = int(first)
    integers = []
    for field in fields[:13]:
        digits = field.removeprefix(b"-")
        if field and not (digits.isdigit() and len(digits) <= 18):
            return None
        integers.append(int(field or b"0"))
    return [label, integers, fields[13:]]


def data_file(name: str) -> Path:
    """A file of the real data, or skips the test."""
    root = Path(__file__).resolve().parents[2]
    default = root.parent / "shared" / "data"
    path = Path(os.environ.get("PERSIA_TEST_DATA", default)) / name
    if not path.exists():
        pytest.skip(f"no {path}; set PERSIA_TEST_DATA to the data's folder")
    return path


def write(path: Path, data: bytes) -> Path:
    """Writes a file, compressed if its name ends in .gz."""
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
