"""Deltas: a packet that is damaged, foreign or not the next one is refused by
name, and the version answers on."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import fs
from safetensors import safe_open

import persia
from persia import _core, errors
from persia.serving import repository
from persia.serving.config import ModelConfig
from persia.serving.deltas.packet import decode_packet, packet_name
from persia.serving.process import serving
from persia.serving.repository import Model
from tests.serving.conftest import call, until
from tests.serving.publishing import Chain, Root, answer

pytestmark = pytest.mark.slow


@pytest.fixture(params=["folder", "bucket"])
def roots(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], Root]:
    """A root by its name."""
    if request.param == "folder":
        here = fs.LocalFileSystem()
        return lambda name: Root(
            str(tmp_path / name),
            fs.SubTreeFileSystem(str(tmp_path / name), here),
        )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = request.getfixturevalue("bucket")
    uri = request.getfixturevalue("uri")
    return lambda name: Root(
        uri(name), fs.SubTreeFileSystem(f"bucket/{name}", bucket)
    )


def local(path: Path) -> Root:
    return Root(
        str(path), fs.SubTreeFileSystem(str(path), fs.LocalFileSystem())
    )


def signed(data: bytes) -> bytes:
    """With the checksum that it should have, where it has a place for one."""
    at = data.find(b'"crc32c":"') + 10
    if at < 10:
        return data
    zeros = data[:at] + b"00000000" + data[at + 8 :]
    crc = f"{_core.ckpt_crc(zeros):08x}".encode()
    return data[:at] + crc + data[at + 8 :]


def refused(chain: Chain, error: type[errors.PersiaError]) -> None:
    """The version is as it was before the packet."""
    loaded = persia.load_model(chain.path)
    before = answer(loaded)
    with pytest.raises(error):
        loaded.catch_up()
    assert torch.equal(answer(loaded), before)


def test_a_damaged_packet_is_refused(roots: Callable[[str], Root]) -> None:
    chain = Chain(roots("out"), 1)
    data = chain.read(1)
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
    chain.write(1, data[: len(data) // 2])  # half an upload
    refused(chain, errors.CorruptFile)
    chain.write(1, data)
    assert persia.load_model(chain.path).catch_up() == 1


def test_bytes_of_any_kind_are_an_error_with_a_name(tmp_path: Path) -> None:
    """Altered as an attacker can: with a checksum that is right."""
    chain = Chain(local(tmp_path / "out"), 1)
    data = chain.read(1)
    loaded = persia.load_model(chain.path)
    before = answer(loaded)
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
        with contextlib.suppress(
            errors.CorruptFile, errors.SchemaMismatch, errors.StaleLineage
        ):
            loaded.follower.check(decode_packet(signed(bytes(bad)), "it"))
    assert torch.equal(answer(loaded), before)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8", "int4"])
def test_a_value_that_is_not_finite_is_refused(
    kind: Any, tmp_path: Path
) -> None:
    """Before anything of its packet is applied."""
    chain = Chain(local(tmp_path / "out"), 1, row_dtype=kind)
    data = chain.read(1)
    packet = decode_packet(data, "a packet")
    at = data.index(packet.tables[-1].rows.tobytes()) + 8
    size = 2 if kind == "fp16" else 4
    for value in np.inf, np.nan, -np.inf:
        bad = np.array(value, f"<f{size}").tobytes()
        chain.write(1, signed(data[:at] + bad + data[at + size :]))
        refused(chain, errors.CorruptFile)


def test_a_gap_is_refused_until_the_next_version(
    roots: Callable[[str], Root],
) -> None:
    chain = Chain(roots("out"), 3)
    first, lost, third = (chain.read(n) for n in (1, 2, 3))
    chain.remove(2)
    model = Model("m", chain.path, 2)
    model.load()
    assert model.packets == 1
    assert model.catch_up() == 0
    with pytest.raises(errors.StaleLineage):
        model.check()
    for other in third, first:  # reordered, doubled
        chain.write(2, other)
        with pytest.raises(errors.StaleLineage):
            model.catch_up()
    chain.write(2, lost)
    assert model.catch_up() == 2


def after_another(foreign: Chain, chain: Chain) -> bytes:
    """The second packet of a chain, with the name of another."""
    data = foreign.read(2)
    return signed(data.replace(foreign.name.encode(), chain.name.encode()))


def test_a_foreign_packet_is_refused(roots: Callable[[str], Root]) -> None:
    chain, foreign = Chain(roots("a"), 2), Chain(roots("b"), 2)
    first = chain.read(1)
    chain.write(1, foreign.read(1))
    refused(chain, errors.StaleLineage)
    chain.write(1, first)
    chain.write(2, after_another(foreign, chain))
    loaded = persia.load_model(chain.path)
    with pytest.raises(errors.StaleLineage):
        loaded.catch_up()
    assert loaded.packets == 1


OTHER_SCHEMAS = [
    (b"persia-delta-1", b"persia-delta-9"),
    (b'\\"dim\\":8', b'\\"dim\\":9'),
    (b'{\\"name\\":\\"a\\"', b'{\\"name\\":\\"z\\"'),
]


def test_a_packet_of_another_schema_is_refused(
    roots: Callable[[str], Root],
) -> None:
    chain = Chain(roots("out"), 1)
    data = chain.read(1)
    for old, new in OTHER_SCHEMAS:
        assert old in data
        chain.write(1, signed(data.replace(old, new, 1)))
        refused(chain, errors.PersiaError)


@pytest.mark.skipif(_core.GRPC == "none", reason="built without gRPC")
def test_a_process_answers_on(
    roots: Callable[[str], Root],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over HTTP and gRPC, with the bits of the packet before, until the right
    one is there."""
    pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
    from tests.serving.asking import Both, several

    said: list[str] = []
    monkeypatch.setattr(repository, "say", lambda text, *_: said.append(text))
    chain, foreign = (
        Chain(roots("m"), 10, rebase=1e9),
        Chain(roots("other"), 2),
    )
    whole = {n: chain.read(n) for n in range(1, 11)}
    faults: list[Callable[[int], bytes | None]] = [
        lambda n: None,  # lost: the one behind it is there
        lambda n: whole[n - 1],  # doubled
        lambda n: whole[n + 1],  # reordered
        lambda n: whole[n][:-9],  # truncated
        lambda n: b"",
        lambda n: foreign.read(1),
        lambda n: after_another(foreign, chain),
        lambda n: signed(whole[n].replace(*OTHER_SCHEMAS[1], 1)),
    ]
    for n in range(2, 11):
        chain.remove(n)
    config = ModelConfig(
        port=0, grpc_port=0, threads=1, poll=0.05, cache=tmp_path / "kept"
    )
    with serving(config, (f"m={chain.path}",)) as one:
        both = Both(one, {"m": several()})
        for n, fault in enumerate(faults, 2):
            before, bad = len(said), fault(n)
            if bad is None:
                chain.write(n + 1, whole[n + 1])
            else:
                chain.write(n, bad)
            until(lambda b=before: len(said) > b)
            both.check("m")
            assert one.repository.is_ready
            if bad is None:
                chain.remove(n + 1)
            chain.write(n, whole[n])
            until(lambda n=n: one.repository.models["m"].packets == n)
            both.want["m"] = both.answers("m")
        both.close()


