"""Slurm on this machine: a controller and nodes that are processes of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.system.processes import wait_until
from tests.system.shards import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
_CONF = """
ClusterName=persia
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    "CPUs=64 RealMemory=1000000 State=UNKNOWN\n"
)


def installed() -> bool:
    """Whether it can run: all of it is here, and this is root."""
    found = all(shutil.which(name, path=_path()) for name in PROGRAMS)
    return found and os.geteuid() == 0


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextlib.contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[dict[str, str]]:
    """What its commands need in the environment; a component of a job takes a
    node."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    names = [f"n{i}" for i in range(nodes)]
    conf = folder / "slurm.conf"
    text = _CONF.format(host=host, port=free_port(), folder=folder)
    for name in names:
        (folder / f"spool.{name}").mkdir()
        text += _NODE.format(name=name, host=host, port=free_port())
    conf.write_text(text)
    env = {"SLURM_CONF": str(conf), "PATH": _path()}
    at = [
        f"--{what}={folder}/munge.{end}"
        for what, end in (
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]
    processes = []

    def start(*words: str) -> None:
        with (folder / f"{words[0]}.out").open("a") as output:
            processes.append(
                subprocess.Popen(
                    words,
                    env=os.environ | env,
                    stdout=output,
                    stderr=output,
                )
            )

    def idle() -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%t %D"],
            env=os.environ | env,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip() == f"idle {nodes}"

    try:
        start("munged", "--foreground", "--force", *at)
        wait_until((folder / "munge.socket").exists)
        start("slurmctld", "-D")
        for name in names:
            start("slurmd", "-D", "-N", name)
        wait_until(idle)
        yield env
    finally:
        _end(processes, env)


def _end(
    processes: list[subprocess.Popen[bytes]], env: dict[str, str]
) -> None:
    """Jobs first: their processes are no children of these."""
    subprocess.run(["scancel", "--user=root"], env=os.environ | env)
    until = time.monotonic() + 30
    while (
        time.monotonic() < until
        and subprocess.run(
            ["squeue", "--noheader"], env=os.environ | env, capture_output=True
        ).stdout.strip()
    ):
        time.sleep(0.2)
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
