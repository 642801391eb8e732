"""``persia launch --autoscale``: data loaders follow the load."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persia import _core
from tests.ready import ended
from tests.system.processes import environment, wait_until

# Stand-ins print what the processes print; the load is in a file.
DRIVER = """
import sys
from persia.distributed import autoscale
from persia.distributed.launch import Cluster, run

autoscale._PERIOD = 0.1

class Fake(Cluster):
    def server_command(self, shard, port, options):
        return [sys.executable, "-c", SERVER]

    def worker_command(self, port, options):
        return [sys.executable, "-c", WORKER, FOLDER]

    def loader_command(self, loader):
        return [sys.executable, "-c", LOADER, str(loader)]

SERVER = '''
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))
print("serving shard 0 of 1 on 127.0.0.1:1")
time.sleep(600)
'''
WORKER = '''
import http.server, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        load = pathlib.Path(sys.argv[1], "load").read_text()
        self.send_response(200)
        self.end_headers()
        line = 'persia_load{role="loader"} ' + load + chr(10)
        self.wfile.write(line.encode())

    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(f"metrics on http://127.0.0.1:{server.server_port}/metrics")
print("serving an embedding worker of 1 servers on 127.0.0.1:1")
server.serve_forever()
'''
LOADER = '''
import sys, time
print("sending as loader", sys.argv[1])
time.sleep(600)
'''
JOB = '''
import pathlib, sys, time
while not pathlib.Path(sys.argv[1], "end").exists():
    time.sleep(0.05)
'''
FOLDER = sys.argv[1]
cluster = Fake(
    [sys.executable, "-c", JOB, FOLDER],
    embedding_workers=1,
    loaders=1,
    loaders_max=3,
    parts=8,
    scale_after=(0.3, 0.3),
)
sys.exit(run(cluster))
"""


def test_loaders_follow_the_load(tmp_path: Path) -> None:
    """Out to the most, in to the least; one that is ended is no failure."""
    load, out = tmp_path / "load", tmp_path / "out"
    load.write_text("2.0")
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        wait_until(lambda: "loaders 2 -> 3" in out.read_text())
        wait_until(lambda: "sending as loader 2" in out.read_text())
        load.write_text("0.0")
        wait_until(lambda: "loaders 3 -> 1" in out.read_text())
        load.write_text("2.0")
        wait_until(lambda: out.read_text().count("as loader 1") == 2)
        (tmp_path / "end").touch()
        assert process.wait(60) == 0, out.read_text()
    finally:
        process.kill()
    text = out.read_text()
    assert text.count("sending as loader 0") == 1  # it was never ended
    assert "failed" not in text and "exited" not in text


@pytest.mark.parametrize(
    "options",
    [
        ["--loaders", "1:3"],
        ["--loaders", "2", "--autoscale"],
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
