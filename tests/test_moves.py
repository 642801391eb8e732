"""Shards that go to another server while training continues."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch

import persia
from persia import _core, errors
from persia.cli.scale import ps
from persia.distributed import moves
from persia.distributed.scaling import (
    Move,
    Progress,
    Scaling,
    may_begin,
    plan,
)
from persia.distributed.server import ServeConfig
from persia.distributed.shards import Shards
from persia.distributed.status import ask
from tests.checkpoints import assert_same_rows, fill, make_store
from tests.test_checkpoint_shards import TABLES
from tests.test_shards import Counter

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

SHARDS = 4


class Server:
    """A server of this process."""

    def __init__(self, **options: Any) -> None:
        self.shards = Shards(
            ServeConfig(**{"port": 0, "threads": 1, **options})
        )
        self.address = self.shards.prepare()
        self.shards.ready()

    def close(self) -> None:
        self.shards.stop(1.0)
        self.shards.close()


@contextlib.contextmanager
def serving(tmp_path: Path, **more: Any) -> Iterator[list[Server]]:
    """Two servers with two shards each, and one that joins them."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for place in ("0-1/4", "2-3/4", None):
            where = (
                {"shard": place}
                if place is not None
                else {"join": servers[0].address}
            )
            if "durable" in more:
                joined = "log" if place is not None else "joined"
                where["log"] = str(tmp_path / joined)
            servers.append(
                Server(**{"checkpoints": tmp_path, **where, **more})
            )
            stack.callback(servers[-1].close)
        yield servers


def addresses(servers: Sequence[Server]) -> list[str]:
    return [server.address for server in servers]


def scale(servers: Sequence[Server], to: int) -> None:
    with Scaling(addresses(servers)) as scaling:
        scaling.run(plan(scaling.places(), to))


def sizes(servers: Sequence[Server]) -> list[int]:
    return [len(server.shards.here()) for server in servers]


@contextlib.contextmanager
def meanwhile(body: Callable[[], None]) -> Iterator[None]:
    """Runs ``body`` again and again on another thread; its error is raised
    here."""
    over = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not over.is_set():
                body()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("to", [1, 2, 3, 5])
def test_a_plan_moves_as_few_as_it_can(to: int) -> None:
    places = {"a": [0, 1, 2, 5], "b": [3], "c": [4, 6], "d": [], "e": [7]}
    found = plan(places, to)
    after = {address: set(some) for address, some in places.items()}
    for move in found:
        after[move.source].remove(move.shard)
        after[move.target].add(move.shard)
    counts = [len(some) for some in after.values()]
    assert sum(counts) == 8 and not any(counts[to:])
    assert max(counts[:to]) - min(counts[:to]) <= 1
    assert len({move.shard for move in found}) == len(found)
    least = sum(len(some) for some in list(places.values())[to:])
    assert len(found) >= least
    again = plan({a: sorted(s) for a, s in after.items()}, to)
    assert not again


def test_servers_give_shards_in_turn() -> None:
    """One that is full does not wait for all the others."""
    four = {a: list(range(4 * i, 4 * i + 4)) for i, a in enumerate("abc")}
    first = plan(four | {"d": []}, 4)
    assert [move.source for move in first] == ["a", "b", "c"]
    found = plan(four | {"d": [], "e": [], "f": []}, 6)
    pairs = [(move.source, move.target) for move in found]
    assert pairs == 2 * [("a", "d"), ("b", "e"), ("c", "f")]
    assert may_begin(found, [], None) == found[:3]


