"""All roles of a job on a cluster of Ray: an actor starts each process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from persia.base.requirements import library
from persia.distributed.launch import reserve
from persia.errors import Unavailable

_PERSIA = (sys.executable, "-m", "persia")
_ALL = "0.0.0.0"  # where a process listens
_GRACE = 60.0  # seconds that a process has to end


class Role:
    """One process, on the node of its actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None

    def address(self) -> str:
        """Of this node, with a port that is kept for the process."""
        ray = library("ray", "ray", "jobs on a cluster of Ray")
        self._held = reserve(_ALL)
        port = self._held.getsockname()[1]
        return f"{ray.util.get_node_ip_address()}:{port}"

    def run(self, words: Sequence[str], env: Mapping[str, str]) -> int:
        """The exit status, once it has ended."""
        self._process = subprocess.Popen(words, env={**os.environ, **env})
        return self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that does not end it."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run_on_ray(
    job: Sequence[str],
    *,
    servers: int = 1,
    embedding_workers: int = 0,
    loaders: int = 0,
    env: Mapping[str, str] | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> int:
    """Runs a command on a cluster of Ray, with servers and other roles beside
    it; they end when it ends.

    ``ray.init()`` was called, and Persia is installed on all nodes. Options of
    the roles are variables, such as PERSIA_FEED_DATA; other machines reach
    them by TLS and a token, as always. Ray restarts none of them, and moves no
    rows: a role that fails ends the job.

    Args:
        job: the command and its arguments, such as ``["python", "train.py"]``.
            It gets PERSIA_SERVERS and PERSIA_WORKERS.
        servers: parameter servers.
        embedding_workers: of the job; 0: the command reads its data itself.
        loaders: data loaders, each of which sends its share.
        env: variables for all processes.
        cpus: processors that Ray reserves for each process.
        gpus: devices that it reserves for the command.

    Returns:
        The exit status of the command.

    Raises:
        InvalidArgument: Ray is not installed.
        Unavailable: another role ended before the command.
    """
    ray = library("ray", "ray", "jobs on a cluster of Ray")

    def make(count: int, gpus: float = 0.0) -> list[Any]:
        actor = ray.remote(Role).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=2,
            scheduling_strategy="SPREAD",
        )
        return [actor.remote() for _ in range(count)]

    ps, workers, senders = map(make, (servers, embedding_workers, loaders))
    (main,) = make(1, gpus)
    at: dict[Any, str] = dict(
        zip(ps + workers, _get(ray, "address", ps + workers), strict=True)
    )
    known = {
        "PERSIA_SERVERS": ",".join(at[one] for one in ps),
        "PERSIA_WORKERS": ",".join(at[one] for one in workers),
    } | dict(env or {})
    commands: list[tuple[Any, list[str]]] = [
        (one, [*_listening("ps", at[one]), "--shard", f"{i}/{servers}"])
        for i, one in enumerate(ps)
    ]
    sending = ["--loaders", str(loaders or 1)]
    commands += [
        (one, _listening("worker", at[one]) + sending) for one in workers
    ]
    commands += [
        (one, [*_PERSIA, "feed", "--loader", f"{i}/{loaders}"])
        for i, one in enumerate(senders)
    ]
    ends = {one.run.remote(words, known): one for one, words in commands}
    end = main.run.remote(list(job), known)
    try:
        return _wait(ray, end, ends, senders)
    finally:
        for some in ([main], senders, workers, ps):
            _get(ray, "stop", some)


def _get(ray: Any, method: str, roles: Sequence[Any]) -> list[Any]:
    called = [getattr(one, method).remote() for one in roles]
    return list(ray.get(called))


def _listening(what: str, address: str) -> list[str]:
    port = address.rpartition(":")[2]
    return [*_PERSIA, "serve", what, "--host", _ALL, "--port", port]


def _wait(
    ray: Any, end: Any, ends: Mapping[Any, Any], senders: Sequence[Any]
) -> int:
    """Until the command has ended."""
    left = [end, *ends]
    while True:
        (done,), left = ray.wait(left)
        status = int(ray.get(done))
        if done is end:
            return status
        if status or ends[done] not in senders:
            raise Unavailable(
                f"a process of the job ended with status {status} before the "
                "job's command"
            )
