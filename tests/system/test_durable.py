"""``persia serve ps --durable``: servers that are killed lose no acknowledged
update; what a crash or a disk does to the log is reported by name."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import _core, errors
from persia.checkpoint.shards import Staged
from persia.distributed.durable import described, verified
from tests.system.processes import environment, wait_until
from tests.system.test_serve import Serving, serving

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

IDS = 64
LEVELS = ("process", "disk")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def listens(port: str) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", int(port)))


class Durable:
    """A server with a log that is killed and started again."""

    def __init__(self, folder: Path, level: str, *more: str) -> None:
        self.flags = ("--port", free_port(), "--threads", "1")
        self.flags += ("--durable", level, "--log", str(folder / "log"), *more)
        self.server = self._start()

    def _start(self) -> Serving:
        server = Serving(*self.flags)
        assert server.address, server.process.communicate(timeout=60)
        return server

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.communicate(timeout=60)

    def again(self) -> None:
        self.kill()
        self.server = self._start()


@contextmanager
def durable(folder: Path, level: str, *more: str) -> Iterator[Durable]:
    made = Durable(folder, level, *more)
    try:
        yield made
    finally:
        made.kill()


class Counting:
    """A client whose rows count how often their ids were in a batch."""

    def __init__(self, address: str, **more: Any) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=address, **{"timeout": 60} | more
        )
        self.rows = persia.nn.Embedding(
            IDS, 4, store=self.store, name="count", init=0.0
        )
        self.want = torch.zeros(IDS)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        ids = torch.randperm(IDS, generator=self.generator)[:20]
        (-self.rows(ids).sum()).backward()
        self.want[ids] += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
        self.store.flush()

    def check(self) -> None:
        self.store.flush()
        with torch.no_grad():
            got = self.rows(torch.arange(IDS))
        assert torch.equal(got, self.want[:, None].expand(-1, 4))


def killed(folder: Path, level: str, times: int, *more: str) -> None:
    """A trainer steps, and its server is killed meanwhile."""
    with durable(folder, level, *more) as where:
        client = Counting(where.server.address)
        over, moved = threading.Event(), threading.Event()

        def kill() -> None:
            for _ in range(times):
                where.again()
                moved.clear()  # else it may never be there for long enough
                moved.wait(60)
            over.set()

        thread = threading.Thread(target=kill)
        thread.start()
        steps = 0
        while not over.is_set() or steps < 100:
            client.step()
            moved.set()
            steps += 1
        thread.join()
        client.check()
        client.store.close()


@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_server_loses_nothing(tmp_path: Path, level: str) -> None:
    killed(tmp_path, level, 2, "--log-limit", "64KiB")


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
def test_many_kills_lose_nothing(tmp_path: Path, level: str) -> None:
    killed(tmp_path, level, 50, "--log-limit", "256KiB")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "persia", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def saved(folder: Path) -> Iterator[tuple[Durable, Counting]]:
    """A server with a log, and a client that has saved five steps."""
    more = ("--checkpoints", str(folder))
    with durable(folder, "process", *more) as where:
        client = Counting(where.server.address)
        client.steps(5)
        client.store.save(folder / "out")
        yield where, client
        client.store.close()


def test_a_restore_is_in_the_log(tmp_path: Path) -> None:
    """A trainer loads a checkpoint; the server is killed before and after it
    has written its own rows."""
    with saved(tmp_path) as (where, client):
        want = client.want.clone()
        client.steps(5)
        client.store.load(tmp_path / "out")
        client.want = want.clone()
        where.again()
        client.step()
        client.check()
        where.again()
        client.check()


def test_a_restored_checkpoint_may_be_removed(tmp_path: Path) -> None:
    """The server writes its own rows after a restore, also where it was killed
    before it could."""
    with saved(tmp_path) as (where, client):
        client.store.load(tmp_path / "out")
        os.kill(where.server.process.pid, signal.SIGKILL)
        where.again()
        wait_until((tmp_path / "log" / "default-0-of-1" / "rows").exists)
        shutil.rmtree(tmp_path / "out")
        where.again()
        client.check()


def test_a_server_is_killed_before_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the rows, and is started again before it is to take them:
    nothing has changed."""
    with saved(tmp_path) as (where, client):
        want = client.want.clone()
        client.steps(5)
        with monkeypatch.context() as patch:
            commit = Staged.commit

            def killed_before(staged: Staged) -> None:
                where.again()
                commit(staged)

            patch.setattr(Staged, "commit", killed_before)
            with pytest.raises(errors.Unavailable):
                client.store.load(tmp_path / "out")
        client.check()
        client.store.load(tmp_path / "out")
        client.want = want
        client.check()