@pytest.mark.parametrize("durable", ["off", "process", "disk"])
def test_training_continues(durable: str, tmp_path: Path) -> None:
    options = {} if durable == "off" else {"durable": durable}
    with serving(tmp_path, **options) as servers:
        counter = Counter(addresses(servers[:2]))
        times = 0

        def train() -> None:
            nonlocal times
            counter.add(1)
            times += 1

        train()
        with meanwhile(train):
            for to, expected in ((3, 1), (2, 0), (1, 0), (3, 1)):
                scale(servers, to)
                assert sizes(servers)[2] == expected
                assert sum(sizes(servers)) == SHARDS
        counter.check(times)
        train()
        counter.check(times)
        counter.store.close()
        # One that opens now finds them by any server.
        for some in (servers[:2], servers[::-1], servers[2:], servers[:1]):
            later = Counter(addresses(some))
            later.check(times)
            later.add(1)
            times += 1
            later.store.close()


@pytest.mark.parametrize("at_once", [None, 1])
def test_servers_move_shards_side_by_side(
    at_once: int | None, tmp_path: Path
) -> None:
    """Each server is in one move at a time, and others begin meanwhile."""
    with serving(tmp_path) as servers, contextlib.ExitStack() as stack:
        servers.append(
            Server(join=servers[0].address, checkpoints=str(tmp_path))
        )
        stack.callback(servers[-1].close)
        counter = Counter(addresses(servers[:2]))
        counter.add(1)
        seen: list[tuple[int, bool]] = []

        def show(progress: Progress) -> None:
            seen.append((progress.number, " is at " in progress.text))

        with Scaling(addresses(servers)) as scaling:
            found = plan(scaling.places(), 4)
            assert len(found) == 2
            scaling.run(found, show, at_once)
        ended = [number for number, over in seen if over]
        assert sorted(ended) == [1, 2]
        first = [number for number, _ in seen].index(2)
        assert (first < seen.index((1, True))) == (at_once is None) or (
            seen[0] == (1, True)
        )
        assert sizes(servers) == [1, 1, 1, 1]
        counter.add(1)
        counter.check(2)
        counter.store.close()


def test_a_move_that_fails_lets_the_one_beside_it_end(tmp_path: Path) -> None:
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(1)
        with Scaling(addresses(servers)) as scaling:
            (good,) = plan(scaling.places(), 3)
            other = next(s for s in servers[:2] if s.address != good.source)
            wrong = Move(other.shards.here()[0], other.address, "127.0.0.1:1")
            with pytest.raises(errors.PersiaError):
                scaling.run([wrong, good])
        assert sizes(servers)[2] == 1
        assert sum(sizes(servers)) == SHARDS
        counter.add(1)
        counter.check(2)
        counter.store.close()


def test_an_empty_server_may_end(tmp_path: Path) -> None:
    """A client that slept meanwhile finds the shard, although the server that
    had it is not there any more."""
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(2)
        scale(servers, 3)
        counter.check(2)
        counter.add(1)
        scale(servers, 2)
        assert not servers[2].shards.here()
        servers[2].shards.stop(1.0)
        counter.check(3)
        counter.add(1)
        counter.check(4)
        counter.store.close()


def test_rows_and_their_state_arrive(tmp_path: Path) -> None:
    """Vectors, optimizer state and whatever a checkpoint has; and a
    checkpoint of the servers as they are then."""
    whole = make_store("adagrad", *TABLES)
    for seed, (table, _, _) in enumerate(TABLES):
        fill(whole, table, 2_000, seed)
    whole.save(tmp_path / "job", step=1)
    with (
        serving(tmp_path) as servers,
        make_store(
            "adagrad", *TABLES, servers=addresses(servers[:2])
        ) as store,
    ):
        store.load(tmp_path / "job")
        scale(servers, 3)
        for table, _, _ in TABLES:
            assert_same_rows(whole, store, table)
        store.save(tmp_path / "again", step=2)
        store.load(tmp_path / "again")
        scale(servers, 1)
        for table, _, _ in TABLES:
            assert_same_rows(whole, store, table)
    again = make_store("adagrad", *TABLES)
    again.load(tmp_path / "again")
    for table, _, _ in TABLES:
        assert_same_rows(whole, again, table)


