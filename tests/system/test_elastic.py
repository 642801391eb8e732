"""Ranks that join and leave under ``torchrun --nnodes 1:3``: agents on this
machine stand for machines. tests/system/elastic_job.py is the training."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import persia
from persia import _core
from tests.docs.pages import DOCS, blocks
from tests.ready import python
from tests.remote import Servers
from tests.roles import Workers
from tests.system import elastic_job as job
from tests.system.processes import environment, marked, wait_until
from tests.system.shards import free_port
from tests.test_roles import in_thread

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)


class Machines:
    """Agents of torchrun with one rank each; the first one keeps the
    rendezvous.

    Args:
        folder: of the messages, and of the files of each machine.
        words: the script and its arguments.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.id = uuid.uuid4().hex
        self.port = free_port()
        self.words = words
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, **more: str) -> int:
        """One more machine; its number."""
        number = len(self.agents)
        own = self.folder / f"machine-{number}"
        own.mkdir()
        settings = {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TMPDIR": str(own),
        }
        command = [python(), "-m", "torch.distributed.run", "--nnodes", "1:3"]
        command += ["--nproc-per-node", "1", "--max-restarts", "20"]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", self.id]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        command += [
            "--rdzv-conf",
            "last_call_timeout=2,keep_alive_interval=2,"
            "keep_alive_max_attempt=5",
        ]
        with (self.folder / f"log-{number}").open("w") as file:
            self.agents.append(
                subprocess.Popen(
                    [*command, *self.words],
                    env=environment(str(own), **settings | more),
                    stdout=file,
                    stderr=file,
                    text=True,
                )
            )
        if not number:  # the others must not keep the rendezvous
            wait_until(self._listens)
        return number

    def _listens(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def reach(self, world: int, steps: int) -> int:
        """Waits until so many ranks have made so many more steps; the last
        one."""

        def at() -> list[int]:
            assert self.agents[0].poll() is None
            path = self.folder / "step"
            text = path.read_text() if path.exists() else ""
            return list(map(int, text.split()))

        wait_until(lambda: at()[1:] == [world], 90)
        first = at()[0]
        wait_until(lambda: at()[1:] == [world] and at()[0] >= first + steps)
        return at()[0]

    def kill(self, number: int) -> None:
        """The machine is lost: its agent and its rank, at once."""
        for pid in marked(str(self.folder / f"machine-{number}")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agents[number].kill()
        self.agents[number].wait()

    def two_three_one(self) -> None:
        """Trains on two machines, on three, and to the end on one."""
        self.start()
        self.start()
        self.reach(2, 12)
        self.start()
        self.reach(3, 12)
        self.kill(2)
        self.kill(1)
        self.reach(1, 1)
        assert self.agents[0].wait(240) == 0

    def text(self) -> str:
        """All messages."""
        logs = sorted(self.folder.glob("log*"))
        return "\n".join(f"{path}:\n{path.read_text()}" for path in logs)

    def close(self) -> None:
        for number in range(len(self.agents)):
            self.kill(number)


@contextlib.contextmanager
def machines(folder: Path, *words: str) -> Iterator[Machines]:
    made = Machines(folder, *words)
    try:
        yield made
    except BaseException as error:
        error.add_note(made.text())
        raise
    finally:
        made.close()


def counted(servers: Servers) -> dict[int, float]:
    """What the rows of all ids have counted."""
    want = job.expected()
    config = persia.EmbeddingBagConfig(
        "c", 2, ["C1", "C2"], init=("constant", 0.0)
    )
    sgd = persia.optim.SGD(lr=1.0)
    with persia.Store(sgd, servers=servers.text, job="look") as store:
        store.add_table(config)
        rows = store.rows("c", torch.tensor(list(want)))
    return dict(zip(want, rows[:, 0].tolist(), strict=True))


def test_two_three_and_one_ranks_train_each_batch_once(
    tmp_path: Path,
) -> None:
    with contextlib.closing(Servers(1)) as servers:
        words = (str(job.__file__), servers.text, str(tmp_path))
        with machines(tmp_path, *words) as some:
            some.two_three_one()
        log = (tmp_path / "log").read_text()
        assert counted(servers) == job.expected(), log
    assert starts(log)[-1] == 1 and 3 in starts(log), log


def starts(log: str) -> list[int]:
    """How many ranks there were, start by start."""
    return [int(n) for n in re.findall(r"^start (\d)", log, re.M)]


@pytest.mark.long
def test_all_machines_are_lost_but_one_disk(tmp_path: Path) -> None:
    """The dense part is the last file; two servers have each batch once."""
    with contextlib.closing(Servers(2)) as servers:
        words = (str(job.__file__), servers.text, str(tmp_path))
        with machines(tmp_path, *words) as some:
            some.start()
            some.start()
            some.reach(2, 12)
            some.kill(0)
            some.kill(1)
            some.start(TMPDIR=str(tmp_path / "machine-1"))
            assert some.agents[2].wait(240) == 0
        log = (tmp_path / "log").read_text()
        assert counted(servers) == job.expected(), log
    assert starts(log)[-1] == 1, log


def feed(workers: Workers) -> None:
    """The batches of the job, of a data loader."""
    addresses = ",".join(workers.addresses)
    with persia.data.Sender(addresses, timeout=120) as sender:
        for batch in job.clicks():
            sender.send(batch)
        sender.end()
        sender.flush(240)


@pytest.mark.parametrize(
    "staleness", ["2", pytest.param("0", marks=pytest.mark.long)]
)
def test_batches_of_data_loaders_go_to_the_ranks_that_there_are(
    tmp_path: Path, staleness: str
) -> None:
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(contextlib.closing(Servers(2)))
        workers = stack.enter_context(
            contextlib.closing(Workers(servers.addresses, 2))
        )
        join = in_thread(lambda: feed(workers))
        words = (str(job.__file__), servers.text, str(tmp_path))
        words = (*words, ",".join(workers.addresses), staleness)
        some = stack.enter_context(machines(tmp_path, *words))
        some.two_three_one()
        join()
        log = (tmp_path / "log").read_text()
        assert counted(servers) == job.expected(), log
        assert starts(log)[-1] == 1 and 3 in starts(log), log


def test_the_command_continues_with_other_ranks(tmp_path: Path) -> None:
    """SIGTERM ends two ranks after the same step; one trains the rest of the
    file."""
    data = tmp_path / "clicks.csv"
    lines = [f"{i % 2},u{i % 997},{i / 7}" for i in range(40_000)]
    data.write_text("\n".join(["label,C1,I1", *lines]))
    words = ["-m", "persia", "train", str(data), "--label", "label"]
    words += ["--batch-size", "20", "--dim", "2", "--threads", "1"]
    words += ["--eval-split", "0.01", "--dense-every", "5"]
    with contextlib.closing(Servers(2)) as servers:
        words += ["--servers", servers.text]
        command = [python(), "-m", "torch.distributed.run"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command += ["--rdzv-id", uuid.uuid4().hex, "--max-restarts", "1"]
        env = environment(
            uuid.uuid4().hex,
            OMP_NUM_THREADS="1",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        with subprocess.Popen(
            [*command, "--nproc-per-node", "2", *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as first:
            assert first.stderr is not None
            while "epoch 1, batch" not in first.stderr.readline():
                assert first.poll() is None
            first.send_signal(signal.SIGTERM)
            out, err = first.communicate(timeout=90)
        stopped = re.search(r"^step (\d+):", out, re.M)
        assert stopped, out + err
        done = subprocess.run(
            [*command, "--nproc-per-node", "1", *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    step = int(stopped[1])
    assert f"step {step:,}" in done.stdout, done.stdout
    assert re.search(r"rows\D+997\D", done.stdout), done.stdout


def test_the_script_of_the_page(tmp_path: Path) -> None:
    (script,) = blocks(DOCS / "howto/ranks.md", "python")
    path = tmp_path / "elastic.py"
    path.write_text(script.text)
    with contextlib.closing(Servers(2)) as servers:
        with machines(tmp_path, str(path)) as two:
            more = {"PERSIA_SERVERS": servers.text}
            two.start(**more)
            two.start(**more)
            assert [one.wait(120) for one in two.agents] == [0, 0]
        channel = servers.shards[0].channel(10.0)
        assert channel.stats()["pushes"] == 80  # batches of 512
        channel.close()