def test_a_removed_checkpoint_is_named(tmp_path: Path) -> None:
    """The server was killed before it had written what it restored."""
    with saved(tmp_path) as (where, client):
        client.store.load(tmp_path / "out")
        where.kill()
        rows = tmp_path / "log" / "default-0-of-1" / "rows"
        shutil.rmtree(rows, ignore_errors=True)  # had it been so quick
        shutil.rmtree(tmp_path / "out")
        refused = run("serve", "ps", *where.flags)
        assert refused.returncode == 1
        assert "error[StorageError]" in refused.stderr
        assert "out" in refused.stderr
        where.flags += ("--log-from", "cut")
        where.server = where._start()
        other = Counting(where.server.address, job="other")
        other.step()
        other.check()
        other.store.close()


def test_a_stream_is_opened_before_a_cut(tmp_path: Path) -> None:
    """Its first update comes after it: the log behind the cut has that
    alone."""
    with durable(tmp_path, "process", "--log-limit", "64KiB") as where:
        client = Counting(where.server.address)
        late = Counting(where.server.address, job="late")
        client.step()
        client.store.flush()
        folder = tmp_path / "log" / "default-0-of-1"
        before = described(folder)["cut"]
        while described(folder)["cut"] == before:
            client.step()
        client.store.flush()
        late.steps(1)
        where.again()
        late.steps(1)
        late.store.close()
        client.want += late.want
        client.check()
        client.store.close()


def test_a_server_begins_beyond_twice_the_limit(tmp_path: Path) -> None:
    """It is killed before it could write its rows."""
    with durable(tmp_path, "process") as where:
        client = Counting(where.server.address)
        client.steps(300)
        where.flags += ("--log-limit", "64KiB")
        where.again()
        client.step()
        client.check()
        client.store.close()


EVICTIONS: dict[str, Any] = {
    "lru": "lru",
    "lfu": "lfu",
    "norm": "norm",
    "ttl": persia.eviction.TTL(updates=8),
}


def test_what_evicting_tables_recover(tmp_path: Path) -> None:
    """Other rows may stay than did before, as the recovered rows lie in other
    places. Ids of every update are never evicted: their rows lack nothing. A
    row of another id has its updates since it was made."""
    capacity, hot, ids = 160, 40, 2000
    with durable(tmp_path, "process", "--log-limit", "128KiB") as where:
        store = persia.Store(
            persia.optim.SGD(lr=1.0), servers=where.server.address
        )
        tables = {
            name: persia.nn.Embedding(
                ids,
                4,
                store=store,
                name=name,
                init=0.0,
                capacity=None if name == "ttl" else capacity,
                eviction=eviction,
            )
            for name, eviction in EVICTIONS.items()
        }
        want, generator = torch.zeros(ids), torch.Generator().manual_seed(5)

        def step() -> None:
            some = torch.randint(hot, ids, (20,), generator=generator)
            batch = torch.cat([torch.arange(hot), some.unique()])
            every = [rows(batch).sum() for rows in tables.values()]
            (-torch.stack(every).sum()).backward()
            want[batch] += 1

        for _ in range(2):
            log = tmp_path / "log" / "default-0-of-1"
            step()
            store.flush()
            before = described(log)["cut"]
            while described(log)["cut"] == before:
                step()
            for _ in range(20):
                step()
            store.flush()
            where.again()
            for name in tables:
                values, _, there = store.rows_and_state(name, range(ids))
                got = values[:, 0]
                if name != "ttl":
                    assert int(there.sum()) <= capacity
                assert torch.equal(got[:hot], want[:hot])
                assert (got[there] >= 1).all()
                assert (got[there] <= want[there]).all()
        store.close()


def test_an_erased_id_stays_erased(tmp_path: Path) -> None:
    """Neither a replay nor a checkpoint of after the erasure brings it back;
    one of before does."""
    more = ("--checkpoints", str(tmp_path))
    with durable(tmp_path, "process", *more) as where:
        client = Counting(where.server.address)
        while client.want[3:6].min() < 1:
            client.step()
        client.store.save(tmp_path / "before")
        assert client.store.erase("count", [3, 4]) == 2
        client.store.save(tmp_path / "after")
        for loaded, back in (("", False), ("after", False), ("before", True)):
            if loaded:
                client.store.load(tmp_path / loaded)
            where.again()
            there = client.store.rows_and_state("count", [3, 4, 5])[2]
            assert there.tolist() == [back, back, True]
        client.store.close()