def memory(server: Server) -> int:
    return sum(
        stats["memory_used"]
        for stats in server.shards.stats().values()
        if not stats["beside"]
    )


def test_memory_goes_with_the_shard(tmp_path: Path) -> None:
    ids = torch.arange(200_000)
    with serving(tmp_path, memory_limit="1GiB") as servers:
        counter = Counter(addresses(servers[:2]))
        counter.store.set_rows("t", ids, torch.ones(len(ids), 2))
        before = [memory(server) for server in servers]
        scale(servers, 3)
        after = [memory(server) for server in servers]
        gave = next(i for i in (0, 1) if sizes(servers)[i] == 1)
        assert abs(after[gave] - before[gave] / 2) < 0.15 * before[gave]
        assert abs(after[2] - before[gave] / 2) < 0.15 * before[gave]
        assert after[1 - gave] == before[1 - gave]
        counter.store.close()


@pytest.mark.parametrize("step", [1, -1])
def test_clients_may_name_a_server_without_a_shard(
    step: int, tmp_path: Path
) -> None:
    with serving(tmp_path) as servers:
        found = ask(addresses(servers), interval=0.0)
        assert [s.error for s in found] == [""] * SHARDS
        counter = Counter(addresses(servers[::step]))
        counter.add(1)
        scale(servers, 3)
        scale(servers[::-1], 1)
        counter.add(1)
        counter.check(2)
        counter.store.close()


def test_a_long_copy_is_told_every_two_seconds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(
        self: Scaling,
        found: list[Move],
        show: Callable[[Progress], None],
        at_once: int | None,
    ) -> None:
        for i in range(100):
            show(Progress(found[0], 1, 1, "copies", i, i / 10))

    monkeypatch.setattr(Scaling, "run", run)
    with serving(tmp_path) as servers:
        ps(to=3, servers=",".join(addresses(servers)))
    assert capsys.readouterr().out.count("copies") == 5


def test_what_status_says(tmp_path: Path) -> None:
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(1)
        scale(servers, 3)
        found = ask(addresses(servers), interval=0.0)
        assert [s.shard for s in found] == list(range(SHARDS))
        assert not any(s.error for s in found)
        for server in servers:
            here = [s.shard for s in found if s.address == server.address]
            assert here == server.shards.here()
        counter.store.close()


# ---- what goes wrong -------------------------------------------------------


def begin(
    servers: Sequence[Server],
    target: str,
    shard: int = 0,
    number: int = 7,
    namespace: str = "default",
) -> _core.Channel:
    """Asks the first server to move a shard; the way to it."""
    security = moves.towards(servers[0].shards.config)
    asked = moves.channel(servers[0].address, security, 10.0)
    asked.move(
        *(_core.MOVE_BEGIN, namespace, shard, SHARDS, number),
        *(target, f"operator {number}"),
    )
    return asked


def end_of(asked: _core.Channel) -> dict[str, Any]:
    """The answer when the move has ended."""
    while True:
        answer = asked.move(_core.MOVE_STATUS, "default", 0, SHARDS, 0, "", "")
        if answer["state"] != _core.MOVED_RUNNING:
            return answer
        time.sleep(0.02)


def cancel(asked: _core.Channel) -> None:
    """Gives the move of :func:`begin` up."""
    asked.move(_core.MOVE_CANCEL, "default", 0, SHARDS, 7, "", "")


def assert_serves(servers: Sequence[Server]) -> None:
    """The shards are where they were, and change."""
    assert sizes(servers) == [2, 2, 0]
    counter = Counter(addresses(servers[:2]))
    before = float(torch.as_tensor(counter.store.rows("t", [1]))[0, 0])
    counter.add(1)
    counter.check(int(before) + 1)
    counter.store.close()


@pytest.mark.parametrize("to", [0, 4, -1])
def test_so_many_servers_there_are_not(to: int, tmp_path: Path) -> None:
    with serving(tmp_path) as servers:
        with pytest.raises(errors.InvalidArgument):
            scale(servers, to)
        assert_serves(servers)


