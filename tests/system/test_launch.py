"""``persia.launch``: whatever ends, and however, nothing is left behind.

The servers here are stand-ins that print what a server prints, so that they
can misbehave.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import _core, errors
from persia.launch import Cluster
from tests.system.processes import environment, marked, wait_until

DRIVER = """
import sys
from persia.launch import Cluster, run

class Fake(Cluster):
    def server_command(self, shard, options):
        return [sys.executable, "-c", {server!r}, str(shard),
                str(self.servers)]

command = [sys.executable, "-c", {job!r}]
sys.exit(run(Fake(command, {servers}, start={start}, grace={grace})))
"""
READY = """
import os, signal, sys, time
shard, shards = sys.argv[1:]
print(f"serving shard {shard} of {shards} on 127.0.0.1:{7000 + int(shard)}")
"""
SERVER = (
    READY
    + """
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
time.sleep(600)
"""
)
WAIT = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark; nothing that has it outlives the test."""
    value = uuid.uuid4().hex
    yield value
    for pid in marked(value):
        os.kill(pid, signal.SIGKILL)


def start(
    mark: str,
    job: str,
    server: str = SERVER,
    servers: int = 2,
    start: float = 60,
    grace: float = 20,
    **variables: str,
) -> subprocess.Popen[str]:
    code = DRIVER.format(
        server=server, job=job, servers=servers, start=start, grace=grace
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(mark, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], mark: str) -> tuple[str, str]:
    output, messages = process.communicate(timeout=120)
    assert not marked(mark), (output, messages)
    return output, messages


def until_begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "begun" in line:
            return
    raise AssertionError("the command did not begin")


def pid_of(mark: str, words: str) -> int:
    (pid,) = [p for p, line in marked(mark).items() if line.endswith(words)]
    return pid


def test_the_command_gets_addresses_and_gives_its_status(mark: str) -> None:
    job = """
import os, sys
print("servers", os.environ["PERSIA_SERVERS"])
print("oh", file=sys.stderr)
sys.exit(7)
"""
    process = start(mark, job)
    output, messages = finish(process, mark)
    assert process.returncode == 7
    lines = output.splitlines()
    assert "job | servers 127.0.0.1:7000,127.0.0.1:7001" in lines
    assert "ps0 | serving shard 0 of 2 on 127.0.0.1:7000" in lines
    assert "job | oh" in messages.splitlines()
    assert "exited with status 7; its last lines:" in messages
    assert messages.splitlines()[-2:] == [
        "  servers 127.0.0.1:7000,127.0.0.1:7001",
        "  oh",
    ]


def test_torchrun_makes_a_new_store_for_ranks_it_starts_again(
    mark: str,
) -> None:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    job = f"import os; print('set to', os.environ[{name!r}])"
    output, _ = finish(start(mark, job), mark)
    assert "job | set to 1" in output
    output, _ = finish(start(mark, job, **{name: "0"}), mark)
    assert "job | set to 0" in output  # by the user


def test_success_stops_the_servers_in_peace(mark: str) -> None:
    server = (
        READY
        + """
def stop(*args):
    print(f"shard {shard} saved its rows")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
time.sleep(600)
"""
    )
    process = start(mark, "print('done')", server, 3)
    output, messages = finish(process, mark)
    assert process.returncode == 0, messages
    assert messages == ""
    for shard in range(3):
        assert f"ps{shard} | shard {shard} saved its rows" in output


def test_a_server_that_cannot_stop_well_is_told(mark: str) -> None:
    server = (
        READY
        + """
signal.signal(signal.SIGTERM, lambda *a: sys.exit("no room on the disk"))
time.sleep(600)
"""
    )
    process = start(mark, "pass", server, 1)
    _, messages = finish(process, mark)
    assert process.returncode == 1
    assert "ps0 (pid" in messages and "  no room on the disk" in messages


def test_a_killed_server_ends_all(mark: str) -> None:
    # A command that does not listen, with children in other sessions.
    job = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(15, 1); time.sleep(600)"
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
print('begun', flush=True)
time.sleep(600)
"""
    process = start(mark, job, grace=1)
    until_begun(process)
    os.kill(pid_of(mark, "1 2 "), signal.SIGKILL)
    _, messages = finish(process, mark)
    assert process.returncode == 128 + signal.SIGKILL, messages
    assert "ps1 (pid" in messages
    assert "was ended by SIGKILL; its last lines:" in messages
    assert "  serving shard 1 of 2" in messages
    assert "killing job" in messages


def test_what_a_command_leaves_is_ended(mark: str) -> None:
    job = """
