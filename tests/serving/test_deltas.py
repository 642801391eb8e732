"""Deltas: a model that applies the packets is the model that trains, whatever
happens to its rows, to the storage, and to the versions."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persia
from persia import _core, errors
from persia.checkpoint import saving
from persia.serving import ExportedModel, Publisher, exporting
from persia.serving.deltas import changes, writer
from persia.serving.deltas import publisher as publishers
from persia.serving.folder import LocalVersions, versions_of
from persia.serving.repository import Model
from tests.remote import Servers
from tests.serving import models
from tests.serving.publishing import (
    IDS,
    Versioned,
    answer,
    model_of,
    published,
    same,
    start,
    train,
    train_others,
    trained,
)
from tests.system.processes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is tried again at once, however slow the machine is."""
    monkeypatch.setattr(publishers, "_SLOW_S", 1e9)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a publisher warns of."""
    found: list[str] = []
    monkeypatch.setattr(publishers, "warn", found.append)
    return found


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


def test_a_rollback_takes_packets_back(tmp_path: Path) -> None:
    store, model = trained(4)
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


def test_a_version_that_is_being_added_is_no_rollback(tmp_path: Path) -> None:
    """Its folder is there, and CURRENT names the one before it: that one would
    answer without packets, older than what answers now."""
    store, model = trained(4)
    root = tmp_path / "out"
    versions = versions_of(root)
    with start(model, root, rebase=0.5, keep=9) as publisher:
        server = Model("m", str(root), 3)
        server.load()
        for _ in range(2):
            train(model, 8)
            published(publisher)  # and another version
        server.catch_up()
        first, second, third = versions.names()
        assert server.current.version == first
        versions.use(second)  # as it is between two steps of the publisher
        assert server.follow() is None
        versions.use(third)
        assert server.follow() == third
        same(server.current, model, tmp_path / "export")
        late = Model("late", str(root), 3)
        versions.use(first)
        late.load()
        versions.use(second)  # by hand: it stays so
        assert late.follow() is None
        assert late.follow() == second and not late.follows
    store.close()


def test_erased_ids_leave_every_version(tmp_path: Path) -> None:
    store, model = trained(4)
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


def test_a_storage_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, model = trained()
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


def publish_second(publisher: Publisher, model: nn.Module, root: Path) -> None:
    """Packets, and a second version."""
    train(model, 8)
    published(publisher)
    assert versions_of(root).names() == ["v-000001", "v-000002"]


def test_a_version_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    store, model = trained(4)
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
        publish_second(publisher, model, root)
        assert loaded.catch_up() > 0
        same(loaded, model, tmp_path / "export")
    store.close()


def test_a_new_chain_waits_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training continues, and no erased id is forgotten."""
    store, model = trained()
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
    store, model = trained(4)
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


def test_erased_ids_leave_a_version_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are of a moment before, and it appears afterwards."""
    store, model = trained(4)
    ids, root = store.ids("a"), tmp_path / "out"
    goes_on = writing_waits(monkeypatch, root)
    with start(model, root, rebase=0.5, keep=1) as publisher:
        goes_on.clear()
        train(model, 8)
        publisher.flush()
        assert publisher.publish()  # and a second version
        for some in ids[:3], ids[3:5]:
            store.erase("a", some)
            while not publisher.publish():
                pass
        goes_on.set()
        publisher.flush()
        second = persia.load_model(root, "v-000002")
        assert not bool(second.has_rows("a", ids[:5]).any())
        assert bool(second.has_rows("a", ids[5:]).all())
        second.catch_up()
        same(second, model, tmp_path / "export")
    store.close()


def test_rows_are_replaced_while_a_version_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, model = trained(4)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """The training continues meanwhile: its rows are of another moment."""
    store, model = trained(4)
    goes_on, saves = threading.Event(), saving.save_into

    def late(*args: Any) -> Any:
        assert goes_on.wait(60)
        return saves(*args)

    root = tmp_path / "out"
    with start(model, root, rebase=0.5) as publisher:
        loaded = persia.load_model(root)
        with monkeypatch.context() as slow:
            slow.setattr(publishers, "_MOMENT_S", 0.1)
            slow.setattr(saving, "save_into", late)
            train(model, 8)
            publisher.flush()
            assert publisher.publish()  # and no second version
            train(model)
            goes_on.set()
            publisher.flush()
        assert versions_of(root).names() == ["v-000001"]
        assert len(told) == 1
        publish_second(publisher, model, root)
        for one in (loaded, persia.load_model(root)):
            one.catch_up()
            same(one, model, tmp_path / "export")
    store.close()


@pytest.mark.parametrize("at", range(4))
def test_a_server_that_gives_no_answer_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """What the others have said is in the next packet."""
    store, model = trained()
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
    store, model = trained()
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


def test_a_version_by_name_answers_as_it_was_exported(tmp_path: Path) -> None:
    """In a process that has followed it, and in one that has not."""
    store, model = trained(4)
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


def test_answers_are_whole_while_packets_are_applied(tmp_path: Path) -> None:
    """No vector is torn, and no row is newer than the dense part of its
    call: both are f(version) in all elements."""
    store = models.store()
    model = Versioned(store)
    model.set(0)
    with Publisher(
        model, tmp_path / "out", example=model.example, every=1e-3
    ) as publisher:
        loaded = persia.load_model(tmp_path / "out")
        ends, wrong = threading.Event(), []

        def ask() -> None:
            last = -1.0
            while not ends.is_set():
                out = loaded(*model.example)
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
            model.set(v)
            published(publisher)
            loaded.catch_up()
        ends.set()
        for thread in threads:
            thread.join()
        assert not wrong
    store.close()