def test_servers_of_another_job(tmp_path: Path) -> None:
    other = Server(shard="0/1", checkpoints=tmp_path)
    named = Server(shard="0/4", namespace="n", checkpoints=tmp_path)
    with serving(tmp_path) as servers:
        for wrong in (other, named):
            with pytest.raises(errors.SchemaMismatch):
                scale([*servers[:2], wrong], 3)
        with pytest.raises(errors.SchemaMismatch):  # not all of them
            scale(servers[1:], 2)
        for wrong in (other, named):
            with contextlib.closing(begin(servers, wrong.address)) as asked:
                assert end_of(asked)["state"] == _core.MOVED_FAILED
            assert_serves(servers)
        with pytest.raises(errors.SchemaMismatch):
            begin(servers, servers[2].address, namespace="n")
        with pytest.raises(errors.InvalidArgument):
            begin(servers, servers[2].address, shard=3, number=9)
    other.close()
    named.close()


def test_a_server_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another operator gets the name of the first one. A cancel ends it."""
    monkeypatch.setattr(moves, "_SILENT", 0.5)
    with serving(tmp_path) as servers:
        with contextlib.closing(begin(servers, "127.0.0.1:9")) as asked:
            with pytest.raises(errors.Unavailable, match="operator 7"):
                begin(servers, servers[2].address, number=8)
            assert end_of(asked)["state"] == _core.MOVED_FAILED
        assert_serves(servers)
        monkeypatch.setattr(moves, "_SILENT", 600.0)
        with contextlib.closing(begin(servers, "127.0.0.1:9")) as asked:
            cancel(asked)
            assert end_of(asked)["state"] == _core.MOVED_FAILED
        assert_serves(servers)


def test_a_cancel_while_rows_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names no private class."""

    def copy(self: moves.Moves, one: moves._Leaving, *ignored: object) -> None:
        while True:
            self._check_cancelled(one)
            time.sleep(0.02)

    monkeypatch.setattr(moves.Moves, "_copy", copy)
    with serving(tmp_path) as servers:
        with contextlib.closing(begin(servers, servers[2].address)) as asked:
            cancel(asked)
            answer = end_of(asked)
        assert answer["state"] == _core.MOVED_FAILED
        assert "_Cancelled" not in answer["text"]
        assert_serves(servers)


def test_no_memory_at_the_other_server(tmp_path: Path) -> None:
    ids = torch.arange(400_000)
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.store.set_rows("t", ids, torch.ones(len(ids), 2))
        counter.store.close()
        small = Server(
            join=servers[0].address,
            memory_limit="1MiB",
            checkpoints=tmp_path,
        )
        with pytest.raises(errors.Unavailable, match="LimitReached"):
            scale([*servers[:2], small], 3)
        assert_serves(servers)
        small.close()


def test_no_folder_of_checkpoints(tmp_path: Path) -> None:
    """Rows go from one server to the other, and through no file."""
    with serving(tmp_path, checkpoints=None) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(3)
        scale(servers, 3)
        assert sizes(servers)[2] == 1
        counter.check(3)
        counter.store.close()


def test_a_server_that_forgot_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started again when the shard was taken out: that comes back, and
    no update is lost or done twice."""
    refused: list[int] = []

    def commit(self: moves.Moves, number: int) -> None:
        refused.append(number)
        raise errors.InvalidArgument("no such move is prepared")

    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(3)
        with monkeypatch.context() as patch:
            patch.setattr(moves.Moves, "commit", commit)
            times = 3

            def train() -> None:
                nonlocal times
                counter.add(1)
                times += 1

            with meanwhile(train), pytest.raises(errors.Unavailable):
                scale(servers, 3)
        assert refused
        counter.check(times)
        counter.store.close()
        assert_serves(servers)
        scale(servers, 3)
        assert sizes(servers)[2] == 1


def test_a_server_that_is_killed_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at its address when it is to take the shard."""
    gone: list[Server] = []

    def commit(self: moves.Moves, number: int) -> None:
        raise errors.Unavailable("it is about to die")

    def die(address: str) -> bool:
        gone[0].shards.core.stop(0.0)
        return is_gone(address)

    is_gone = moves.is_gone
    monkeypatch.setattr(moves.Moves, "commit", commit)
    monkeypatch.setattr(moves, "is_gone", die)
    with serving(tmp_path) as servers:
        gone.append(servers[2])
        counter = Counter(addresses(servers[:2]))
        counter.add(3)
        with pytest.raises(errors.Unavailable):
            scale(servers, 3)
        counter.add(1)
        counter.check(4)
        counter.store.close()
        assert_serves(servers)


