"""Checkpoints of shards behind messages: servers in this process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import persia
from persia import _core, errors
from persia.checkpoint import files
from persia.checkpoint import manifest as manifests
from persia.checkpoint import shards as checkpoint_shards
from persia.checkpoint.shards import ShardRows
from tests import remote
from tests.checkpoints import Trained, assert_same_rows, fill, make_store

TABLES = (("a", 3, "fp32"), ("b", 2, "bf16"))
WIDE, LIMIT = (("t", 16, "fp32"),), 48 << 20
NEVER = threading.Event()


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
        like = {t["name"]: t for t in _core.ckpt_tables(store._engine.handle)}
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
        tables, parts = rows.write(temporary, lambda: None, NEVER)
        document = json.loads((like / "manifest.json").read_text())
        document |= manifests.to_manifest(tables, parts) | more
        return local.publish(temporary, document, None)


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
    deadline=None,
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
    poll = checkpoint_shards._poll
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
        monkeypatch.setattr(checkpoint_shards, "_poll", polled)
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
        for word in (str(top / "two" / ".tmp-"), f"--checkpoints {top}"):
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
        with pytest.raises(errors.StorageError, match="proof differs"):
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
            ShardRows(peers, "test", 4.0).write(temporary, lambda: None, stop)
        for peer in peers:
            assert peer.calls.count(_core.SNAPSHOT_END) == 3


# ---- stores ----------------------------------------------------------------


class Job(Trained):
    """Trained in steps that see each other's rows, wherever those are."""

    def __init__(self, servers: remote.Servers | None, **more: Any) -> None:
        where = servers.addresses if servers else "embedded"
        super().__init__("adam", "bf16", servers=where, **more)

    def train(self, first: int, last: int) -> list[float]:
        """Steps first to last as one pass at staleness 0."""
        batches = [
            persia.Batch(None, self.batch(step)) for step in range(first, last)
        ]
        losses = [
            self.step(batch.ids)
            for batch in persia.DataLoader(batches, self.model, 0)
        ]
        self.store.flush()
        return losses


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], remote.Servers]]:
    """Makes servers, each behind a port; tmp_path/checkpoints is theirs."""
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:

        def make(n: int) -> remote.Servers:
            folder = str(tmp_path / "checkpoints")
            servers = remote.Servers(n, checkpoints=folder)
            stack.callback(servers.close)
            return servers

        yield make


Cluster = Callable[[int], remote.Servers]


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 2), (3, 1), (2, 0), (0, 3)])
def test_a_job_goes_on_with_the_same_bits(
    tmp_path: Path,
    cluster: Cluster,
    n: int,
    m: int,
) -> None:
    """On m servers after n; 0: embedded."""
    root = tmp_path / "checkpoints" / "out"
    whole = Job(cluster(n) if n else None)
    whole.train(0, 3)
    folder = whole.store.save(root, **whole.state(), extra={"epoch": 3})
    assert folder == root / "step-3"
    assert not (root / "step-3" / ".proof").exists()
    losses = whole.train(3, 6)

    resumed = Job(cluster(m) if m else None)
    resumed.train(50, 52)  # something else, of which nothing may remain
    found = resumed.store.load(root, **resumed.state())
    assert found.extra == {"epoch": 3}
    assert resumed.store.updates == found.step == 3
    assert resumed.train(3, 6) == losses
    assert resumed.store.updates == 6
    # And once more from the same checkpoint.
    resumed.store.load(root, **resumed.state())
    assert resumed.train(3, 6) == losses
    ids = torch.arange(200)
    for table in ("u", "i"):
        for a, b in zip(
            whole.store.rows_and_state(table, ids),
            resumed.store.rows_and_state(table, ids),
        ):
            assert torch.equal(a, b)