def test_two_servers_do_not_share_a_log(tmp_path: Path) -> None:
    with durable(tmp_path, "process") as where:
        flags = list(where.flags)
        flags[1] = "0"
        second = run("serve", "ps", *flags)
        assert second.returncode == 1
        assert "error[Unavailable]" in second.stderr


def test_another_shard_s_log_is_refused(tmp_path: Path) -> None:
    with durable(tmp_path, "process") as where:
        Counting(where.server.address).store.close()
        where.kill()
        log = tmp_path / "log"
        (log / "default-0-of-1").rename(log / "default-1-of-2")
        other = run(
            *("serve", "ps", "--port", "0", "--shard", "1/2"),
            *("--durable", "process", "--log", str(log)),
        )
        assert other.returncode == 1
        assert "error[SchemaMismatch]" in other.stderr


def test_a_log_of_fewer_servers_is_refused(tmp_path: Path) -> None:
    """They would begin without the rows that it has."""
    with durable(tmp_path, "process") as where:
        Counting(where.server.address).store.close()
        more = run("serve", "ps", *where.flags, "--shard", "0/2")
        assert more.returncode == 1
        assert "error[SchemaMismatch]" in more.stderr
        other = tmp_path / "log" / "default-0-of-2"
        assert not other.exists()


def test_launched_servers_continue_their_logs(tmp_path: Path) -> None:
    job = """
import persia, torch
with persia.Store(persia.optim.SGD(lr=1.0)) as store:
    rows = persia.nn.Embedding(8, 4, store=store, name="count", init=0.0)
    (-rows(torch.arange(8)).sum()).backward()
    store.flush()
    with torch.no_grad():
        print("count", rows(torch.arange(8)).unique().tolist())
"""
    flags = ("--ps", "2", "--durable", "process", "--log", str(tmp_path))
    for life in (1, 2):
        one = run("launch", *flags, "--", sys.executable, "-c", job)
        assert one.returncode == 0, one.stderr
        assert f"count [{life}.0]" in one.stdout


def test_damage_is_named_and_may_be_left_behind(tmp_path: Path) -> None:
    with durable(tmp_path, "process", "--log-limit", "64KiB") as where:
        client = Counting(where.server.address)
        rows = tmp_path / "log" / "default-0-of-1" / "rows"
        while not rows.exists():
            client.step()
        client.steps(1)
        wait_until(lambda: not list(rows.parent.glob(".tmp-*")))
        where.kill()
        sound = run("log", "verify", str(tmp_path / "log"), "--json")
        assert sound.returncode == 0, sound.stderr
        assert json.loads(sound.stdout)["logs"][0]["cut"] > 0
        # The record behind the cut, which later ones follow.
        segment = max(rows.parent.glob("log-*"))
        with segment.open("r+b") as file:
            file.seek(600)
            byte = file.read(1)
            file.seek(600)
            file.write(bytes([byte[0] ^ 1]))
        text = run("log", "verify", str(tmp_path / "log"))
        assert text.returncode == 1
        refused = run("serve", "ps", *where.flags)
        assert refused.returncode == 1
        for stderr in (text.stderr, refused.stderr):
            assert "error[CorruptFile]" in stderr
            assert f"{segment.name}, offset" in stderr
        where.flags += ("--log-from", "cut")
        where.server = where._start()
        with pytest.raises(errors.UpdatesLost):
            client.steps(20)
        client.store.close()
        # The log is sound from now on, and kept by the same command.
        client = Counting(where.server.address)
        with torch.no_grad():
            client.want = client.rows(torch.arange(IDS))[:, 0].clone()
        client.steps(5)
        where.again()
        client.check()
        client.store.close()


def test_a_missing_last_file_is_named(tmp_path: Path) -> None:
    with durable(tmp_path, "process", "--log-limit", "256KiB") as where:
        client = Counting(where.server.address)
        log = tmp_path / "log" / "default-0-of-1"
        while len(list(log.glob("log-*"))) < 3:
            client.step()
        client.store.flush()
        where.kill()
        client.store.close()
        last = max(log.glob("log-*"))
        aside = last.rename(tmp_path / last.name)
        text = run("log", "verify", str(tmp_path / "log"))
        assert text.returncode == 1
        refused = run("serve", "ps", *where.flags)
        assert refused.returncode == 1
        for stderr in (text.stderr, refused.stderr):
            assert "error[CorruptFile]" in stderr
            assert last.name in stderr
        aside.rename(last)
        where.server = where._start()


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """Files of the server may not grow any more, then they may."""
    with durable(tmp_path, "process") as where:
        client = Counting(where.server.address)
        client.step()
        client.check()
        hurried = Counting(where.server.address, timeout=0.5, job="other")
        pid = where.server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, before[1]))
        with pytest.raises(errors.Unavailable, match=os.strerror(errno.EFBIG)):
            hurried.steps(1)
        with torch.no_grad():  # lookups work
            hurried.rows(torch.arange(IDS))
        hurried.store.close()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        client.steps(5)
        client.check()
        where.again()
        client.check()
        client.store.close()


