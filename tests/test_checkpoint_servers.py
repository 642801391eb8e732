"""Checkpoints of shards behind messages: servers in this process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import persia
from persia import _core, errors
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.checkpoint import shards as checkpoint_shards
from persia.checkpoint.shards import ShardRows
from persia.store.engine import engine_of
from tests.checkpoints import assert_same_rows, fill, make_store

TABLES = (("a", 3, "fp32"), ("b", 2, "bf16"))
WIDE, LIMIT = (("t", 16, "fp32"),), 48 << 20
NEVER = threading.Event()
ID = "0123456789abcdef" * 2


class Servers:
    """N shards, and what a store's client would have of them."""

    def __init__(
        self, shards: int, checkpoints: Path | None, memory_limit: int = 0
    ) -> None:
        self.servers = [
            _core.Server(
                namespace="test",
                shard=shard,
                shards=shards,
                threads=2,
                memory_limit=memory_limit,
                lineage=0,
                message_limit=1 << 24,
                checkpoints=checkpoints and str(checkpoints),
            )
            for shard in range(shards)
        ]
        self.channels = [server.channel(60.0) for server in self.servers]
        self.rows = ShardRows(self.channels, "test", 4.0)

    def declare(self, store: persia.Store, names: str = "ab") -> None:
        """The tables of an embedded store, in the order of their names, and
        in another one at every other shard."""
        like = {
            t["name"]: t for t in _core.ckpt_tables(engine_of(store).handle)
        }
        for shard, channel in enumerate(self.channels):
            for name in names if shard % 2 else reversed(names):
                table = manifests.Table(
                    **like[name], rows=0, pushes=[0], files=[]
                )
                channel.declare(**table.native())

    def close(self) -> None:
        for one in (*self.channels, *self.servers):
            one.close()


@contextlib.contextmanager
def serving(
    shards: int, checkpoints: Path | None, memory_limit: int = 0
) -> Iterator[Servers]:
    servers = Servers(shards, checkpoints, memory_limit)
    try:
        yield servers
    finally:
        servers.close()


def save(rows: ShardRows, root: Path, like: Path, **more: Any) -> Path:
    """A checkpoint of rows, with the dense part of another one."""
    local = files.LocalRoot(root)
    with local.writing() as temporary:
        shutil.copy(like / "dense.pt", temporary)
        tables, parts = rows.write(temporary, ID, lambda: None, NEVER)
        document = json.loads((like / "manifest.json").read_text())
        document |= manifests.to_manifest(tables, parts) | more
        return files.publish(local, temporary, document, None)


def load(
    rows: ShardRows, folder: Path, names: str = "ab", commit: bool = True
) -> None:
    found = files.find(files.LocalRoot(folder), None)
    chosen = {
        number: table
        for number, table in enumerate(found.manifest.tables)
        if table.name in names
    }
    staged = rows.stage(folder, found.manifest, chosen, NEVER)
    if commit:
        staged.commit()
    else:
        staged.abort()


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(n=st.integers(1, 5), m=st.integers(1, 5), rows=st.integers(0, 500))
def test_any_number_of_shards(
    tmp_path: Path, n: int, m: int, rows: int
) -> None:
    top = tmp_path / "checkpoints"
    shutil.rmtree(top, ignore_errors=True)
    whole = make_store("adagrad", *TABLES)
    for table, _, _ in TABLES:
        fill(whole, table, rows, seed=rows)
    folder = Path(whole.save(top / "one", step=7))
    for k, shards in enumerate((n, m)):
        with serving(shards, top) as servers:
            servers.declare(whole)
            load(servers.rows, folder)
            assert [c.stats()["updates"] for c in servers.channels] == [
                whole.updates
            ] * shards
            folder = save(servers.rows, top / f"k{k}", folder, step=k)
        manifest = files.shard_part(folder, 0, 1).manifest
        assert len(manifest.shards) == shards
        assert {table.name: table.rows for table in manifest.tables} == {
            "a": rows,
            "b": rows,
        }
        assert not (folder / ".proof").exists()
    embedded = make_store("adagrad", *TABLES)
    embedded.load(top / "k1")
    for table, _, _ in TABLES:
        assert_same_rows(whole, embedded, table)


@pytest.fixture
def one(tmp_path: Path) -> tuple[persia.Store, Path]:
    """A store with rows, and its checkpoint in checkpoints/one."""
    store = make_store("adagrad", *TABLES)
    for table, _, _ in TABLES:
        fill(store, table, 300)
    return store, Path(store.save(tmp_path / "checkpoints" / "one"))


