"""Jobs on two machines: with the tables on the ranks, and four roles.

Two network namespaces stand in for the machines: each has a loopback
interface of its own, and a link to the other.  Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.system import ranks, roles_ranks
from tests.system.processes import environment
from tests.system.test_ranks import launch, same

PORT = 29500


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """(name, address) of two that reach each other."""
    if shutil.which("ip") is None:
        pytest.skip("no iproute2: network namespaces are made with ip")
    names = [f"persia-{os.getpid()}-{i}" for i in range(2)]
    links = [f"pv{os.getpid()}-{i}" for i in range(2)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", links[0], "type", "veth", "peer", links[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        found = []
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            address = f"10.231.77.{i + 1}"
            ip("link", "set", link, "netns", name, "name", "link0")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            found.append((name, address))
        yield found
    finally:
        for name in made:
            ip("netns", "del", name)


def begin(
    host: str, *command: str, secret: str = "plum", **more: str
) -> subprocess.Popen[str]:
    """A Python process on a machine."""
    if secret:
        more |= {"PERSIA_JOB_SECRET": secret}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *command],
        env=environment(
            OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="link0", **more
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rank_of(hosts: list[tuple[str, str]], rank: int) -> dict[str, str]:
    """The variables of the only rank of a machine, as torchrun sets them."""
    return {
        "GROUP_RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts[0][1],
        "MASTER_PORT": str(PORT),
        "RANK": str(rank),
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": str(len(hosts)),
    }


def serve(
    stack: contextlib.ExitStack, host: tuple[str, str], role: str, *more: str
) -> str:
    """A server or worker on a machine; its address."""
    flags = ["--host", host[1], "--port", "0", "--insecure", *more]
    command = ("-m", "persia", "serve", role, *flags)
    process = begin(host[0], *command, PERSIA_INSECURE="1")
    stack.callback(process.communicate)
    stack.callback(process.kill)
    assert process.stdout is not None
    lines = []
    while not (lines and lines[-1].startswith("serving ")):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    found = re.search(r" on (\S+)$", lines[-1])
    assert found
    return found[1]


def test_four_roles_on_two_hosts(
    hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    """On each a server, a worker and a rank, on the second the loader: the
    bits of tables that are on the ranks."""
    with contextlib.ExitStack() as stack:
        servers = ",".join(
            serve(stack, host, "ps", "--shard", f"{i}/2")
            for i, host in enumerate(hosts)
        )
        workers = ",".join(
            serve(stack, host, "worker", "--servers", servers)
            for host in hosts
        )
        file = str(roles_ranks.__file__)
        command = (file, "feed", "pooled", workers)
        jobs = [begin(hosts[1][0], *command, PERSIA_INSECURE="1")]
        for i, (name, _) in enumerate(hosts):
            command = [file, str(tmp_path)]
            command += [f"four=pooled|{servers}|{workers}"]
            command += ["ranks=pooled|ranks|"]
            more = {"PERSIA_INSECURE": "1", **rank_of(hosts, i)}
            jobs.append(begin(name, *command, **more))
        for job in jobs:
            stack.callback(job.kill)
        for job in jobs:
            text, _ = job.communicate(timeout=120)
            assert job.returncode == 0, text
    for rank in range(2):
        four, want = (
            torch.load(tmp_path / f"{name}.{rank}.pt")
            for name in ("four", "ranks")
        )
        assert len(four["losses"]) == roles_ranks.BATCHES
        assert same(four, want)


def run_on_both(
    hosts: list[tuple[str, str]], *words: str, secret: str
) -> list[tuple[int, str]]:
    """The status and output of a rank on each machine."""
    jobs = [
        begin(name, *words, secret=secret, **rank_of(hosts, i))
        for i, (name, _) in enumerate(hosts)
    ]
    try:
        texts = [job.communicate(timeout=120)[0] for job in jobs]
        return [(j.returncode, t) for j, t in zip(jobs, texts, strict=True)]
    finally:
        for job in jobs:
            job.kill()


def test_a_job_on_two_hosts_gives_the_bits_of_one(
    hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    words = [ranks.__file__, str(tmp_path), "train", "hybrid"]
    for status, text in run_on_both(hosts, *words, secret="plum"):
        assert status == 0, text
    alone = launch(tmp_path / "alone", "train")["train"]
    for rank in range(2):
        trained = torch.load(tmp_path / f"train.{rank}.pt")
        assert same(trained, alone[rank])
        counted = torch.load(tmp_path / f"hybrid.{rank}.pt")
        assert counted["value"] == 100


def test_a_job_on_two_hosts_without_a_secret_is_refused(
    hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    for status, text in run_on_both(
        hosts, ranks.__file__, str(tmp_path), "train", secret=""
    ):
        assert status and "PERSIA_JOB_SECRET" in text
    assert not list(tmp_path.iterdir())