@pytest.mark.parametrize(
    "ids", [b"[1", b'["1"]', b"[1.5]", b"[9223372036854775808]", b"\xff", b""]
)
def test_a_damaged_list_of_erased_ids_is_refused(
    ids: bytes, tmp_path: Path
) -> None:
    """By name: another exception would end the thread that follows."""
    chain = Chain(local(tmp_path / "out"), 1)
    model = Model("m", chain.path, 2)
    model.load()
    before = answer(model.current)
    entry = b'{"number":1,"until":"v-000001","tables":{"a":%s}}' % ids
    (tmp_path / "out" / "erased.json").write_bytes(
        b'{"format":"persia-erased-1","erased":[%s]}' % entry
    )
    with pytest.raises(errors.CorruptFile):
        model.check()
    assert torch.equal(answer(model.current), before)


def test_packets_are_verified(roots: Callable[[str], Root]) -> None:
    chain = Chain(roots("out"), 3)
    assert persia.load_model(chain.path).verify_packets() == 3
    whole = chain.read(2)
    for bad in (whole[:-1], whole[:-1] + b"?", chain.read(3)):
        chain.write(2, bad)
        with pytest.raises((errors.CorruptFile, errors.StaleLineage)):
            persia.load_model(chain.path).verify_packets()
        with pytest.raises(errors.CorruptFile):
            call("model", "verify", chain.path)
    chain.remove(2)
    with pytest.raises(errors.StaleLineage):
        persia.load_model(chain.path).verify_packets()


def test_a_model_without_room_waits_for_a_version(tmp_path: Path) -> None:
    chain = Chain(local(tmp_path / "out"), 2)
    model = Model("m", chain.path, 2, rows_limit=1)
    model.load()  # it answers without the packets
    before = answer(model.current)
    with pytest.raises(errors.LimitReached):
        model.catch_up()
    assert answer(model.current).shape == before.shape


def test_a_packet_read_as_the_page_says(tmp_path: Path) -> None:
    """docs/reference/exports.md, with safetensors and NumPy alone."""
    chain = Chain(local(tmp_path / "out"), 2)
    before = None
    for number in (1, 2):
        path = tmp_path / "out" / packet_name(chain.name, number)
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
        assert (about["chain"], about["number"]) == (chain.name, str(number))
        assert about["parent"] == (before or "00000000")
        before = about["crc32c"]
        zeros = raw.replace(
            f'"crc32c":"{before}"'.encode(), b'"crc32c":"00000000"', 1
        )
        assert f"{_core.ckpt_crc(zeros):08x}" == before
    loaded = persia.load_model(chain.path)
    loaded.catch_up()
    for table, raw_rows in rows.items():
        ids = raw_rows[:, :8].copy().view("<i8")[:, 0]
        vectors = raw_rows[:, 8:40].copy().view("<f4")
        found = loaded.vectors(table, torch.from_numpy(ids)).numpy()
        assert np.array_equal(found, vectors)
