"""``persia launch --autoscale``: data loaders follow the load."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from persia import _core
from persia.distributed import driver
from persia.distributed.autoscale import Autoscaler, last_decisions
from persia.distributed.driver import Driver, Role
from persia.distributed.load import SERVER, Decision
from tests.ready import ended
from tests.system.processes import environment, wait_until

# Stand-ins print what the processes print; the load is in a file.
DRIVER = """
import pathlib, sys
from persia.distributed import autoscale, driver
from persia.distributed.commands import Cluster
from persia.distributed.launch import run

autoscale._PERIOD = 0.1
driver._NOTICE = driver._PAUSE = 0.1
driver._TRIES = 100

class Fake(Cluster):
    def server_command(self, shard, port, options):
        return [sys.executable, "-c", PAGE, FOLDER, "server",
                f"serving shard 0 of 1 on 127.0.0.1:{port}"]

    def join_command(self, server, port, join, options):
        return [sys.executable, "-c", PAGE, FOLDER, "server",
                f"serving no shard of 8 yet on 127.0.0.1:{port}"]

    def move_command(self, addresses, to):
        return [sys.executable, "-c", MOVE, FOLDER, str(len(addresses)),
                str(to)]

    def worker_command(self, port, options):
        return [sys.executable, "-c", PAGE, FOLDER, "embedding-worker",
                "serving an embedding worker of 1 server on "
                f"127.0.0.1:{port}"]

    def loader_command(self, loader):
        return [sys.executable, "-c", LOADER, str(loader)]