def test_continue_keeps_live_rows_and_counts_what_is_repeated(
    tmp_path: Path, cluster: Cluster
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.train(0, 3)
    first.store.save(root, **first.state())
    first.train(3, 6)
    ids = torch.arange(200)
    live = first.store.rows("u", ids)
    first.store.close()

    second = Job(servers)  # a new incarnation of the rank
    second.store.load(root, **second.state(), resume="continue")
    assert torch.equal(second.store.rows("u", ids), live)
    assert second.store.updates == 6
    second.train(3, 6)  # again
    assert torch.equal(second.store.rows("u", ids), live)
    assert second.store.updates == 6
    # One answer of each of two servers for each of three updates.
    assert second.store.stats()["client"]["duplicates"] == 6
    second.train(6, 7)
    assert second.store.updates == 7
    assert second.store.stats()["client"]["duplicates"] == 6


def test_continue_from_the_beginning(tmp_path: Path, cluster: Cluster) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.store.save(root, **first.state())
    first.train(0, 2)
    first.store.load(root, **first.state(), resume="continue")
    first.train(0, 3)
    assert first.store.updates == 3


@pytest.mark.parametrize("told", [False, True])
def test_continue_where_a_server_has_lost_rows(
    tmp_path: Path, cluster: Cluster, told: bool
) -> None:
    """One came without rows in its place; told: before the job went on."""
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.train(0, 3)
    first.store.save(root, **first.state())
    servers.kill(1)
    servers.restart(1)
    if told:
        with pytest.raises(errors.UpdatesLost, match="lost 3 updates"):
            first.train(3, 4)
    first.store.close()

    raises = Job(servers)
    before = raises.model["top"][1].weight.detach().clone()
    with pytest.raises(errors.UpdatesLost) as caught:
        raises.store.load(root, **raises.state(), resume="continue")
    # Told by a look-up, or by an update that the new one then has.
    lost = rf"at least {'[23]' if told else 3} at {servers.addresses[1]} "
    assert re.search(lost, str(caught.value))
    for words in ("rank 0", "'rollback'", "lost='continue'"):
        assert words in str(caught.value)
    assert torch.equal(raises.model["top"][1].weight, before)
    assert raises.store.load(root, **raises.state()).rows["u"] > 0
    raises.train(3, 5)
    raises.store.close()


def test_continue_without_what_a_server_has_lost(
    tmp_path: Path, cluster: Cluster
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    first = Job(servers)
    first.train(0, 3)
    first.store.save(root, **first.state())
    first.train(3, 5)
    first.store.close()
    servers.kill(1)
    servers.restart(1)
    second = Job(servers, lost="continue")
    found = second.store.load(root, **second.state(), resume="continue")
    assert found.rows == {"u": 0, "i": 0}  # none was loaded
    second.train(3, 5)
    counts = second.store.stats()["client"]
    assert (counts["lost"], counts["duplicates"]) == (3, 2)
    # One that has the rows of the checkpoint again has lost nothing.
    second.store.save(root, **second.state())
    second.store.load(root, **second.state())
    second.train(5, 6)
    second.store.load(root, **second.state(), resume="continue")
    second.store.close()


def test_continue_needs_rows_that_outlive_the_process(
    tmp_path: Path, cluster: Cluster
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(1)
    one = Job(servers)
    one.train(0, 1)
    one.store.save(root, **one.state())
    embedded = Job(None)
    with pytest.raises(errors.InvalidArgument, match="resume='continue'"):
        embedded.store.load(root, resume="continue")
    with pytest.raises(errors.InvalidArgument, match="resume is 'go'"):
        embedded.store.load(root, resume="go")
    # The checkpoint of another job says nothing of these updates.
    found = files.find(files.LocalRoot(root), None)
    document = json.loads(
        (found.folder / "manifest.json").read_text()  # type: ignore[operator]
    )
    document["shards"][0]["ledgers"][0]["stream"] ^= 1
    (root / "step-1" / "manifest.json").write_bytes(
        manifests.encode_manifest(document)
    )
    with pytest.raises(errors.SchemaMismatch, match="another namespace"):
        one.store.load(root, resume="continue")


def test_servers_start_again_between_two_calls(
    tmp_path: Path, cluster: Cluster
) -> None:
    """Who saves or asks for counts waits for them, and says Hello."""
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    job = Job(servers, timeout=20.0, lost="continue")
    job.train(0, 2)
    calls: list[Callable[[], object]] = [
        lambda: job.store.save(root, **job.state()),
        job.store.stats,
        lambda: job.store.updates,
        lambda: job.store.add_table(persia.EmbeddingBagConfig("later", 4)),
    ]
    for call in calls:
        servers.kill(0)
        again = threading.Timer(0.3, servers.restart, [0])
        again.start()
        call()
        again.join()
    assert job.store.stats()["client"]["lost"] == 2


@pytest.mark.slow
def test_a_server_dies(tmp_path: Path, cluster: Cluster) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    job = Job(servers, timeout=4.0)
    job.train(0, 2)
    good = job.store.save(root, **job.state())
    weight = job.model["top"][1].weight.detach().clone()
    job.train(2, 3)
    trained = job.model["top"][1].weight.detach().clone()
    servers.kill(1)
    gone = servers.addresses[1]
    with pytest.raises(errors.Unavailable, match=gone):
        job.store.save(root, **job.state())
    assert files.find(files.LocalRoot(root), None).folder == good
    assert sorted(os.listdir(root)) == [".lock", "LATEST", "step-2"]
    with pytest.raises(errors.Unavailable, match=gone):
        job.store.load(root, **job.state())
    assert torch.equal(job.model["top"][1].weight, trained)
    # A new one in its place, without rows, gets them from the checkpoint.
    servers.restart(1)
    job.store.load(root, **job.state())
    assert torch.equal(job.model["top"][1].weight, weight)
    losses = job.train(2, 4)
    fresh = Job(None)
    fresh.store.load(root, **fresh.state())
    assert fresh.train(2, 4) == losses
    ids = torch.arange(100)
    assert torch.equal(fresh.store.rows("u", ids), job.store.rows("u", ids))


def test_a_server_is_started_again_in_the_middle_of_a_save(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints" / "out"
    servers = cluster(2)
    job = Job(servers, lost="continue")
    job.train(0, 2)
    poll = checkpoint_shards._poll

    def killed(*arguments: Any) -> Any:
        monkeypatch.undo()
        servers.kill(1)
        servers.restart(1)
        return poll(*arguments)

    monkeypatch.setattr(checkpoint_shards, "_poll", killed)
    words = f"started again .*save again .*{servers.addresses[1]}"
    with pytest.raises(errors.Unavailable, match=words):
        job.store.save(root, **job.state())
    assert job.store.save(root, **job.state()) == root / "step-2"


def test_a_save_where_servers_do_not_write(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(cluster(1))
    with pytest.raises(errors.StorageError) as caught:
        job.store.save(tmp_path / "elsewhere" / "out")
    for word in (
        str(tmp_path / "elsewhere" / "out"),
        f"--checkpoints {tmp_path / 'elsewhere'}",
    ):
        assert word in str(caught.value)
    monkeypatch.delenv("PERSIA_CHECKPOINTS", raising=False)
    with pytest.raises(errors.InvalidArgument, match="PERSIA_CHECKPOINTS"):
        job.store.save(
            "s3://bucket/out?scheme=http&endpoint_override=127.0.0.1:1"
        )


def test_lookups_ahead_of_a_load_are_done_anew(
    tmp_path: Path, cluster: Cluster
) -> None:
    where = cluster(2)
    store = persia.Store(persia.optim.SGD(lr=1.0), servers=where.addresses)
    bags = persia.EmbeddingBagCollection(
        store=store, tables=[persia.EmbeddingBagConfig("t", 2, init=0.0)]
    )
    ids = torch.arange(10)
    batches = [persia.Batch(None, persia.JaggedBatch(["t"], ids))] * 12
    for staleness in (0, 4):
        store.clear()
        for i, batch in enumerate(persia.DataLoader(batches, bags, staleness)):
            if i == 6:
                store.load(tmp_path / "checkpoints" / "out")
            values = bags(batch.ids).values()
            if i == 6:
                assert values.eq(3.0).all()
            values.sum().neg().backward()
            if i == 2:
                store.flush()
                store.save(tmp_path / "checkpoints" / "out")
        store.flush()
        assert store.rows("t", ids).eq(9.0).all()
