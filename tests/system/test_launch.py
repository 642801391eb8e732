"""``persia launch``: whatever ends, and however, nothing is left behind.

The servers here are stand-ins that print what a server prints, so that they
can misbehave.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from persia import _core, errors
from persia.cli.app import app
from persia.distributed.commands import Cluster
from persia.distributed.launch import reserve
from tests.system.processes import MARK, environment, marked, wait_until

DRIVER = """
import sys
from persia.base.signals import end_at_once
from persia.distributed.commands import Cluster
from persia.distributed.launch import run

class Fake(Cluster):
    def server_command(self, shard, port, options):
        return [sys.executable, "-c", {server!r}, str(port), str(shard),
                str(self.servers)]

end_at_once()  # as any command begins
command = {command!r}
cluster = Fake(command, {servers}, wait={wait}, start={start}, grace={grace})
sys.exit(run(cluster))
"""
BEGIN = """
import os, signal, sys, time
port, shard, shards = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
"""
READY = """
print(f"serving shard {shard} of {shards} on 127.0.0.1:{port}")
time.sleep(600)
"""
SERVER = BEGIN + READY
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
    wait: bool = False,
    start: float = 60,
    grace: float = 20,
    command: list[str] | None = None,
    redirect: str = "",  # as bash does it
    **variables: str,
) -> subprocess.Popen[str]:
    code = DRIVER.format(
        server=server,
        command=command or [sys.executable, "-c", job],
        servers=servers,
        wait=wait,
        start=start,
        grace=grace,
    )
    shell = ["bash", "-c", f'exec {redirect}; exec "$0" "$@"']
    return subprocess.Popen(
        [*shell, sys.executable, "-c", code],
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
    """The command, and two servers."""
    assert process.stdout is not None
    left = {"begun", "serving shard 0 of 2", "serving shard 1 of 2"}
    for line in process.stdout:
        left -= {words for words in left if words in line}
        if not left:
            return
    raise AssertionError(f"not said: {left}")


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
    process = start(mark, job, wait=True)
    output, messages = finish(process, mark)
    assert process.returncode == 7
    lines = output.splitlines()
    found = re.search(r"servers ((\S+:\d+),(\S+:\d+))", output)
    assert found and f"job | servers {found[1]}" in lines
    for shard in range(2):
        line = f"serving shard {shard} of 2 on {found[2 + shard]}"
        assert f"ps{shard} | {line}" in lines
    assert "job | oh" in messages.splitlines()
    assert "exited with status 7; its last lines:" in messages
    assert messages.splitlines()[-2:] == [
        f"  servers {found[1]}",
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
        BEGIN
        + """
def stop(*args):
    print(f"shard {shard} saved its rows")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
"""
        + READY
    )
    process = start(mark, "print('done')", server, 3)
    output, messages = finish(process, mark)
    assert process.returncode == 0, messages
    assert messages == ""
    for shard in range(3):
        assert f"ps{shard} | shard {shard} saved its rows" in output


def test_a_server_that_cannot_stop_well_is_told(mark: str) -> None:
    server = SERVER.replace("exit(0)", "exit('no room on the disk')")
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


def test_sigterm_leaves_servers_their_grace(mark: str) -> None:
    """Not only the second that other commands have."""
    server = (
        BEGIN
        + """
def stop(*args):
    time.sleep(3)
    print(f"shard {shard} saved its rows")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