import os, subprocess, sys
for _ in range(3):  # a daemon: its parent is gone at once
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
        os._exit(0)
"""
    process = start(mark, job)
    _, messages = finish(process, mark)
    assert process.returncode == 0, messages


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(mark: str, number: int) -> None:
    job = """
import signal, sys, time
def stop(number, frame):
    print("signal", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print('begun', flush=True)
time.sleep(600)
"""
    process = start(mark, job)
    until_begun(process)
    process.send_signal(number)
    output, _ = finish(process, mark)
    assert process.returncode == 128 + number
    assert output.count(f"job | signal {number}") == 1


def test_a_second_signal_kills(mark: str) -> None:
    job = """
import signal, time
signal.signal(signal.SIGINT, lambda *a: print("busy", flush=True))
print('begun', flush=True)
while True:
    time.sleep(1)
"""
    process = start(mark, job)
    until_begun(process)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    while "busy" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    finish(process, mark)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_killed_launcher_leaves_nothing(mark: str) -> None:
    process = start(mark, WAIT)
    until_begun(process)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not marked(mark))


def test_a_killed_supervisor_leaves_nothing(mark: str) -> None:
    process = start(mark, WAIT)
    until_begun(process)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        (supervisor,) = map(int, file.read().split())
    os.kill(supervisor, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    wait_until(lambda: not marked(mark))


def test_nobody_reads(mark: str) -> None:
    job = "import time\nwhile True:\n  print('begun')\n  time.sleep(0.1)\n"
    process = start(mark, job)
    until_begun(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert not marked(mark)


def test_a_server_that_does_not_start(mark: str) -> None:
    server = READY + "if shard == '1': sys.exit('port is taken')\n"
    server = server.replace("print", "if shard == '0': print")
    process = start(mark, WAIT, server + "time.sleep(600)\n")
    output, messages = finish(process, mark)
    assert process.returncode == 1
    assert "port is taken" in messages
    assert "begun" not in output


def test_a_server_that_is_late_is_named(mark: str) -> None:
    server = SERVER.replace("print", "0 and print")
    process = start(mark, WAIT, server, start=1.5)
    output, messages = finish(process, mark)
    assert process.returncode == 1
    assert "Unavailable: ps0 and ps1: not ready within 1.5 s" in messages
    assert "begun" not in output


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
@pytest.mark.parametrize("flags", [[], ["--tls"]])
def test_real_servers(mark: str, tmp_path: Path, flags: list[str]) -> None:
    job = """
import os
from persia import _core
from persia.security import Security
security = Security.from_environment()
assert bool(security.token) == bool(security.ca) == TLS
assert os.path.isdir(os.environ["PERSIA_CHECKPOINTS"])
for shard, address in enumerate(os.environ["PERSIA_SERVERS"].split(",")):
    way = _core.Channel(address, security.arguments(), 1 << 20, 30.0)
    hello = way.hello("default", "nn_worker", 0)
    assert (hello["shard"], hello["shards"]) == (shard, 2)
    way.close()
print("all there")
""".replace("TLS", str(bool(flags)))
    config = tmp_path / "ps.yaml"
    config.write_text("memory-limit: 64MiB")
    command = [sys.executable, "-m", "persia", "launch", "--ps", "2", *flags]
    command += ["--config", str(config), "--checkpoints", str(tmp_path / "c")]
    command += ["--save-on-exit", "end", "--", sys.executable, "-c", job]
    process = subprocess.Popen(
        command,
        env=environment(mark, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, messages = finish(process, mark)
    assert process.returncode == 0, messages
    assert "job | all there" in output
    for shard in range(2):
        assert f"ps{shard} | saved end: 0 rows" in output
        folder = tmp_path / "c" / f"end-{shard}-of-2" / "rows"
        assert (folder / "shard.json").exists()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ps.yaml", "c"}  # no certificates


def test_wrong_clusters_are_named() -> None:
    with pytest.raises(errors.InvalidArgument, match="no command"):
        Cluster([])
    with pytest.raises(errors.InvalidArgument, match="no such command"):
        Cluster(["./not-there"])
    with pytest.raises(errors.InvalidArgument, match="at least 1"):
        Cluster([sys.executable], 0)