def test_an_answer_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server has the shard, and says so when it is asked again."""
    commit = moves.Moves.commit
    lost: list[int] = []

    def twice(self: moves.Moves, number: int) -> None:
        commit(self, number)
        if number not in lost:
            lost.append(number)
            raise errors.Unavailable("the answer is lost")

    monkeypatch.setattr(moves.Moves, "commit", twice)
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(3)
        scale(servers, 3)
        assert lost and sizes(servers)[2] == 1
        counter.add(1)
        counter.check(4)
        counter.store.close()


def lose_answers(
    patch: pytest.MonkeyPatch, lost: threading.Event
) -> threading.Event:
    """Of COMMIT, until the event is set; when the first one was."""
    commit, first = moves.Moves.commit, threading.Event()

    def body(self: moves.Moves, number: int) -> None:
        commit(self, number)
        first.set()
        if not lost.is_set():
            raise errors.Unavailable("the answer is lost")

    patch.setattr(moves.Moves, "commit", body)
    return first


def test_a_cancel_after_the_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server may have the shard: it stays there."""
    over = threading.Event()
    first = lose_answers(monkeypatch, over)
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(3)
        with contextlib.closing(begin(servers, servers[2].address)) as asked:
            assert first.wait(20.0)
            cancel(asked)
            taken_back = threading.Event()
            monkeypatch.setattr(
                moves.Moves, "_back", lambda *ignored: taken_back.set()
            )
            assert not taken_back.wait(0.5)
            over.set()
            assert end_of(asked)["state"] == _core.MOVED_DONE
        assert sizes(servers) == [1, 2, 1]
        counter.add(1)
        counter.check(4)
        counter.store.close()


def test_a_stop_after_the_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that ends does not answer for the shard again."""
    taken_back: list[object] = []
    monkeypatch.setattr(
        moves.Moves, "_back", lambda *some: taken_back.append(some)
    )
    first = lose_answers(monkeypatch, threading.Event())
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(3)
        counter.store.close()
        begin(servers, servers[2].address).close()
        assert first.wait(20.0)
        servers[0].shards.stop(1.0)
        assert not taken_back and servers[2].shards.here() == [0]


def test_parts_that_arrive_late(tmp_path: Path) -> None:
    """Of a move that was given up: nothing begins again."""
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(1)
        counter.store.close()
        server = servers[0].shards.server(0)
        target = servers[2].shards
        server.core.copy_begin()
        words = ("default", 0, SHARDS, 5, "", "me")
        security = moves.towards(target.config)
        with contextlib.closing(
            moves.channel(servers[2].address, security, 10.0)
        ) as asked:

            def send(part: int) -> int:
                answer = asked.move(
                    *(_core.MOVE_PREPARE, *words, 9, 9, 0, part, server.core)
                )
                return int(answer["state"])

            server.core.copy_next(False)
            with pytest.raises(errors.InvalidArgument):
                send(1)
            for _ in range(2):  # the answer to the first one was lost
                assert send(0) == _core.MOVED_RUNNING
            server.core.copy_next(False)
            with pytest.raises(errors.InvalidArgument):
                send(2)
            assert send(1) == _core.MOVED_RUNNING
            with pytest.raises(errors.InvalidArgument):  # it is not whole
                asked.move(_core.MOVE_COMMIT, *words)
            for part in (0, 1, 2):
                with pytest.raises(errors.InvalidArgument):
                    send(part)
        server.core.copy_end()
        assert not target.here()
        assert_serves(servers)


def test_a_move_that_nobody_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that had the shard was killed: what was read goes."""
    monkeypatch.setattr(moves, "_FORGET", 0.3)
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(1)
        counter.store.close()
        target = servers[2].shards
        server = servers[0].shards.server(0)
        words = ("default", 0, SHARDS, 5, "", "me")
        security = moves.towards(target.config)
        with contextlib.closing(
            moves.channel(servers[2].address, security, 10.0)
        ) as asked:
            server.core.copy_begin()
            server.core.hold(2)
            part = 0
            while server.core.copy_next(True) is not None:
                answer = asked.move(
                    *(_core.MOVE_PREPARE, *words, 9, 9, 0, part, server.core)
                )
                part += 1
            assert answer["state"] == _core.MOVED_DONE
            server.core.copy_end()
            server.core.hold(0)
            time.sleep(1.0)
            with pytest.raises(errors.InvalidArgument):
                asked.move(_core.MOVE_COMMIT, *words)
        assert not target.here()
        assert_serves(servers)


