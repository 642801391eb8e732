"""Deltas: a packet that is damaged, foreign or not the next one is refused by
name, and the version answers on."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import persia
from persia import _core, errors
from persia.serving.deltas.packet import decode_packet, packet_name
from persia.serving.repository import Model
from tests.serving.conftest import call
from tests.serving.publishing import answer, published, start, train, trained

pytestmark = pytest.mark.slow


def chain(tmp_path: Path, packets: int) -> tuple[Path, str, list[Path]]:
    """A chain of so many packets: its root, its name and its files."""
    store, model = trained()
    root = tmp_path / "out"
    with start(model, root) as publisher:
        for _ in range(packets):
            train(model)
            published(publisher)
        name = publisher.place.chain
    store.close()
    every = [root / packet_name(name, n + 1) for n in range(packets)]
    return root, name, every


def refused(root: Path, error: type[errors.PersiaError]) -> None:
    """The version is as it was before the packet."""
    loaded = persia.load_model(root)
    before = answer(loaded)
    with pytest.raises(error):
        loaded.catch_up()
    assert torch.equal(answer(loaded), before)


def test_a_damaged_packet_is_refused(tmp_path: Path) -> None:
    root, _, (file,) = chain(tmp_path, 1)
    data = file.read_bytes()
    step = max(1, len(data) // 150)
    for at in [*range(0, 600, 7), *range(600, len(data), step)]:
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises((errors.CorruptFile, errors.SchemaMismatch)):
            decode_packet(bytes(bad), "a packet")
    for size in [0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1]:
        with pytest.raises(errors.CorruptFile):
            decode_packet(data[:size], "a packet")
    with pytest.raises(errors.CorruptFile):
        decode_packet(data + b"\0", "a packet")
    file.write_bytes(data[: len(data) // 2])  # half an upload
    refused(root, errors.CorruptFile)
    file.write_bytes(data)
    assert persia.load_model(root).catch_up() == 1


def test_bytes_of_any_kind_are_an_error_with_a_name(tmp_path: Path) -> None:
    """Altered as an attacker can: with a checksum that is right."""
    _, _, (file,) = chain(tmp_path, 1)
    data = file.read_bytes()
    rng = random.Random(3)
    size = int.from_bytes(data[:8], "little")
    for _ in range(400):
        header = bytearray(data[8 : 8 + size])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(header))
            header[at : at + rng.randrange(3)] = bytes(
                rng.choice(b'0123456789{}[]":,-e.') for _ in range(2)
            )
        bad = len(header).to_bytes(8, "little") + header + data[8 + size :]
        with contextlib.suppress(errors.CorruptFile, errors.SchemaMismatch):
            decode_packet(signed(bytes(bad)), "a packet")


def signed(data: bytes) -> bytes:
    """With the checksum that it should have, where it has a place for one."""
    at = data.find(b'"crc32c":"') + 10
    if at < 10:
        return data
    zeros = data[:at] + b"00000000" + data[at + 8 :]
    crc = f"{_core.ckpt_crc(zeros):08x}".encode()
    return data[:at] + crc + data[at + 8 :]


def test_a_gap_is_refused_until_the_next_version(tmp_path: Path) -> None:
    root, _, files = chain(tmp_path, 3)
    lost = files[1].read_bytes()
    files[1].unlink()
    model = Model("m", str(root), 2)
    model.load()
    assert model.packets == 1
    assert model.catch_up() == 0
    with pytest.raises(errors.StaleLineage):
        model.check()
    files[1].write_bytes(files[2].read_bytes())  # reordered
    with pytest.raises(errors.StaleLineage):
        model.catch_up()
    files[1].write_bytes(files[0].read_bytes())  # doubled
    with pytest.raises(errors.StaleLineage):
        model.catch_up()
    files[1].write_bytes(lost)
    assert model.catch_up() == 2


def test_a_foreign_packet_is_refused(tmp_path: Path) -> None:
    root, name, files = chain(tmp_path / "a", 2)
    _, other, foreign = chain(tmp_path / "b", 2)
    first = files[0].read_bytes()
    files[0].write_bytes(foreign[0].read_bytes())
    refused(root, errors.StaleLineage)
    # of the name of this chain, but after another packet
    data = foreign[1].read_bytes().replace(other.encode(), name.encode())
    files[0].write_bytes(first)
    files[1].write_bytes(signed(data))
    loaded = persia.load_model(root)
    with pytest.raises(errors.StaleLineage):
        loaded.catch_up()
    assert loaded.packets == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"persia-delta-1", b"persia-delta-9"),
        (b'\\"dim\\":8', b'\\"dim\\":9'),
        (b'{\\"name\\":\\"a\\"', b'{\\"name\\":\\"z\\"'),
    ],
)
def test_a_packet_of_another_schema_is_refused(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    root, _, (file,) = chain(tmp_path, 1)
    data = file.read_bytes()
    assert old in data
    file.write_bytes(signed(data.replace(old, new, 1)))
    refused(root, errors.PersiaError)


def test_packets_are_verified(tmp_path: Path) -> None:
    root, _, files = chain(tmp_path, 3)
    assert persia.load_model(root).verify_packets() == 3
    whole = files[1].read_bytes()
    for bad in (whole[:-1], whole[:-1] + b"?", files[2].read_bytes()):
        files[1].write_bytes(bad)
        with pytest.raises((errors.CorruptFile, errors.StaleLineage)):
            persia.load_model(root).verify_packets()
        with pytest.raises(errors.CorruptFile):
            call("model", "verify", root)
    files[1].unlink()
    with pytest.raises(errors.StaleLineage):
        persia.load_model(root).verify_packets()


def test_a_model_without_room_waits_for_a_version(tmp_path: Path) -> None:
    root, _, _ = chain(tmp_path, 2)
    model = Model("m", str(root), 2, rows_limit=1)
    model.load()  # it answers without the packets
    before = answer(model.current)
    with pytest.raises(errors.LimitReached):
        model.catch_up()
    assert answer(model.current).shape == before.shape


def test_a_packet_read_as_the_page_says(tmp_path: Path) -> None:
    """docs/reference/exports.md, with safetensors and NumPy alone."""
    root, name, files = chain(tmp_path, 2)
    before = None
    for number, path in enumerate(files, 1):
        raw = path.read_bytes()
        with safe_open(path, "np") as file:
            about = file.metadata()
            tables = json.loads(about["tables"])
            rows = {
                t["name"]: file.get_tensor(f"rows.{i}")
                for i, t in enumerate(tables)
            }
            dense = any(k.startswith("dense.") for k in [*file.keys()])
        assert about["format"] == "persia-delta-1" and dense
        assert (about["chain"], about["number"]) == (name, str(number))
        assert about["parent"] == (before or "00000000")
        before = about["crc32c"]
        zeros = raw.replace(
            f'"crc32c":"{before}"'.encode(), b'"crc32c":"00000000"', 1
        )
        assert f"{_core.ckpt_crc(zeros):08x}" == before
    loaded = persia.load_model(root)
    loaded.catch_up()
    for table, raw_rows in rows.items():
        ids = raw_rows[:, :8].copy().view("<i8")[:, 0]
        vectors = raw_rows[:, 8:40].copy().view("<f4")
        found = loaded.vectors(table, torch.from_numpy(ids)).numpy()
        assert np.array_equal(found, vectors)
