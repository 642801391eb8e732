"""Where tables are, who this process is, addresses."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

import persia
from persia import errors
from persia.distributed import cluster, ranks
from persia.distributed.cluster import Job, Settings, resolve, stream_id
from persia.distributed.ranks import all_max, all_sum
from persia.distributed.security import Security


@pytest.fixture(autouse=True)
def plain(monkeypatch: Any) -> None:
    """No job and no servers but those of the test."""
    for name in (
        "PERSIA_SERVERS",
        "RANK",
        "WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group(tmp_path: Any) -> Any:
    """A process group of this process alone."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
    )
    yield dist
    dist.destroy_process_group()


# -- the job --------------------------------------------------------------


def test_a_process_alone() -> None:
    assert Job.here() == Job(0, 1, 0)


def test_torchrun_says_who_we_are(monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    # Ranks count the restarts of their own machine, and one that joined later
    # has fewer; only with a key-value store that outlives them they need it.
    assert Job.here() == Job(3, 8, 0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert Job.here() == Job(3, 8, 2)
    assert Job.here(1, 4) == Job(1, 4, 2)


def test_torch_distributed_says_more(group: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Job.here() == Job(0, 1, 0)


@pytest.mark.parametrize("place", [(2, 2), (-1, 2), (0, 0), (1, None)])
def test_bad_places(place: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="rank"):
        Job.here(*place)


def test_a_bad_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(errors.InvalidArgument, match="WORLD_SIZE"):
        Job.here()


def test_values_of_all_ranks(group: Any) -> None:
    assert all_max([3, -4, 2**62]) == [3, -4, 2**62]
    assert all_sum([0.5, 1e300]) == [0.5, 1e300]


def test_connections_notice_lost_machines_and_block_as_before() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        socket.setdefaulttimeout(60.0)
        try:
            ranks.notice_lost_machines()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(one.fileno())
        options = socket.SOL_SOCKET, socket.SO_KEEPALIVE
        assert one.getsockopt(*options) and not server.getsockopt(*options)


def test_values_of_all_ranks_need_a_group() -> None:
    with pytest.raises(errors.InvalidArgument, match="init_process_group"):
        all_max([1])


# -- where tables are -----------------------------------------------------


def test_embedded_by_default() -> None:
    assert Settings().where() == "embedded"
    store = persia.Store()
    assert not store.remote
    assert (store.rank, store.world_size) == (0, 1)


def test_the_environment_names_servers(monkeypatch: Any) -> None:
    monkeypatch.setenv("PERSIA_SERVERS", "ps0:8888,ps1:8888")
    assert Settings().where() == "ps0:8888,ps1:8888"
    assert Settings("embedded").where() == "embedded"
    assert Settings("ps2:1").where() == "ps2:1"
    monkeypatch.setenv("PERSIA_SERVERS", "")
    assert Settings().where() == "embedded"


def test_a_job_of_several_ranks_has_its_tables_on_them(
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Settings().where() == "ranks"
    with pytest.raises(errors.InvalidArgument, match="init_process_group"):
        persia.Store()
    assert not persia.Store(servers="embedded").remote
    assert Settings("ranks", rank=0, world=1).where() == "embedded"


def test_ranks_are_those_of_torch(group: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="rank 0 of 1"):
        persia.Store(servers="ranks", rank=1, world_size=2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"wire_dtype": "fp8"},
        {"lost": "ignore"},
        {"timeout": 0.0},
        {"timeout": float("nan")},
        {"namespace": ""},
        {"namespace": "x" * 300},
        {"rank": 1},
        {"servers": "here:1", "memory_limit": 1 << 20},
    ],
)
def test_bad_arguments(arguments: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        persia.Store(**({"servers": "127.0.0.1:1"} | arguments))


# -- addresses ------------------------------------------------------------


def resolving(monkeypatch: Any, names: dict[str, list[str]]) -> None:
    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        if host not in names:
            raise socket.gaierror("unknown")
        return [
            (
                socket.AF_INET6 if ":" in a else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (a, 0),
            )
            for a in names[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_addresses(monkeypatch: Any) -> None:
    resolving(monkeypatch, {"ps0": ["10.0.0.1"], "ps1": ["10.0.0.2"]})
    plain = Security()
    wanted = ["ps0:1", "ps1:2", "[::1]:3", "unknown:4"]
    assert resolve(" ps0:1, ps1:2,[::1]:3,unknown:4", plain) == (wanted, plain)
    assert resolve(wanted, plain) == (wanted, plain)


def test_a_name_with_several_addresses_is_several_servers(
    monkeypatch: Any,
) -> None:
    names = {
        "ps": ["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1"],
        "six": ["fd00::1", "fd00::2"],
        "localhost": ["::1", "127.0.0.1"],
    }
    resolving(monkeypatch, names)
    assert resolve("ps:8", Security())[0] == ["10.0.0.1:8", "10.0.0.2:8"]
    assert resolve("six:8", Security())[0] == ["[fd00::1]:8", "[fd00::2]:8"]
    assert resolve("localhost:8", Security())[0] == ["localhost:8"]
    # Their certificates are for the name.
    secure = Security(ca="-")
    assert resolve("ps:8", secure)[1].server_name == "ps"
    named = Security(ca="-", server_name="all")
    assert resolve("ps:8,six:8", named)[1].server_name == "all"
    for several in ("ps:8,six:8", "ps:8,other:8"):
        with pytest.raises(errors.InvalidArgument, match="server_name"):
            resolve(several, secure)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        "host:0",
        "host:70000",
        ":1",
        "::1:2",
        "[::1]",
        "a:b",
    ],
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="servers"):
        resolve(text, Security())


def test_an_address_twice() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"10\.0\.0\.1:1"):
        resolve("10.0.0.1:1,10.0.0.1:1", Security())


# -- streams --------------------------------------------------------------


def test_streams_are_those_of_the_documented_hash() -> None:
    data = b"default\0nn_worker\x003"
    digest = hashlib.blake2b(data, digest_size=8).digest()
    assert stream_id("default", "", "nn_worker", 3) == int.from_bytes(
        digest, "little"
    )
    data = b"default\0nightly\0nn_worker\x003"
    digest = hashlib.blake2b(data, digest_size=8).digest()
    assert stream_id("default", "nightly", "nn_worker", 3) == int.from_bytes(
        digest, "little"
    )
    ids = {
        stream_id(n, j, r, i)
        for n in ("a", "ab")
        for j in ("", "c")
        for r in ("b", "nn_worker")
        for i in range(100)
    }
    assert len(ids) == 800


class _Board:
    """Stands for the ranks' key-value store, within one process."""

    kept: ClassVar[dict[str, Any]] = {}
    lock = threading.Lock()

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        with self.lock:
            self.kept[f"{self._prefix}/{key}"] = value

    def has(self, key: str) -> bool:
        with self.lock:
            return f"{self._prefix}/{key}" in self.kept

    def get(self, key: str) -> str:
        return self.read(key, "").decode()

    def read(self, key: str, why: str) -> bytes:
        while not self.has(key):
            time.sleep(1e-4)
        value = self.kept[f"{self._prefix}/{key}"]
        return value if isinstance(value, bytes) else value.encode()

    def first(self, key: str, value: str) -> str:
        with self.lock:
            return str(self.kept.setdefault(f"{self._prefix}/{key}", value))

    def drop(self, key: str) -> None:
        with self.lock:
            for kind in ("", "#"):
                self.kept.pop(f"{self._prefix}/{key}{kind}", None)

    def count(self, key: str, more: int) -> int:
        with self.lock:
            name = f"{self._prefix}/{key}#"
            self.kept[name] = int(self.kept.get(name, 0)) + more
            return int(self.kept[name])


def test_ranks_agree_on_the_t_of_their_updates(monkeypatch: Any) -> None:
    class Core:
        def __init__(self, t: int) -> None:
            self._t = t

        def t(self) -> int:
            return self._t

        def set_t(self, base: int) -> None:
            self._t = base

    monkeypatch.setattr(cluster, "Keys", _Board)
    monkeypatch.setattr(cluster, "group_here", lambda: "a group")
    monkeypatch.setattr(cluster, "times_opened", {})
    monkeypatch.setattr(_Board, "kept", {})
    found = []
    # Rank 1 opens when rank 0 has pushed; then both open once more.
    for rank, t in (0, 5), (1, 9), (0, 20), (1, 30):
        core: Any = Core(t)
        key = cluster.StreamKey("default", "a job", rank, 0)
        cluster.agree_on_t(core, key, 0)
        found.append(core.t())
    assert found == [5, 5, 20, 20]


def _mock_job(world: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks as threads, and their collectives; set ``rank`` of what it
    returns in each."""
    meeting = threading.Barrier(world)
    said: dict[int, Any] = {}
    of_thread = threading.local()

    def collective(values: list[float], fold: Any) -> list[float]:
        said[of_thread.rank] = values
        meeting.wait(20)
        out = [fold(x) for x in zip(*said.values(), strict=True)]
        meeting.wait(20)
        return out

    def swap(pieces: list[bytes]) -> list[bytes]:
        said[of_thread.rank] = pieces
        meeting.wait(20)
        out = [said[rank][of_thread.rank] for rank in range(world)]
        meeting.wait(20)
        return out

    monkeypatch.setattr(ranks, "Keys", _Board)
    monkeypatch.setattr(ranks, "group_here", lambda: "a group")
    monkeypatch.setattr(_Board, "kept", {})
    monkeypatch.setattr(ranks, "all_max", lambda v: collective(v, max))
    monkeypatch.setattr(ranks, "all_sum", lambda v: collective(v, sum))
    monkeypatch.setattr(ranks, "swap_pieces", swap)
    return of_thread


def _check_ranks(
    run: Callable[[int], list[tuple[float, float]]],
    steps: tuple[int, ...],
    passes: int,
) -> None:
    """Runs the ranks side by side: as many as have a step take part in it,
    in each pass."""
    world = len(steps)
    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(run, range(world)))
    for rank in range(world):
        expected = []
        for step in range(steps[rank]):
            there = [r for r in range(world) if steps[r] > step]
            expected.append(
                (max(there) + min(there), sum(10.0**r for r in there))
            )
        assert found[rank] == expected * passes


def _exchange(passes: ranks.Passes, rank: int) -> tuple[float, float]:
    most = passes.all_max([rank, -rank])
    given = passes.swap(lambda n: [bytes([rank, i, 255]) for i in range(n)])
    there = [piece[0] for piece in given]
    me = there.index(rank)
    assert given == [bytes([other, me, 255]) for other in there]
    return most[0] - most[1], passes.all_sum([10.0**rank])[0]


@pytest.mark.parametrize(
    "steps", [(1, 3, 6), (4, 4, 2), (5, 5, 5), (0, 2, 2), (6, 1, 3)]
)
def test_ranks_that_go_on_agree_among_themselves(
    steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: as many ranks as have a step take part in its values. The first
    rank has a pass of its own between."""
    world = len(steps)
    of_thread = _mock_job(world, monkeypatch)
    # As in model.join(): no step begins before all who end have said so.
    backward = [threading.Barrier(world) for _ in range(2 * max(steps))]
    left = threading.Barrier(world)

    def run(rank: int) -> list[tuple[float, float]]:
        of_thread.rank = rank
        seen = []
        for epoch in range(2):  # with a new store in each
            passes = ranks.Passes("p", Job(rank, world, 0))
            passes.begin()
            for step in range(steps[rank]):
                backward[epoch * max(steps) + step].wait(20)
                seen.append(_exchange(passes, rank))
            passes.end()
            for step in range(steps[rank], max(steps)):
                backward[epoch * max(steps) + step].wait(20)
            left.wait(20)  # as model.join() does
            if rank == 0:
                passes.begin()
                passes.end()
        return seen

    _check_ranks(run, steps, 2)


@pytest.mark.parametrize(
    "steps", [(1, 3, 6), (5, 5, 5), (0, 2, 2), (6, 1, 3), (0, 0)]
)
def test_ranks_that_nothing_keeps_together_meet(
    steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without DistributedDataParallel: a rank may begin a pass or
    end it whenever it likes."""
    world = len(steps)
    of_thread = _mock_job(world, monkeypatch)

    def run(rank: int) -> list[tuple[float, float]]:
        of_thread.rank = rank
        rest, seen = random.Random(rank), []
        for _ in range(4):
            passes = ranks.Passes("p", Job(rank, world, 0))
            for _ in range(3):
                time.sleep(rest.choice([0, 0.002, 0.02]))
                passes.begin(meets=True)
                for _ in range(steps[rank]):
                    time.sleep(rest.choice([0, 0.0005]))
                    seen.append(_exchange(passes, rank))
                passes.end()
        return seen

    _check_ranks(run, steps, 12)
