"""Shards that move while a checkpoint is written, and those that no server has
any more."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from persia import _core, errors
from persia.checkpoint.shards import rows_of
from persia.distributed import moves
from persia.distributed.moves import Moves
from persia.distributed.scaling import Scaling
from tests.test_moves import (
    SHARDS,
    Server,
    addresses,
    begin,
    end_of,
    meanwhile,
    scale,
    serving,
    sizes,
)
from tests.test_shards import Counter

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


def test_a_checkpoint_ends_before_the_shard_leaves(tmp_path: Path) -> None:
    """One that has begun, or begins while rows are copied."""
    with serving(tmp_path) as servers, contextlib.ExitStack() as stack:
        counter = Counter(addresses(servers[:2]))
        stack.callback(counter.store.close)
        counter.add(1)
        root = tmp_path / "job"
        (root / ".tmp-1").mkdir(parents=True)
        rows = rows_of(counter.store._engine.connection)
        stop = threading.Event()
        with rows._snapshot(root / ".tmp-1", "a" * 32, stop) as ask:
            asked = stack.enter_context(
                contextlib.closing(begin(servers, servers[2].address))
            )
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                answer = ask(_core.SNAPSHOT_STATUS, 0)
                time.sleep(0.02)
            assert answer["done"]
            assert 0 in servers[0].shards.here()
        assert end_of(asked)["state"] == _core.MOVED_DONE
        assert sizes(servers) == [1, 2, 1]
        counter.store.save(root, step=2)
        counter.check(1)


@pytest.mark.slow
def test_saves_while_shards_move(tmp_path: Path) -> None:
    """None of them fails."""
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(1)
        more = torch.arange(1_000, 100_000)
        counter.store.set_rows("t", more, torch.ones(len(more), 2))
        steps = itertools.count(1)
        with meanwhile(
            lambda: counter.store.save(tmp_path / "job", step=next(steps))
        ):
            for to in (3, 2, 3, 2):
                scale(servers, to)
        counter.check(1)
        counter.store.close()


def revive(servers: Sequence[Server], to: int) -> list[int]:
    with Scaling(addresses(servers)) as scaling:
        found = list(scaling.revive(to))
        scaling.places()
    return found


def values(counter: Counter) -> torch.Tensor:
    rows = counter.store.rows("t", counter.IDS.tolist())
    return torch.as_tensor(rows)[:, 0]


@pytest.mark.parametrize("durable", ["off", "process"])
@pytest.mark.parametrize("restore", [None, "job"])
def test_a_shard_that_was_lost_begins_again(
    durable: str, restore: str | None, tmp_path: Path
) -> None:
    """A client that trained reports what is missing, and continues. The disk
    of a log is lost with it."""
    ports = [0, 0, 0]

    def start(number: int) -> Server:
        options: dict[str, Any] = {
            "shard": str(number),
            "shards": SHARDS,
            "server_count": 2,
            "checkpoints": tmp_path,
            "restore": restore,
            "or_empty": restore is not None,
            "port": ports[number],
        }
        if number == 2:
            options["join"] = servers[0].address
        if durable != "off":
            options |= {"durable": durable, "log": str(logs(number))}
        made = Server(**options)
        ports[number] = int(made.address.rpartition(":")[2])
        return made

    def logs(number: int) -> Path:
        return tmp_path / f"log-{number}"

    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        stack.callback(lambda: [server.close() for server in servers])
        for number in range(3):
            servers.append(start(number))
        counter = Counter(addresses(servers), lost="continue")
        stack.callback(counter.store.close)
        scale(servers, 3)
        counter.add(1)
        counter.store.save(tmp_path / "job", step=1)
        counter.add(1)
        (shard,) = servers[2].shards.here()
        servers[2].close()
        if durable != "off":
            shutil.rmtree(logs(2))
        servers[2] = start(2)
        with pytest.raises(errors.SchemaMismatch):
            scale(servers, 3)
        assert revive(servers, 3) == [shard]
        assert revive(servers, 3) == []
        before = values(counter)
        assert sorted(set(before.tolist())) == [float(restore == "job"), 2.0]
        counter.add(1)
        assert (values(counter) - before).tolist() == [1.0] * 100
        assert counter.store.stats()["client"]["lost"] > 0
        if durable != "off":
            servers[2].close()
            servers[2] = start(2)
            counter.add(1)
            assert (values(counter) - before).tolist() == [2.0] * 100
        before = values(counter)
        scale(servers, 2)
        counter.add(1)
        assert (values(counter) - before).tolist() == [1.0] * 100


def test_one_that_cannot_begin(tmp_path: Path) -> None:
    """The checkpoint is not there; asked again, it begins."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for number in range(2):
            options = {"join": servers[0].address} if servers else {}
            servers.append(
                Server(
                    shard="0-2/4" if not number else "1",
                    server_count=None if not number else 1,
                    checkpoints=tmp_path,
                    restore="job" if number else None,
                    **options,
                )
            )
            stack.callback(servers[-1].close)
        with pytest.raises(errors.Unavailable):
            revive(servers, 2)
        assert sizes(servers) == [3, 0]
        with Scaling(addresses(servers[:1])) as scaling:
            assert scaling.revive(1) == {3: servers[0].address}
        assert sizes(servers) == [4, 0]


