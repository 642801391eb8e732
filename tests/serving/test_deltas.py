"""Deltas: a model that applies the packets is the model that trains, whatever
happens to its rows; a packet that is damaged, foreign or not the next one is
refused by name, and the version answers on."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import persia
from persia import _core, errors
from persia.checkpoint import saving
from persia.serving import ExportedModel, Publisher, exporting
from persia.serving.deltas import changes, writer
from persia.serving.deltas import publisher as publishers
from persia.serving.deltas.packet import decode_packet, packet_name
from persia.serving.folder import LocalVersions, versions_of
from persia.serving.repository import Model
from tests.remote import Servers
from tests.serving import models
from tests.serving.conftest import call
from tests.system.processes import wait_until

pytestmark = pytest.mark.slow

IDS = torch.arange(-60, 60)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is tried again at once, however slow the machine is."""
    monkeypatch.setattr(publishers, "_SLOW_S", 1e9)


def model_of(where: persia.Store, capacity: int | None = None) -> nn.Module:
    eviction = None if capacity is None else "lru"
    return models.CLICKS["widedeep"](
        persia.EmbeddingBagCollection(
            store=where,
            tables=[
                persia.EmbeddingBagConfig(
                    key, 8, [key], capacity=capacity, eviction=eviction
                )
                for key in models.KEYS
            ],
        )
    )


def train(model: nn.Module, steps: int = 1) -> None:
    models.train(model, lambda: models.batch(16), steps)


def start(model: nn.Module, root: Path, **options: Any) -> Publisher:
    example = models.batch(3)
    return Publisher(model, root, example=example, every=1e-3, **options)


def published(publisher: Publisher) -> None:
    publisher.flush()
    assert publisher.publish()
    publisher.flush()


def same(loaded: ExportedModel, model: nn.Module, where: Path) -> None:
    """A loaded model is an export of this moment, bit for bit."""
    shutil.rmtree(where, ignore_errors=True)
    persia.export(
        model,
        where,
        example=models.batch(3),
        row_dtype=loaded.manifest.tables[0].type,
    )
    want = persia.load_model(where)
    for table in (t.options.name for t in want.manifest.tables):
        has = want.has_rows(table, IDS)
        assert torch.equal(loaded.has_rows(table, IDS), has)
        assert torch.equal(
            loaded.vectors(table, IDS), want.vectors(table, IDS)
        )
    call = models.batch(9)
    assert torch.equal(loaded(*call), want(*call))
    model.train()


def operate(
    model: nn.Module, store: persia.Store, rng: random.Random, saved: Path
) -> None:
    """Something that changes rows."""
    table = rng.choice(models.KEYS)
    ids = [rng.randrange(-60, 60) for _ in range(rng.randrange(1, 20))]
    kind = rng.randrange(8)
    if kind == 0:
        store.erase(table, ids)
    elif kind == 1:
        store.set_rows(table, ids, torch.randn(len(ids), 8))
    elif kind == 2:
        store.load(saved, model=model)
    elif kind == 3:
        store.clear(table)
    else:
        train(model, rng.randrange(1, 4))