def rows_of(servers: Servers) -> int:
    stats = [channel.stats() for channel in servers.channels]
    return sum(t["rows"] for one in stats for t in one["tables"])


def test_tables_that_are_left_alone(
    one: tuple[persia.Store, Path], tmp_path: Path
) -> None:
    store, folder = one
    top = folder.parent.parent
    with serving(2, top) as servers:
        servers.declare(store)
        load(servers.rows, folder)
        changed = make_store("adagrad", *TABLES)
        fill(changed, "a", 50, seed=5)
        fill(changed, "b", 50, seed=5)
        other = Path(changed.save(top / "other"))
        load(servers.rows, other, names="b")
        saved = save(servers.rows, top / "both", folder)
    both = make_store("adagrad", *TABLES)
    both.load(saved)
    assert_same_rows(both, store, "a")
    assert_same_rows(both, changed, "b")


def test_a_restore_that_is_given_up_changes_nothing(
    one: tuple[persia.Store, Path],
) -> None:
    store, folder = one
    with serving(3, folder.parent.parent) as servers:
        servers.declare(store)
        before = servers.rows.lineage()
        load(servers.rows, folder, commit=False)
        assert rows_of(servers) == 0
        assert servers.rows.lineage() == before
        load(servers.rows, folder)
        assert rows_of(servers) == 600
        assert servers.rows.lineage() != before


def test_a_load_that_is_cut_short_within_a_save(
    one: tuple[persia.Store, Path],
) -> None:
    """Of a process that is gone: its last message arrives late."""
    store, folder = one
    top = folder.parent.parent
    with serving(2, top) as servers:
        servers.declare(store)
        load(servers.rows, folder)
        found = files.find(files.LocalRoot(folder), None)
        tables = dict(enumerate(found.manifest.tables))
        staged = servers.rows.stage(folder, found.manifest, tables, NEVER)
        while not staged._commit(1):
            pass
        with pytest.raises(errors.RestoreIncomplete):
            save(servers.rows, top / "mixed", folder)
        assert not (top / "mixed" / "LATEST").exists()
        load(servers.rows, folder)
        save(servers.rows, top / "whole", folder)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint of a table whose rows take 0.7 of 48 MiB."""
    store = make_store("adagrad", *WIDE)
    fill(store, "t", 236_000)
    assert 0.69 < store.stats()["memory"] / LIMIT < 0.75
    return Path(store.save(tmp_path / "checkpoints" / "large"))


def test_shards_more_than_half_full(large: Path) -> None:
    """They have no room for rows beside those that are there."""
    with serving(2, large.parent.parent, LIMIT // 2) as servers:
        servers.declare(make_store("adagrad", *WIDE), "t")
        load(servers.rows, large, names="t")
        lineage = servers.rows.lineage()
        load(servers.rows, large, names="t")
        assert servers.rows.lineage() != lineage
        assert rows_of(servers) == 236_000
        again = save(servers.rows, large.parent.parent / "again", large)
    both = [make_store("adagrad", *WIDE) for _ in range(2)]
    for store, folder in zip(both, (large, again)):
        store.load(folder)
    assert_same_rows(*both, "t")


def test_a_shard_fails_while_it_has_neither_rows(large: Path) -> None:
    with serving(1, large.parent.parent, LIMIT) as servers:
        servers.declare(make_store("adagrad", *WIDE), "t")
        (channel,) = servers.channels
        load(servers.rows, large, names="t")
        torn = Path(shutil.copytree(large.parent, large.parent.parent / "x"))
        found = files.find(files.LocalRoot(torn), None)
        staged = servers.rows.stage(
            torn / found.name,
            found.manifest,
            dict(enumerate(found.manifest.tables)),
            NEVER,
        )
        lineage = servers.rows.lineage()
        for file in torn.glob("*/*.safetensors"):
            file.unlink()
        with pytest.raises(errors.StorageError):
            staged.commit()
        staged.abort()
        assert rows_of(servers) == 0
        assert servers.rows.lineage() == lineage
        with pytest.raises(errors.RestoreIncomplete):
            save(servers.rows, large.parent.parent / "none", large)
        load(servers.rows, large, names="t")
        assert rows_of(servers) == 236_000
        assert channel.stats()["parked"] == 0


def test_wrong_requests_do_not_end_the_work_of_others(
    one: tuple[persia.Store, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the end of a snapshot, or of reading rows, and the moment at
    which its owner asks for it."""
    store, folder = one
    poll = checkpoint_shards.poll
    refused = 0
    with serving(1, folder.parent.parent) as servers:
        (channel,) = servers.channels

        # A thread of the server's opens the folders.
        def snapshot(place: tuple[str, str, str]) -> None:
            channel.snapshot(_core.SNAPSHOT_BEGIN, *place)
            while True:
                channel.snapshot(_core.SNAPSHOT_STATUS, *place)

        def restore(place: tuple[str, str, str]) -> None:
            rows = (7, 7, 0, 0, 0, [], [], [])
            while True:
                channel.restore(_core.RESTORE_PREPARE, *place, *rows)

        def polled(*arguments: Any) -> Any:
            nonlocal refused
            poll(*arguments)  # the answers are lost
            for place in (("", "", ""), ("two", ".tmp-x", "y")):
                with pytest.raises(errors.PersiaError):
                    snapshot(place)
                with pytest.raises(errors.PersiaError):
                    restore(place)
                refused += 1
            return poll(*arguments)

        servers.declare(store)
        monkeypatch.setattr(checkpoint_shards, "poll", polled)
        load(servers.rows, folder)
        assert rows_of(servers) == 600
        save(servers.rows, folder.parent.parent / "two", folder)
    assert refused == 6


