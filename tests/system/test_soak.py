"""Ten minutes of everything: memory, descriptors and threads of servers and
ranks stay what they are (tests/system/soak_job.py has what the ranks do)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from persia import _core
from persia.distributed import status
from persia.distributed.security import Security
from persia.torture.verdict import shard_of
from tests.system import soak_job
from tests.system.counting import FINISH, Journal
from tests.system.processes import environment, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

from tests.system.shards import Shards
from tests.system.test_proto import (
    DIM,
    METHODS,
    Client,
    beginnings,
    connect,
    raw,
    samples,
)

SECONDS = float(os.environ.get("SOAK_SECONDS", 600))
SHARDS = 2
RANKS = (0, 1)
MIB = 1 << 20


class Watched:
    """A process, and what it used at each look."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.folder = Path(f"/proc/{pid}")
        self.used: dict[str, list[int]] = {
            name: [] for name in ("resident", "descriptors", "threads")
        }

    def look(self) -> None:
        lines = (self.folder / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        now = {
            "resident": int(fields["VmRSS"].split()[0]) << 10,
            "threads": int(fields["Threads"]),
            "descriptors": len(os.listdir(self.folder / "fd")),
        }
        for name, value in now.items():
            self.used[name].append(value)

    def grown(self) -> list[str]:
        """What is more at the end than after a warm-up, in words."""
        found = []
        for name, every in self.used.items():
            # The halves of what is left behind the warm-up. Guests and
            # checkpoints come and go: what stays is there at the quietest.
            first, last = np.array_split(every[len(every) * 2 // 5 :], 2)
            before, after = int(min(first)), int(min(last))
            room = {
                "resident": 3 * MIB + before // 100,
                "descriptors": 1,
                # gRPC starts up to two a core as load asks for them.
                "threads": 2 * (os.cpu_count() or 1),
            }[name]
            text = f"{self.name}: {name} {every[0]}, {before}, {after}"
            print(text)
            if after > before + room:
                found.append(text)
        return found


class Guests:
    """What others do to servers meanwhile, on threads; their errors."""

    def __init__(self, shards: Shards, urls: list[str]) -> None:
        self.shards = shards
        self.urls = urls
        self.errors: list[BaseException] = []
        self.turns = dict.fromkeys(("noisy", "curious", "brief"), 0)
        self._stop = threading.Event()

    @contextmanager
    def here(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._again, args=(name, call))
            for name, call in (
                ("noisy", self.noisy),
                ("curious", self.curious),
                ("brief", self.brief),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _again(self, name: str, call: Callable[[random.Random], None]) -> None:
        random_ = random.Random(name)
        try:
            while not self._stop.wait(0.2):
                call(random_)
                self.turns[name] += 1
        except BaseException as error:
            self.errors.append(error)

    def noisy(self, random_: random.Random) -> None:
        """Bytes that are no messages, or not whole."""
        address = random_.choice(self.shards.addresses)
        client = Client(address, "noisy", stream=1)
        good = samples(client)
        made = [connect(address) for _ in range(20)]
        for one in made:
            try:
                one.sendall(random_.choice(beginnings(good["Pull"], random_)))
            except OSError:  # it was closed
                continue
        for method in METHODS:
            data = good[method]
            cut = data[: random_.randrange(len(data))]
            noise = random_.randbytes(random_.choice([1, 30, 5000]))
            # A part of these might be obeyed.
            closed = method in ("PutRows", "Declare")
            for each in (noise,) if closed else (noise, cut):
                seen = raw(client.channel, method, each)
                assert seen not in ("UNAVAILABLE", "INTERNAL", "UNKNOWN")
        self._stop.wait(random_.random())
        for one in made:
            one.close()
        client.channel.close()

    def curious(self, random_: random.Random) -> None:
        """Status and metrics."""
        for one in status.ask(
            self.shards.addresses,
            namespace="space",
            security=Security(),
            interval=0.05,
        ):
            assert not one.error
            assert one.stats["uptime_ns"] > 0
        for url in self.urls:
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert b"persia_" in answer.read()

    def brief(self, random_: random.Random) -> None:
        """Clients that come, train a little and go."""
        shard = random_.randrange(SHARDS)
        client = Client(self.shards.addresses[shard], "brief", stream=2)
        ids = np.array([i for i in range(40) if shard_of(i, SHARDS) == shard])
        client.push(ids, np.ones((len(ids), DIM)))
        client.pull(ids)
        client.channel.close()


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_grows(tmp_path: Path) -> None:
    flags = ["--namespace", "space", "--metrics-port", "0"]
    folder = tmp_path / "checkpoints"
    with Shards(SHARDS, folder, *flags) as shards:
        soak(tmp_path, shards, str(folder / "out"))
    kept = {path.name for path in (folder / "out").iterdir()}
    assert len(kept) == soak_job.KEPT + len((".lock", "LATEST")), kept


def soak(folder: Path, shards: Shards, root: str) -> None:
    journals = [Journal(folder / f"{rank}.journal") for rank in RANKS]
    logs = [folder / f"{rank}.log" for rank in RANKS]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in RANKS:
            with logs[rank].open("w") as log:
                ranks.append(begin(folder, shards, root, rank, log))
        wait_until(
            lambda: (
                any(one.poll() is not None for one in ranks)
                or all(journal.started > 1 for journal in journals)
            ),
            120,
        )
        watched = [
            Watched(f"server {shard}", shards.pid(shard))
            for shard in range(SHARDS)
        ]
        watched += [Watched(f"rank {r}", ranks[r].pid) for r in RANKS]
        processes = [shards.processes[s] for s in range(SHARDS)]
        urls = [one.metrics for one in processes if one is not None]
        guests = Guests(shards, urls)
        with guests.here():
            watch(watched, guests, journals, ranks)
        for journal in journals:
            journal.set(wanted=FINISH)
        for one in ranks:
            assert one.wait(120) == 0
    except BaseException as error:
        for log in logs:
            error.add_note(log.read_text() if log.exists() else "")
        raise
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    print(f"{journals[0].started} steps, {guests.turns}")
    grown = [text for one in watched for text in one.grown()]
    assert not grown


def begin(
    folder: Path, shards: Shards, root: str, rank: int, log: IO[str]
) -> subprocess.Popen[bytes]:
    more = [folder / f"{rank}.journal", shards.text, root, folder / "group"]
    more += [rank, len(RANKS)]
    return subprocess.Popen(
        [sys.executable, soak_job.__file__, *map(str, more)],
        env=environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"),
        stdout=log,
        stderr=log,
    )


def watch(
    watched: list[Watched],
    guests: Guests,
    journals: list[Journal],
    ranks: list[subprocess.Popen[bytes]],
) -> None:
    """Looks each second; all go on."""
    end = time.monotonic() + SECONDS
    steps, since = 0, time.monotonic()
    while time.monotonic() < end:
        time.sleep(1.0)
        if guests.errors:
            raise guests.errors[0]
        assert all(rank.poll() is None for rank in ranks)
        for one in watched:
            one.look()
        now = min(journal.started for journal in journals)
        if now > steps:
            steps, since = now, time.monotonic()
        assert time.monotonic() - since < 60, "the ranks do not go on"