MOVE = '''
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
with (folder / "moves").open("a") as file:
    file.write(f"{sys.argv[2]} to {sys.argv[3]}" + chr(10))
sys.exit((folder / "fail").exists())
'''
PAGE = '''
import http.server, pathlib, signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *args: sys.exit(0))
folder, role, serving = sys.argv[1:]

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        for path in pathlib.Path(folder).glob("load-*"):
            named = path.name.removeprefix("load-")
            if (named == "server") == (role == "server"):
                line = f'persia_load{{role="{named}"}} {path.read_text()}'
                self.wfile.write((line + chr(10)).encode())

    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(f"metrics on http://127.0.0.1:{server.server_port}/metrics")
print(serving)
server.serve_forever()
'''
LOADER = '''
import sys, time
print("sending as loader", sys.argv[1])
time.sleep(600)
'''
JOB = '''
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], "workers").write_text(os.environ["PERSIA_WORKERS"])
while not pathlib.Path(sys.argv[1], "end").exists():
    time.sleep(0.05)
'''
FOLDER = sys.argv[1]
cluster = Fake(
    [sys.executable, "-c", JOB, FOLDER],
    embedding_workers=1,
    loaders=1,
    most={role: int(most) for role, most in map(
        lambda word: word.split("="), sys.argv[2:])},
    parts=8,
    scale_after=(0.3, 0.3),
    checkpoints=pathlib.Path(FOLDER),
    scale_log=pathlib.Path(FOLDER, "decisions"),
)
sys.exit(run(cluster))
"""


@contextlib.contextmanager
def launched(folder: Path, *most: str) -> Iterator[Callable[[], str]]:
    """The stand-ins; gives what they print. They end in peace."""
    out = folder / "out"
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), *most],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        yield out.read_text
        (folder / "end").touch()
        assert process.wait(60) == 0, out.read_text()
    finally:
        process.kill()
    assert "exited" not in out.read_text()


def test_loaders_follow_the_load(tmp_path: Path) -> None:
    """Out to the most, in to the least; one that is ended is no failure."""
    load = tmp_path / "load-loader"
    load.write_text("2.0")
    with launched(tmp_path, "loader=3") as out:
        wait_until(lambda: "loaders 2 -> 3" in out())
        wait_until(lambda: "sending as loader 2" in out())
        load.write_text("0.0")
        wait_until(lambda: "loaders 3 -> 1" in out())
        load.write_text("2.0")
        wait_until(lambda: out().count("as loader 1") == 2)
    assert out().count("sending as loader 0") == 1  # it was never ended


def test_embedding_workers_follow_the_load(tmp_path: Path) -> None:
    """Their list has those that take batches, and no more."""
    load, given = tmp_path / "load-embedding-worker", tmp_path / "workers"
    load.write_text("2.0")
    with launched(tmp_path, "embedding-worker=2") as out:
        wait_until(lambda: given.exists() and given.read_text())
        listed = Path(given.read_text().removeprefix("file:"))
        first = listed.read_text().split()
        assert len(first) == 1
        wait_until(lambda: len(listed.read_text().split()) == 2)
        load.write_text("0.1")
        wait_until(lambda: listed.read_text().split() == first)
        load.write_text("2.0")
        wait_until(lambda: len(listed.read_text().split()) == 2)
    assert out().count("embedding-workers 1 -> 2") == 2
    assert not listed.exists()


def test_servers_follow_the_load(tmp_path: Path) -> None:
    """They join before shards move to them, and end after these have left; a
    move that fails is made again."""
    load, moves = tmp_path / "load-server", tmp_path / "moves"
    (tmp_path / "fail").touch()
    load.write_text("3.0")
    with launched(tmp_path, "server=3"):
        wait_until(lambda: moves.exists() and moves.read_text())
        (tmp_path / "fail").unlink()
        wait_until(lambda: moves.read_text().count("\n") > 1)
        load.write_text("0.1")
        wait_until(lambda: moves.read_text().endswith("3 to 1\n"))
        load.write_text("2.0")
        wait_until(lambda: moves.read_text().endswith("2 to 2\n"))
    assert set(moves.read_text().splitlines()) == {
        "3 to 3",
        "3 to 1",
        "2 to 2",
    }
    assert [
        (d["before"], d["after"])
        for d in last_decisions(tmp_path / "decisions", 3)
    ] == [(1, 3), (3, 1), (1, 2)]


class Ended:
    """Stands for a process that has ended, or serves."""

    pid, name = 1, "ps1"

    def __init__(self, status: int | None) -> None:
        self.status = status

    def end(self) -> str:
        return "failed"

    def story(self, end: str) -> str:
        return end


def test_shards_that_could_not_be_moved_are_shared_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that has joined does not stay without them."""
    monkeypatch.setattr(driver, "_PAUSE", 0.0)
    monkeypatch.setattr(driver, "_LATER", 0.0)
    decided = [Decision(SERVER, 1, 2, 1.5)]

    class Decided(Autoscaler):
        def ask(self, *_: object) -> list[str | Decision]:
            return [decided.pop()] if decided else []

    statuses = [1, 1, 1, 0, 7]
    moves: list[int] = []

    def move(addresses: Sequence[str], to: int) -> Any:
        moves.append(to)
        return Ended(statuses.pop(0))

    serves: Any = Ended(None)
    role = Role([serves], lambda: serves, {"ps1"}, {"ps1": "127.0.0.1:1"})
    said: list[str] = []
    one = Driver(
        Decided({}), {SERVER: role}, move, said.append, set(), 9.0, None
    )
    for _ in range(50):
        one.step([])
    assert moves == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "options",
    [
        ["--loaders", "1:3"],
        ["--loaders", "2", "--autoscale"],
        ["--ps", "1:3"],
        ["--ps", "0"],
        ["--ps", "1:3", "--shards", "2", "--autoscale"],
        ["--loaders", "3:1", "--autoscale"],
        ["--loaders", "x"],
        ["--loaders", "1:3", "--autoscale", "--parts", "2"],
    ],
)
def test_ranges_that_make_no_sense(options: list[str]) -> None:
    """Nothing is started."""
    words = ["launch", "--embedding-workers", "1", *options, "--", "true"]
    done = ended("-m", "persia", *words, env=environment(), timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "serving" not in done.stdout


LINES = "u,i,click\n" + "".join(
    f"{n % 97},{n % 31},{n % 3 == 0:d}\n" for n in range(6000)
)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[str]:
    """The URL of a file that takes its time, for each reader."""
    (tmp_path / "a.csv").write_text(LINES)

    class Slow(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def copyfile(self, source: Any, outputfile: Any) -> None:
            while data := source.read(2048):
                time.sleep(0.25)
                try:
                    outputfile.write(data)
                except OSError:
                    return

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a.csv"
    server.shutdown()
    server.server_close()


@pytest.mark.long
@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="built without gRPC")
def test_slow_data_gets_more_loaders(slow: str, tmp_path: Path) -> None:
    """Real processes: each batch is trained once, whoever sent it."""
    words = ["launch", "--embedding-workers", "1", "--loaders", "1:3"]
    words += ["--autoscale", "--scale-out-after", "5", "--parts", "6"]
    words += ["--data", slow, "--feed", "--label click --batch-size 50"]
    train = ["persia", "train", str(tmp_path / "a.csv"), "--label", "click"]
    words += ["--", sys.executable, "-m", *train, "--batch-size", "50"]
    done = ended("-m", "persia", *words, env=environment(), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scale: loaders 1 -> 2" in done.stdout + done.stderr
    assert "108 batches were trained, 0 skipped, 0 are left" in done.stdout


#: Makes rows until a file is there; each row counts its updates.
GROWING = """
import pathlib, sys, time
import torch
import persia

store = persia.Store(persia.optim.SGD(lr=1.0))
config = persia.EmbeddingBagConfig("t", 16, feature_names=["f"], init=0.0)
bags = persia.EmbeddingBagCollection(store=store, tables=[config])
rows = 0
while not pathlib.Path(sys.argv[1]).exists():
    ids = torch.arange(rows, rows + 150)
    (-bags(persia.JaggedBatch(["f"], ids)).values().sum()).backward()
    rows += 150
    time.sleep(0.05)
store.flush()
found = store.rows("t", torch.arange(rows))
print("every row has one update:", bool((found == 1.0).all()))
store.close()
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="built without gRPC")
def test_rows_that_grow_get_another_server(tmp_path: Path) -> None:
    """Real processes: it joins before the first one is full, and has half of
    the shards; `persia status` shows why."""
    log, end = tmp_path / "decisions", tmp_path / "end"
    words = ["launch", "--ps", "1:2", "--shards", "4", "--autoscale"]
    words += ["--checkpoints", str(tmp_path), "--memory-limit", "12MiB"]
    words += ["--scale-log", str(log), "--scale-out-after", "1", "--"]
    out, job = tmp_path / "out", [sys.executable, "-c", GROWING, str(end)]
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "persia", *words, *job],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        wait_until(
            lambda: "shards 2, 3" in out.read_text() or process.poll(), 120
        )
        end.touch()
        assert process.wait(60) == 0, out.read_text()
    finally:
        process.kill()
    assert "every row has one update: True" in out.read_text()
    (decision,) = last_decisions(log, 2)
    assert (decision["before"], decision["after"]) == (1, 2)
    words = ["status", "127.0.0.1:1", "--timeout", "0.1", "--interval", "0.1"]
    done = ended(
        *("-m", "persia", *words, "--scale-log", str(log)),
        env=environment(),
        timeout=60,
    )
    assert "servers 1 -> 2" in done.stdout
