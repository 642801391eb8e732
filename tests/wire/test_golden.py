"""Bytes that releases write are read, and written again, as they were."""

from __future__ import annotations

import pytest

from tests.wire.golden import read, versions
from tests.wire.test_proto import pb, same, wire

KNOWN = [
    (version, name) for version in versions() for name in sorted(read(version))
]


def test_each_version_has_its_bytes() -> None:
    assert {version for version, _ in KNOWN} == set(versions())


@pytest.mark.parametrize(("version", "name"), KNOWN)
def test_bytes_of_a_release_mean_the_same(version: int, name: str) -> None:
    """To this tree and to stock protobuf; fields that a later release added
    are not there."""
    data = bytes.fromhex(read(version)[name])
    kind = getattr(pb, name)
    assert same(wire.read(data, kind()), kind.FromString(data))


@pytest.mark.parametrize(
    "name", [name for version, name in KNOWN if version == versions()[-1]]
)
def test_the_same_bytes_are_written(name: str) -> None:
    data = bytes.fromhex(read(versions()[-1])[name])
    assert wire.write(getattr(pb, name).FromString(data)) == data