def some_lost(tmp_path: Path, stack: contextlib.ExitStack) -> list[Server]:
    """Two servers; no one has shard 3."""
    servers: list[Server] = []
    for place in ("0-2/4", None):
        options = {"join": servers[0].address} if servers else {"shard": place}
        servers.append(Server(checkpoints=tmp_path, **options))
        stack.callback(servers[-1].close)
    return servers


@pytest.mark.parametrize("to", [1, 2])
def test_two_that_let_it_begin_at_once(
    to: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one gets the name of the first, whichever server it would
    choose, and one server has the shard."""
    go, told = threading.Event(), threading.Event()
    begins = Moves._revive_one

    def later(self: Moves, one: Any) -> None:
        go.wait(60)
        begins(self, one)

    monkeypatch.setattr(Moves, "_revive_one", later)
    with contextlib.ExitStack() as stack:
        servers = some_lost(tmp_path, stack)
        first, second = (
            stack.enter_context(Scaling(addresses(servers))) for _ in range(2)
        )
        first._by, second._timeout = "operator 7", 1.0
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(go.set)
        found = pool.submit(first.revive, 2, lambda text: told.set())
        assert told.wait(60)
        with pytest.raises(errors.Unavailable, match="operator 7"):
            second.revive(to)
        go.set()
        assert found.result(60) == {3: servers[1].address}
        assert second.revive(to) == {}
        assert sizes(servers) == [3, 1]


def test_one_that_was_killed_before_the_shard_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers forget it, and another one lets the shard begin."""
    monkeypatch.setattr(moves, "_FORGET", 0.5)
    with contextlib.ExitStack() as stack:
        servers = some_lost(tmp_path, stack)
        with Scaling(addresses(servers)) as killed:
            killed.look()  # which knows the number of shards from then on
            killed._ask(
                servers[0].address, _core.MOVE_REVIVE, 3, 7, servers[1].address
            )
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(errors.Unavailable):
                assert revive(servers, 2) == [3]
                break
            assert time.monotonic() < until
        assert sizes(servers) == [3, 1]


def test_a_server_that_ended_before_its_clients_heard_where_to(
    tmp_path: Path,
) -> None:
    """Shards have left it since they asked it last."""
    with serving(tmp_path) as servers:
        scale(servers, 3)
        left, moved = servers[2], servers[2].shards.here()
        assert moved
        counter = Counter(addresses(servers))
        counter.add(1)
        scale([*servers[:2], left], 2)
        assert sizes(servers) == [2, 2, 0]
        left.shards.stop(1.0)
        counter.add(2)
        counter.check(3)
        counter.store.close()