@pytest.mark.parametrize(
    "seed",
    [
        *range(3),
        *(pytest.param(i, marks=pytest.mark.long) for i in range(3, 12)),
    ],
)
def test_a_model_that_follows_is_the_model_that_trains(
    seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    store = models.store()
    model = model_of(store, capacity=40 if seed % 2 else None)
    train(model, 3)
    store.save(tmp_path / "saved", model=model)
    kind = ("fp32", "int8", "fp16")[seed % 3]
    with start(model, tmp_path / "out", row_dtype=kind) as publisher:
        loaded = persia.load_model(tmp_path / "out")
        for _ in range(6):
            for _ in range(rng.randrange(4)):
                operate(model, store, rng, tmp_path / "saved")
            published(publisher)
            loaded.catch_up()
            if loaded.follower.place.chain != publisher.place.chain:
                loaded = persia.load_model(tmp_path / "out")
            same(loaded, model, tmp_path / "export")
        late = persia.load_model(tmp_path / "out")
        late.catch_up()
        same(late, model, tmp_path / "export")
    store.close()


@pytest.mark.parametrize("servers", [0, 2])
def test_a_packet_is_due_by_rows(servers: int, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        where = {}
        if servers:
            if not _core.GRPC[0].isdigit():
                pytest.skip("without gRPC")
            made = Servers(servers, checkpoints=str(tmp_path))
            stack.enter_context(contextlib.closing(made))
            where = {"servers": made.text}
        store = stack.enter_context(contextlib.closing(models.store(**where)))
        model = model_of(store)
        train(model)
        with Publisher(
            model,
            tmp_path / "out",
            example=models.batch(3),
            every=1000,
            every_rows=10,
        ) as publisher:
            for turn in range(2):
                store.set_rows("a", range(4), torch.ones(4, 8))
                store.set_rows("b", range(5), torch.ones(5, 8))
                for _ in range(10):
                    assert not publisher.step()
                    time.sleep(0.01)
                store.set_rows("a", [100 + turn], torch.ones(1, 8))
                wait_until(publisher.step)
                publisher.flush()
            assert publisher.place.number == 2


def chain(tmp_path: Path, packets: int) -> tuple[Path, str, list[Path]]:
    """A chain of so many packets: its root, its name and its files."""
    store = models.store()
    model = model_of(store)
    train(model)
    root = tmp_path / "out"
    with start(model, root) as publisher:
        for _ in range(packets):
            train(model)
            published(publisher)
        name = publisher.place.chain
    store.close()
    every = [root / packet_name(name, n + 1) for n in range(packets)]
    return root, name, every


def answer(model: ExportedModel) -> Tensor:
    torch.manual_seed(9)
    return model(*models.batch(9))


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


def test_a_rollback_takes_packets_back(tmp_path: Path) -> None:
    store = models.store()
    model = model_of(store)
    train(model, 4)
    root = tmp_path / "out"
    versions = versions_of(root)

    def exported(name: str, one: ExportedModel) -> bool:
        want = persia.load_model(root, name)
        call = models.batch(9)
        return all(
            torch.equal(one.vectors(key, IDS), want.vectors(key, IDS))
            for key in models.KEYS
        ) and torch.equal(one(*call), want(*call))

    with start(model, root, rebase=0.5, keep=3) as publisher:
        server = Model("m", str(root), 3)
        server.load()
        train(model, 8)
        published(publisher)  # and a second version
        first, second = versions.names()
        about = versions.version(second).manifest
        assert about.step == about.updates == store.updates
        assert server.catch_up() > 0
        assert server.follow() == second
        versions.use(first)
        assert server.follow() == first
        train_others(store)  # too few rows for another version
        published(publisher)
        assert versions.names() == [first, second]
        late = Model("late", str(root), 3)
        late.load()
        for one in (server, late):
            assert one.catch_up() == 0
            one.check()
            assert exported(first, one.current)
        versions.use(second)
        assert server.follow() == second
        same(server.current, model, tmp_path / "export")
        # By name: without packets as well, though it has had some.
        server.load(second, pin=True)
        assert server.catch_up() == 0
        assert exported(second, server.current)
    store.close()


def test_erased_ids_leave_every_version(tmp_path: Path) -> None:
    store = models.store()
    model = model_of(store)
    train(model, 4)
    ids = store.ids("a")[:5]
    root = tmp_path / "out"
    with start(model, root, rebase=0.5, keep=3) as publisher:
        train(model, 8)
        published(publisher)  # and a second version
        names = versions_of(root).names()
        assert len(names) == 2
        following, pinned = Model("m", str(root), 3), Model("p", str(root), 3)
        following.load()
        pinned.load(names[0], pin=True)
        old = following.version(names[0])
        for one in (following.current, pinned.current, old):
            assert bool(one.has_rows("a", ids).all())
        store.erase("a", ids)
        train_others(store)
        published(publisher)
        # An id that is trained again is there again, but in no old version.
        store.set_rows("a", ids[:1], torch.ones(1, 8))
        published(publisher)
        for one in (following, pinned):
            one.check()
            one.catch_up()
            one.check()
        assert following.packets > 0
        assert following.current.has_rows("a", ids).tolist() == [
            True,
            *[False] * 4,
        ]
        folder = persia.load_model(root / names[0])
        for one in (
            pinned.current,
            old,
            persia.load_model(root, names[0]),
            folder,
        ):
            assert not bool(one.has_rows("a", ids).any())
        # One that is put into use by name before it has the packet.
        store.erase("a", ids[:1])
        published(publisher)
        following.check()
        following.load(following.current.version, pin=True)
        following.check()
        assert not bool(following.current.has_rows("a", ids).any())
    store.close()


def train_others(store: persia.Store) -> None:
    store.set_rows("b", [1, 2, 3], torch.zeros(3, 8))


def test_a_storage_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = models.store()
    model = model_of(store)
    train(model)
    told = threading.Event()
    monkeypatch.setattr(writer, "warn", lambda _: told.set())
    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    write, fails = LocalVersions.write_file, threading.Event()

    def failing(self: LocalVersions, *args: Any) -> None:
        if fails.is_set():
            raise errors.StorageError("the storage is away")
        write(self, *args)

    monkeypatch.setattr(LocalVersions, "write_file", failing)
    with start(model, tmp_path / "out") as publisher:
        loaded = persia.load_model(tmp_path / "out")
        fails.set()
        train(model)
        assert publisher.publish()
        assert told.wait(60)
        for _ in range(3):
            train(model)
            assert not publisher.publish()  # the changes stay for later
        assert loaded.catch_up() == 0
        fails.clear()
        published(publisher)
        assert loaded.catch_up() == 2
        same(loaded, model, tmp_path / "export")
    store.close()


def test_a_version_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = models.store()
    model = model_of(store)
    train(model, 4)
    told: list[str] = []
    monkeypatch.setattr(publishers, "warn", told.append)
    add, fails = LocalVersions.add, threading.Event()

    def failing(self: LocalVersions, *args: Any) -> Any:
        if fails.is_set():
            raise errors.StorageError("the storage is away")
        return add(self, *args)

    monkeypatch.setattr(LocalVersions, "add", failing)
    root = tmp_path / "out"
    with start(model, root, rebase=0.5) as publisher:
        loaded = persia.load_model(root)
        fails.set()
        train(model, 8)
        published(publisher)  # and no second version
        assert told
        assert versions_of(root).names() == ["v-000001"]
        assert loaded.catch_up() > 0
        fails.clear()
        train(model, 8)
        published(publisher)
        assert versions_of(root).names() == ["v-000001", "v-000002"]
        assert loaded.catch_up() > 0
        same(loaded, model, tmp_path / "export")
    store.close()


def test_a_new_chain_waits_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training continues, and no erased id is forgotten."""
    store = models.store()
    model = model_of(store)
    train(model)
    root = tmp_path / "out"
    with start(model, root) as publisher:
        chain = publisher.place.chain
        with monkeypatch.context() as away:

            def fails(*_: Any, **__: Any) -> None:
                raise errors.StorageError("the storage is away")

            away.setattr(writer, "add_erased", fails)
            away.setattr(publishers, "export_moment", fails)
            ids = IDS[persia.load_model(root).has_rows("a", IDS)][:3]
            store.erase("a", ids)
            store.clear("b")  # a packet could not say that
            told: list[str] = []
            away.setattr(publishers, "warn", told.append)
            for _ in range(2):
                assert publisher.publish()
                with pytest.raises(errors.StorageError):
                    publisher.flush()
                train(model)
            assert len(told) == 1
        assert publisher.publish()
        publisher.flush()
        assert publisher.place.chain != chain
        old = persia.load_model(root, "v-000001")
        assert not bool(old.has_rows("a", ids).any())
        same(persia.load_model(root), model, tmp_path / "export")
        train(model)
        published(publisher)
        loaded = persia.load_model(root)
        assert loaded.catch_up() == 1
        same(loaded, model, tmp_path / "export")
    store.close()


def writing_waits(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> threading.Event:
    """Versions below a root are written while the event is set."""
    goes_on, writes = threading.Event(), exporting._write
    goes_on.set()

    def late(*args: Any) -> Any:
        if args[1].at("") == root:
            assert goes_on.wait(60)
        return writes(*args)

    monkeypatch.setattr(exporting, "_write", late)
    return goes_on


def test_the_training_continues_while_a_version_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the version is of the moment when it began."""
    store = models.store()
    model = model_of(store)
    train(model, 4)
    root = tmp_path / "out"
    goes_on = writing_waits(monkeypatch, root)
    with start(model, root, rebase=0.5) as publisher:
        goes_on.clear()
        train(model, 8)
        publisher.flush()
        assert publisher.publish()  # and a second version
        moment = tmp_path / "moment"
        persia.export(model, moment, example=models.batch(3))
        first = persia.load_model(root)
        assert first.version == "v-000001"
        for _ in range(3):
            train(model)
            while not publisher.publish():
                pass
        goes_on.set()
        publisher.flush()
        second, want = persia.load_model(root), persia.load_model(moment)
        assert second.version == "v-000002"
        for table in models.KEYS:
            assert torch.equal(
                second.vectors(table, IDS), want.vectors(table, IDS)
            )
        call = models.batch(9)
        assert torch.equal(second(*call), want(*call))
        for one in (first, second):
            one.catch_up()
            same(one, model, tmp_path / "export")
    store.close()


def test_rows_are_replaced_while_a_version_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = models.store()
    model = model_of(store)
    train(model, 4)
    store.save(tmp_path / "saved", model=model)
    root = tmp_path / "out"
    goes_on = writing_waits(monkeypatch, root)
    with start(model, root, rebase=0.5) as publisher:
        goes_on.clear()
        train(model, 8)
        publisher.flush()
        assert publisher.publish()  # and a second version
        place = publisher.place
        store.load(tmp_path / "saved", model=model)
        for _ in range(3):
            assert not publisher.publish()
        goes_on.set()
        assert wait_until(publisher.publish)
        publisher.flush()
        assert publisher.place.chain != place.chain
        loaded = persia.load_model(root)
        same(loaded, model, tmp_path / "export")
        train(model)
        published(publisher)
        assert loaded.catch_up() == 1
        same(loaded, model, tmp_path / "export")
    store.close()


def test_a_version_that_begins_too_late_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training continues meanwhile: its rows are of another moment."""
    store = models.store()
    model = model_of(store)
    train(model, 4)
    told: list[str] = []
    monkeypatch.setattr(publishers, "warn", told.append)
    monkeypatch.setattr(publishers, "_MOMENT_S", 0.1)
    goes_on, saves = threading.Event(), saving.save_into

    def late(*args: Any) -> Any:
        assert goes_on.wait(60)
        return saves(*args)

    root = tmp_path / "out"
    with start(model, root, rebase=0.5) as publisher:
        loaded = persia.load_model(root)
        with monkeypatch.context() as slow:
            slow.setattr(saving, "save_into", late)
            train(model, 8)
            publisher.flush()
            assert publisher.publish()  # and no second version
            train(model)
            goes_on.set()
            publisher.flush()
        assert versions_of(root).names() == ["v-000001"]
        assert len(told) == 1
        train(model, 8)
        published(publisher)
        assert versions_of(root).names() == ["v-000001", "v-000002"]
        for one in (loaded, persia.load_model(root)):
            one.catch_up()
            same(one, model, tmp_path / "export")
    store.close()


@pytest.mark.parametrize("at", range(4))
def test_a_server_that_gives_no_answer_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """What the others have said is in the next packet."""
    store = models.store()
    model = model_of(store)
    train(model)
    with start(model, tmp_path / "out") as publisher:
        loaded = persia.load_model(tmp_path / "out")
        train(model)
        store.erase("a", IDS[:40])
        asks, calls = changes.Reader._ask, [0]

        def ask(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == at + 1:
                raise errors.Unavailable("no answer")
            return asks(*args)

        with monkeypatch.context() as away:
            away.setattr(changes.Reader, "_ask", ask)
            publisher.flush()
            with pytest.raises(errors.Unavailable):
                publisher.publish()
            published(publisher)
        assert loaded.catch_up() == 1
        same(loaded, model, tmp_path / "export")
    store.close()


def test_old_packets_are_removed(tmp_path: Path) -> None:
    store = models.store()
    model = model_of(store)
    train(model)
    root = tmp_path / "out"
    with start(model, root, rebase=0.9) as publisher:
        loaded = persia.load_model(root)
        for _ in range(10):
            train(model)
            published(publisher)
            loaded.catch_up()
        same(loaded, model, tmp_path / "export")
        place = publisher.place
        left = sorted((root / "deltas" / place.chain).iterdir())
        assert len(versions_of(root).names()) == 2
        assert 0 < len(left) < 10
        late = persia.load_model(root, versions_of(root).names()[0])
        late.catch_up()
        same(late, model, tmp_path / "export")
    with start(model, root) as publisher:  # the next run
        assert [p.name for p in (root / "deltas").iterdir()] in (
            [],
            [publisher.place.chain],
        )
    store.close()


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


def test_a_version_by_name_answers_as_it_was_exported(tmp_path: Path) -> None:
    """In a process that has followed it, and in one that has not."""
    store = models.store()
    model = model_of(store)
    train(model, 4)
    root = tmp_path / "out"
    with start(model, root, rebase=0.5, keep=3) as publisher:
        followed = Model("m", str(root), 3)
        followed.load()
        train_others(store)
        published(publisher)
        assert followed.catch_up() == 1
        train(model, 8)
        published(publisher)  # and a second version
        followed.catch_up()
        first, second = versions_of(root).names()
        assert followed.follow() == second
        late = Model("late", str(root), 3)
        late.load()
        want = answer(persia.load_model(root, first))
        for one in (followed, late):
            assert torch.equal(answer(one.version(first)), want)
            assert one.version(second) is one.current
    store.close()


def test_a_model_without_room_waits_for_a_version(tmp_path: Path) -> None:
    root, _, _ = chain(tmp_path, 2)
    model = Model("m", str(root), 2, rows_limit=1)
    model.load()  # it answers without the packets
    before = answer(model.current)
    with pytest.raises(errors.LimitReached):
        model.catch_up()
    assert answer(model.current).shape == before.shape


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
def test_rows_of_servers_are_published(tmp_path: Path) -> None:
    with contextlib.closing(Servers(2, checkpoints=str(tmp_path))) as servers:
        store = persia.Store(
            persia.optim.Adagrad(lr=0.1), servers=servers.text
        )
        model = model_of(store)
        train(model, 3)
        with start(model, tmp_path / "out") as publisher:
            loaded = persia.load_model(tmp_path / "out")
            for _ in range(3):
                train(model)
                store.erase("a", [1, 2])
                published(publisher)
                assert loaded.catch_up() == 1
                same(loaded, model, tmp_path / "export")
        store.close()


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


def test_answers_are_whole_while_packets_are_applied(tmp_path: Path) -> None:
    """No vector is torn, and no row is newer than the dense part of its
    call: both are f(version) in all elements."""
    store = models.store()
    model = Versioned(store)
    ids = torch.arange(64)

    def set_version(v: int) -> None:
        store.set_rows("t", ids, torch.full((64, 8), float(v)))
        with torch.no_grad():
            model.version.fill_(float(v))

    set_version(0)
    example = (persia.JaggedBatch(["t"], ids[:4]),)
    with Publisher(
        model, tmp_path / "out", example=example, every=1e-3
    ) as publisher:
        loaded = persia.load_model(tmp_path / "out")
        ends, wrong = threading.Event(), []

        def ask() -> None:
            last = -1.0
            while not ends.is_set():
                out = loaded(persia.JaggedBatch(["t"], ids))
                rows, version = out[:, :8], float(out[0, 8])
                torn = bool((rows != rows[:, :1]).any())
                newest, oldest = float(rows.max()), float(rows.min())
                if torn or newest > version or version < last:
                    wrong.append((torn, newest, oldest, version, last))
                last = version

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for v in range(1, 40):
            set_version(v)
            published(publisher)
            loaded.catch_up()
        ends.set()
        for thread in threads:
            thread.join()
        assert not wrong
    store.close()


class Versioned(nn.Module):
    """Its rows, and one number of its dense part."""

    def __init__(self, where: persia.Store) -> None:
        super().__init__()
        self.rows = persia.EmbeddingBagCollection(
            store=where, tables=[persia.EmbeddingBagConfig("t", 8, ["t"])]
        )
        self.version = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Any) -> Tensor:
        rows = self.rows(ids).values()
        more = self.version.expand(rows.shape[0], 1)
        return torch.cat([rows, more], 1)