def test_options_that_do_not_go_together() -> None:
    """A server that joins has no rows of its own; it may have some later."""
    some = {"join": "a:1", "checkpoints": "/tmp/x"}
    with pytest.raises(pydantic.ValidationError):
        ServeConfig.model_validate(some | {"restore": "job"})
    ServeConfig.model_validate(some | {"save_on_exit": "job"})


def test_one_that_joins_has_the_shards_of_the_job(tmp_path: Path) -> None:
    with serving(tmp_path) as servers:
        where = {"join": servers[0].address, "checkpoints": tmp_path}
        Server(shards=SHARDS, **where).close()
        with pytest.raises(errors.InvalidArgument):
            Server(shards=2 * SHARDS, **where)


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    """Ranks that take no part in steps travel with a shard."""
    with serving(tmp_path) as servers:
        core = servers[0].shards.server(0).core
        steps = core.steps()
        core.set_steps([8, 0, 2, 1, 3, 5, 0, 7])
        assert core.steps()[4:] == [3, 5, 0, 7]
        for wrong in ([], [8, 0, 2, 0, 3], [8, 0, 1 << 40, 0]):
            with pytest.raises(errors.InvalidArgument):
                core.set_steps(wrong)
        assert core.steps()[0] == 8 and steps[0] == 0
        scale(servers, 1)
        scale(servers[::-1], 1)
        moved = servers[2].shards.server(0).core.steps()
        assert moved[0] == 8 and moved[4:] == [3, 5, 0, 7]


def test_prefetched_lookups(tmp_path: Path) -> None:
    """Training with stale lookups, while updates are in flight."""
    ids = torch.arange(100)
    with serving(tmp_path) as servers:
        counter = Counter(addresses(servers[:2]))
        counter.add(1)
        counter.store.close()
        store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=addresses(servers[:2]),
            job="stale",
            timeout=20.0,
        )
        bags = persia.EmbeddingBagCollection(
            store=store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=2, feature_names=["f"], init=0.0
                )
            ],
        )
        times = 1
        source = (persia.JaggedBatch(["f"], ids) for _ in iter(int, 1))
        batches = iter(
            persia.DataLoader(source, bags, staleness=8, prefetch=True)
        )

        def train() -> None:
            nonlocal times
            (-bags(next(batches)).values().sum()).backward()
            times += 1

        with meanwhile(train):
            scale(servers, 3)
            scale(servers, 2)
        store.flush()
        rows = torch.as_tensor(store.rows("t", ids.tolist())[:, 0])
        assert rows.tolist() == [times] * 100
        store.close()