@pytest.mark.parametrize("where", ["elsewhere", None])
def test_servers_that_see_another_folder(
    one: tuple[persia.Store, Path], tmp_path: Path, where: str | None
) -> None:
    store, folder = one
    top = folder.parent.parent
    elsewhere = None
    if where is not None:
        elsewhere = tmp_path / where
        (elsewhere / "one" / folder.name).mkdir(parents=True)
        (elsewhere / "two").mkdir()
    with serving(2, elsewhere) as servers:
        servers.declare(store)
        with pytest.raises(errors.StorageError) as caught:
            save(servers.rows, top / "two", folder)
        for word in (str(top / "two" / ".tmp-"), f"`checkpoints={top}`"):
            assert word in str(caught.value)
        assert os.listdir(top / "two") == [".lock"]
        kind = errors.StorageError
        with pytest.raises(kind, match="one"):
            load(servers.rows, folder)
        assert rows_of(servers) == 0


def test_a_folder_of_the_same_name_with_another_proof(
    one: tuple[persia.Store, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, folder = one
    elsewhere = tmp_path / "elsewhere"
    with serving(2, elsewhere_made(elsewhere)) as servers:
        servers.declare(store)
        write = files.write_file

        def twin(path: Path, fill: Callable[[Any], object]) -> None:
            write(path, fill)
            if path.name == ".proof":
                there = elsewhere / "two" / path.parent.name
                there.mkdir(parents=True)
                (there / ".proof").write_text("another")

        monkeypatch.setattr(files, "write_file", twin)
        with pytest.raises(errors.StorageError, match="proof"):
            save(servers.rows, folder.parent.parent / "two", folder)
    assert not list(elsewhere.rglob("*.safetensors"))


def elsewhere_made(path: Path) -> Path:
    path.mkdir()
    return path


class Failing:
    """A channel whose server fails at one verb."""

    def __init__(self, channel: _core.Channel, call: str, verb: int) -> None:
        self._channel = channel
        self._fails = call, verb
        self.calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def snapshot(self, verb: int, *rest: Any) -> dict[str, Any]:
        self.calls.append(verb)
        if self._fails == ("snapshot", verb):
            raise errors.StorageError("the disk is full")
        return self._channel.snapshot(verb, *rest)

    def restore(self, verb: int, *rest: Any) -> dict[str, int]:
        self.calls.append(verb)
        if self._fails == ("restore", verb):
            raise errors.OutOfMemory("no memory")
        return self._channel.restore(verb, *rest)


@pytest.mark.parametrize("verb", [_core.SNAPSHOT_BEGIN, _core.SNAPSHOT_STATUS])
def test_a_shard_fails_in_the_middle_of_a_save(
    one: tuple[persia.Store, Path], verb: int
) -> None:
    store, folder = one
    top = folder.parent.parent
    with serving(3, top) as servers:
        servers.declare(store)
        load(servers.rows, folder)
        good = save(servers.rows, top / "out", folder, step=1)
        peers = [
            Failing(c, "snapshot" if shard == 1 else "", verb)
            for shard, c in enumerate(servers.channels)
        ]
        with pytest.raises(errors.StorageError, match="disk is full"):
            save(ShardRows(peers, "test", 4.0), top / "out", folder, step=2)
        assert all(_core.SNAPSHOT_END in peer.calls for peer in peers)
        assert sorted(os.listdir(top / "out")) == [".lock", "LATEST", "step-1"]
        assert files.find(files.LocalRoot(top / "out"), None).folder == good
        # Nobody is in the way of the next one.
        save(servers.rows, top / "out", folder, step=3)


def test_a_shard_fails_in_the_middle_of_a_load(
    one: tuple[persia.Store, Path],
) -> None:
    store, folder = one
    with serving(3, folder.parent.parent) as servers:
        servers.declare(store)
        prepares, commits = (
            [
                Failing(c, "restore" if shard == 1 else "", verb)
                for shard, c in enumerate(servers.channels)
            ]
            for verb in (_core.RESTORE_PREPARE, _core.RESTORE_COMMIT)
        )
        with pytest.raises(errors.OutOfMemory):
            load(ShardRows(prepares, "test", 4.0), folder)
        assert all(_core.RESTORE_ABORT in peer.calls for peer in prepares)
        assert rows_of(servers) == 0
        with pytest.raises(errors.Unavailable, match="load it again"):
            load(ShardRows(commits, "test", 4.0), folder)
        assert 0 < rows_of(servers) < 600
        load(servers.rows, folder)
        assert rows_of(servers) == 600


def test_the_connection_fails_now_and_then(
    one: tuple[persia.Store, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = one
    top = folder.parent.parent
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    class Flaky(Failing):
        """The first answer to each request is lost."""

        lost: set[Any]

        def snapshot(self, verb: int, *rest: Any) -> dict[str, Any]:
            answer = super().snapshot(verb, *rest)
            return self._lose(("snapshot", verb, *rest), answer)

        def restore(self, verb: int, *rest: Any) -> dict[str, int]:
            answer = super().restore(verb, *rest)
            return self._lose(("restore", verb, rest[:3]), answer)

        def _lose(self, request: Any, answer: Any) -> Any:
            if request in self.lost:
                return answer
            self.lost.add(request)
            raise errors.Unavailable("the connection was lost")

    with serving(3, top) as servers:
        servers.declare(store)
        peers = [Flaky(channel, "", 0) for channel in servers.channels]
        for peer in peers:
            peer.lost = set()
        load(ShardRows(peers, "test", 4.0), folder)
        assert rows_of(servers) == 600
        saved = save(ShardRows(peers, "test", 4.0), top / "out", folder)
    loaded = make_store("adagrad", *TABLES)
    loaded.load(saved)
    for table, _, _ in TABLES:
        assert_same_rows(store, loaded, table)


def test_altered_files_are_named_and_change_nothing(
    one: tuple[persia.Store, Path],
) -> None:
    store, folder = one
    with serving(2, folder.parent.parent) as servers:
        servers.declare(store)
        path = folder / "shard-0-of-1-table-1-00000.safetensors"
        good = path.read_bytes()
        for bad in (good[:-1], good[:-3] + b"x" + good[-2:]):
            path.write_bytes(bad)
            with pytest.raises(errors.CorruptFile, match=path.name):
                load(servers.rows, folder)
            assert rows_of(servers) == 0
        path.write_bytes(good)
        load(servers.rows, folder)
        assert rows_of(servers) == 600


def test_a_table_that_a_server_lacks(one: tuple[persia.Store, Path]) -> None:
    store, folder = one
    with serving(2, folder.parent.parent) as servers:
        servers.declare(store, "a")
        with pytest.raises(errors.SchemaMismatch, match="no table 'b'"):
            load(servers.rows, folder)


def test_shards_that_differ(one: tuple[persia.Store, Path]) -> None:
    store, folder = one
    other = make_store("adagrad", ("a", 3, "fp32"), ("b", 9, "bf16"))
    with serving(2, folder.parent.parent) as servers:
        for server, like in zip(servers.channels, (store, other)):
            servers.channels = [server]
            servers.declare(like)
        with pytest.raises(errors.SchemaMismatch, match=r"'b': dim is 9"):
            save(servers.rows, folder.parent.parent / "two", folder)


def test_work_that_is_given_up(one: tuple[persia.Store, Path]) -> None:
    store, folder = one
    stop = threading.Event()
    stop.set()

    class Slow(Failing):
        """Writes for some time after it was told to end."""

        def snapshot(self, verb: int, *rest: Any) -> dict[str, Any]:
            answer = super().snapshot(verb, *rest)
            return answer | {"done": self.calls.count(_core.SNAPSHOT_END) > 2}

    with serving(2, folder.parent.parent) as servers:
        servers.declare(store)
        peers = [Slow(channel, "", 0) for channel in servers.channels]
        temporary = folder.parent / "temporary"
        temporary.mkdir()
        with pytest.raises(errors.Interrupted):
            ShardRows(peers, "test", 4.0).write(
                temporary, ID, lambda: None, stop
            )
        for peer in peers:
            assert peer.calls.count(_core.SNAPSHOT_END) == 3