def test_options_are_checked(tmp_path: Path) -> None:
    for flags in (
        ("--durable", "process"),
        ("--log", str(tmp_path)),
        ("--durable", "ever", "--log", str(tmp_path)),
    ):
        assert run("serve", "ps", *flags).returncode == 2


def test_sigterm_while_it_recovers(tmp_path: Path) -> None:
    """It waits for the file of its rows, and ends; the log is as it was."""
    with durable(tmp_path, "process", "--log-limit", "64KiB") as where:
        client = Counting(where.server.address)
        saved = tmp_path / "log" / "default-0-of-1" / "rows" / "shard.json"
        while not saved.exists():
            client.step()
        client.check()
        where.server.stop()
        content = saved.read_bytes()
        saved.unlink()
        os.mkfifo(saved)
        process = subprocess.Popen(
            [sys.executable, "-m", "persia", "serve", "ps", *where.flags],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: listens(where.flags[1]))
        process.send_signal(signal.SIGTERM)
        assert "serving" not in process.communicate(timeout=60)[0]
        assert process.returncode == 0
        saved.unlink()
        saved.write_bytes(content)
        where.server = where._start()
        client.check()
        client.store.close()


def test_rows_begin_with_a_checkpoint_once(tmp_path: Path) -> None:
    """--restore is for a server without a log; afterwards the log is newer."""
    more = ("--checkpoints", str(tmp_path), "--restore", "out", "--or-empty")
    with serving("--checkpoints", str(tmp_path)) as first:
        client = Counting(first.address)
        client.step()
        client.store.save(tmp_path / "out")
        want = client.want.clone()
        client.store.close()
    with durable(tmp_path, "process", *more) as where:
        assert any("restored out" in line for line in where.server.said)
        client = Counting(where.server.address)
        client.want = want
        client.step()
        client.check()
        where.again()
        assert not any("restored out" in line for line in where.server.said)
        client.check()
        client.store.close()


def test_tables_alone_are_no_rows(tmp_path: Path) -> None:
    """A restore that was interrupted leaves them in the log."""
    more = ("--checkpoints", str(tmp_path))
    with serving(*more) as first:
        client = Counting(first.address)
        client.steps(3)
        client.store.save(tmp_path / "out")
        want = client.want.clone()
        client.store.close()
    with durable(tmp_path, "process", *more) as where:
        Counting(where.server.address).store.close()
        where.flags += ("--restore", "out")
        where.again()
        assert any("restored out" in line for line in where.server.said)
        client = Counting(where.server.address)
        client.want = want
        client.check()
        client.store.close()


def test_a_log_is_looked_at_while_a_record_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look finds half of it, and what was written since behind it."""
    with durable(tmp_path, "process") as where:
        client = Counting(where.server.address)
        client.step()
        client.store.flush()
        log = tmp_path / "log" / "default-0-of-1"
        real, calls = _core.log_read, []

        def read(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                client.step()
                client.store.flush()
                raise errors.CorruptFile("a record is not what was written")
            return real(*arguments)

        monkeypatch.setattr(_core, "log_read", read)
        assert described(log)["records"]
        monkeypatch.setattr(_core, "log_read", lambda *_: read_damage())
        with pytest.raises(errors.CorruptFile):
            described(log)
        client.store.close()


def read_damage() -> None:
    raise errors.CorruptFile("a record is not what was written")


def test_a_log_is_looked_at_while_it_changes(tmp_path: Path) -> None:
    """Files that a cut removes meanwhile are not taken for damage."""
    with durable(tmp_path, "process", "--log-limit", "64KiB") as where:
        client = Counting(where.server.address)
        client.step()
        client.store.flush()
        log = tmp_path / "log" / "default-0-of-1"
        over = threading.Event()
        failed: list[Exception] = []

        def look() -> None:
            while not over.is_set():
                try:
                    described(log)
                    verified(log)
                except Exception as error:
                    failed.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        cuts = set()
        while len(cuts) < 4:
            client.step()
            cuts.add(described(log)["cut"])
        over.set()
        thread.join()
        assert not failed
        client.check()
        client.store.close()