"""
        + READY
    )
    process = start(mark, WAIT, server, grace=60)
    until_begun(process)
    process.send_signal(signal.SIGTERM)
    output, messages = finish(process, mark)
    assert process.returncode == 128 + signal.SIGTERM
    for shard in range(2):
        assert f"ps{shard} | shard {shard} saved its rows" in output, messages


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


SAVING = """
def stop(*args):
    time.sleep(1)
    print(f"shard {shard} saved")
    open(os.environ["SAVED"] + shard, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
"""


def test_nobody_reads_the_end(mark: str, tmp_path: Path) -> None:
    server, saved = BEGIN + SAVING + READY, str(tmp_path / "saved")
    process = start(mark, "print('done')", server, wait=True, SAVED=saved)
    assert process.stdout is not None
    while "done" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert {path.name for path in tmp_path.iterdir()} == {"saved0", "saved1"}


@pytest.mark.parametrize("stderr", [False, True])
def test_a_full_disk_ends_all_in_peace(
    mark: str, tmp_path: Path, stderr: bool
) -> None:
    redirect = "> /dev/full" + " 2>&1" * stderr
    server, saved = BEGIN + SAVING + READY, str(tmp_path / "saved")
    process = start(
        mark, WAIT, server, wait=True, redirect=redirect, SAVED=saved
    )
    _, messages = finish(process, mark)
    assert process.returncode == 1
    assert (
        messages == ""
        if stderr
        else messages
        == (
            "persia launch: stopping: stdout cannot be written: "
            "No space left on device\n"
        )
    )
    # The one that spoke first; the other may not even have begun.
    assert list(tmp_path.iterdir())


def test_a_line_that_the_encoding_has_not(mark: str) -> None:
    job = "import sys\nsys.stdout.buffer.write('a → b\\n'.encode())"
    process = start(mark, job, PYTHONIOENCODING="latin-1")
    output, messages = finish(process, mark)
    assert (process.returncode, messages) == (0, "")
    assert "job | a \\u2192 b" in output.splitlines()


def test_nothing_is_lost_for_a_slow_reader_of_a_pipe(mark: str) -> None:
    job = "for i in range(20_000): print('line', i)"
    # Of all who write to it: the flag is the pipe's.
    code = "import os; os.set_blocking(1, False)"
    # The reader is ours, not the launcher's: it may live a moment longer.
    cat = f"exec env -u {MARK} cat"
    reader = f"> >(sleep 2; {cat}); {sys.executable} -c '{code}'"
    process = start(mark, job, redirect=reader)
    output, messages = finish(process, mark)
    assert (process.returncode, messages) == (0, "")
    lines = [x for x in output.splitlines() if x.startswith("job |")]
    assert lines == [f"job | line {i}" for i in range(20_000)]


@pytest.mark.parametrize(
    "redirect", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"]
)
def test_closed_streams(mark: str, redirect: str) -> None:
    job = "import sys\nprint('out')\nsys.stderr.write('error')\nsys.exit(7)"
    process = start(mark, job, wait=True, redirect=redirect)
    output, messages = finish(process, mark)
    assert process.returncode == 7
    assert ("job | out" in output) == (">&-" not in redirect.split())
    assert ("job | error" in messages) == ("2>&-" not in redirect.split())
    assert "Traceback" not in messages


def test_an_error_of_ours_lets_servers_save(mark: str, tmp_path: Path) -> None:
    command = tmp_path / "command"  # executable, but in no known format
    command.write_bytes(b"\0")
    command.chmod(0o755)
    server, saved = BEGIN + SAVING + READY, str(tmp_path / "saved")
    process = start(
        mark, "", server, wait=True, command=[str(command)], SAVED=saved
    )
    output, messages = finish(process, mark)
    assert process.returncode == 1
    assert "command cannot be started: Exec format error" in messages
    assert output.count("saved") == 2
    assert len(list(tmp_path.glob("saved?"))) == 2


ASKED = """
import signal, sys, time
def stop(*args):
    print("asked to stop")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("wait", [False, True])
def test_a_server_that_does_not_start(
    mark: str, tmp_path: Path, wait: bool
) -> None:
    taken = """
while shard == "1" and not os.path.exists(os.environ["BEGUN"]):
    time.sleep(0.01)
shard == "1" and sys.exit("port is taken")
"""
    begun = tmp_path / "begun"
    if wait:
        begun.touch()
    job = ASKED.replace("time.sleep", f"open({str(begun)!r}, 'w')\ntime.sleep")
    server = BEGIN + taken + READY
    process = start(mark, job, server, wait=wait, BEGUN=str(begun))
    output, messages = finish(process, mark)
    assert process.returncode == 1
    assert "port is taken" in messages
    assert ("asked to stop" in output) == (not wait)
    assert ("begun" in output) == (not wait)


@pytest.mark.parametrize("wait", [False, True])
def test_a_server_that_is_late_is_named(mark: str, wait: bool) -> None:
    late = "print('slow')\nshard == '1' and time.sleep(600)\n"
    process = start(mark, ASKED, BEGIN + late + READY, wait=wait, start=3)
    output, messages = finish(process, mark)
    assert process.returncode == 1
    (line,) = [x for x in messages.splitlines() if "ps" in x]
    assert line.startswith("persia launch: ps1 (pid")
    assert "does not serve after 3 s (--start-timeout)" in line
    assert "its last lines:\n  slow\n" in messages
    assert ("asked to stop" in output) == (not wait)
    assert ("begun" in output) == (not wait)


def test_the_command_starts_beside_the_servers(
    mark: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    wait = f"while not os.path.exists({str(begun)!r}): time.sleep(0.01)\n"
    job = f"open({str(begun)!r}, 'w')"
    process = start(mark, job, BEGIN + wait + READY)
    output, messages = finish(process, mark)
    assert process.returncode == 0, messages
    assert output.count("serving shard") == 2


def test_the_command_waits_for_servers_that_load(mark: str) -> None:
    server = BEGIN + "time.sleep(1 + int(shard))\n" + READY
    process = start(mark, "print('begun')", server, wait=True)
    output, messages = finish(process, mark)
    assert process.returncode == 0, messages
    assert output.rindex("serving shard") < output.index("begun")


def test_a_command_that_is_done_before_its_servers(mark: str) -> None:
    # Nobody is stopped half started: that would look like a failure.
    server = "import time\ntime.sleep(1)\n" + SERVER
    process = start(mark, "pass", server)
    output, messages = finish(process, mark)
    assert (process.returncode, messages) == (0, "")
    assert output.count("serving shard") == 2


def test_a_command_that_fails_before_its_servers_serve(mark: str) -> None:
    server = "import time\ntime.sleep(600)"
    process = start(mark, "import sys\nsys.exit(7)", server)
    _, messages = finish(process, mark)
    assert process.returncode == 7
    assert "exited with status 7" in messages
    assert "ps" not in messages.replace("persia", "")


def test_a_reserved_port_is_for_a_server_alone() -> None:
    with reserve() as held:
        place = held.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(place)
        with socket.create_server(place), socket.socket() as client:
            client.connect(place)  # create_server sets SO_REUSEADDR
    with pytest.raises(errors.InvalidArgument, match=r"203\.0\.113\.1"):
        reserve("203.0.113.1")


def _free_pair() -> int:
    """A port that is free, with its neighbour: below those that the kernel
    gives to connections."""
    for port in random.sample(range(20000, 32000, 2), 6000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as both:
            for one in (port, port + 1):
                both.enter_context(socket.create_server(("127.0.0.1", one)))
            return port
    raise AssertionError("no two free ports")


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
@pytest.mark.parametrize("flags", [[], ["--tls"]])
def test_real_servers(mark: str, tmp_path: Path, flags: list[str]) -> None:
    job = """
import os
from persia import _core
from persia.base.patience import patiently
from persia.distributed.security import Security
security = Security.from_environment()
assert bool(security.token) == bool(security.ca) == TLS
assert os.path.isdir(os.environ["PERSIA_CHECKPOINTS"])
for shard, address in enumerate(os.environ["PERSIA_SERVERS"].split(",")):
    way = _core.Channel(address, security.arguments(), 30.0)
    hello = patiently(lambda: way.hello("default", 0), 60)
    assert (hello["shard"], hello["shards"]) == (shard, 2)
    way.close()
print("all there")
""".replace("TLS", str(bool(flags)))
    config = tmp_path / "ps.yaml"
    metrics = _free_pair()
    config.write_text(
        f"memory-limit: 64MiB\ncheckpoints: {tmp_path / 'c'}\n"
        f'metrics-port: "{metrics}"\nhost: 127.0.0.2\n'
    )
    command = [sys.executable, "-m", "persia", "launch", "--ps", "2", *flags]
    command += ["--ps-config", str(config)]
    command += ["--save-on-exit", "end", "--", sys.executable, "-c", job]
    # Of other servers, in the shell of the user.
    other = {"PERSIA_TOKEN": "word", "PERSIA_TLS_SERVER_NAME": "ps0"}
    process = subprocess.Popen(
        command,
        env=environment(mark, TMPDIR=str(tmp_path), **other),
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


def launch(
    mark: str, options: list[str], command: list[str]
) -> subprocess.Popen[str]:
    options = [sys.executable, "-m", "persia", "launch", *options]
    return subprocess.Popen(
        [*options, "--", sys.executable, *command],
        env=environment(mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


LISTENING = """
import os, socket
for address in os.environ["PERSIA_SERVERS"].split(","):
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.2"
    socket.create_connection((host, int(port))).close()
print("all there")
"""


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
@pytest.mark.parametrize("flags", [[], ["--restore", "out"]])
def test_servers_that_restore_are_waited_for_at_their_host(
    mark: str, tmp_path: Path, flags: list[str]
) -> None:
    config = tmp_path / "ps.yaml"
    config.write_text("host: 127.0.0.2\nport: 1\nor-empty: true\n")
    if not flags:
        config.write_text(config.read_text() + "restore: out\n")
    flags = [
        "--ps-config",
        str(config),
        "--checkpoints",
        str(tmp_path),
        *flags,
    ]
    process = launch(mark, ["--ps", "2", *flags], ["-c", LISTENING])
    output, messages = finish(process, mark)
    assert process.returncode == 0, (output, messages)
    assert "job | all there" in output
    assert output.count("restored out: no checkpoint") == 2


@pytest.mark.parametrize("option", ["--grace", "--start-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e9"])
def test_wrong_seconds_are_named(option: str, value: str) -> None:
    command = ["launch", option, value, "--", sys.executable]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert re.search(f"'{option}': {float(value)} is not", done.output)


def test_wrong_clusters_are_named() -> None:
    with pytest.raises(errors.InvalidArgument, match="no command"):
        Cluster([])
    with pytest.raises(errors.InvalidArgument, match="not-there"):
        Cluster(["./not-there"])
    with pytest.raises(errors.InvalidArgument, match="at least 1"):
        Cluster([sys.executable], 0)


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
def test_lines_of_servers_are_json_as_those_of_launch(mark: str) -> None:
    """And the servers are seen to be ready."""
    process = launch(mark, ["--log-format", "json"], ["-c", "print(1)"])
    output, messages = finish(process, mark)
    assert process.returncode == 0, messages
    lines = [line for line in output.splitlines() if line.startswith("ps0")]
    said = [json.loads(line.partition("|")[2])["message"] for line in lines]
    assert any(text.startswith("serving shard 0 of 1") for text in said)
