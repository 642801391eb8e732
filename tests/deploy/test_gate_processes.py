"""``persia gate`` with the processes of the manifests: servers grow and shrink
while one trains, and some processes are killed."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import _core
from tests.deploy.cluster import Cluster, StatefulSets
from tests.deploy.manifests import Object, Pods, job_of, of_kind, pods, render
from tests.deploy.test_commands import Machine, links, scaled_by
from tests.system.processes import wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

IDS = torch.arange(100)


class Nodes(Machine):
    """Each server has an address of its own, and the ports of its manifest."""

    def __init__(self, *how: Any) -> None:
        self.net = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
        super().__init__(*how, hosts=[self.host(f"-{i}") for i in range(5)])

    def host(self, pod: str) -> str:
        if pod.startswith("persia-gate"):
            return super().host(pod)
        return f"{self.net}.{pod.rpartition('-')[2]}"

    def port(self, pod: str, wanted: int) -> int:
        if pod.startswith("persia-gate"):
            return super().port(pod, wanted)
        return wanted

    def freeze(self, pod: str, seconds: float) -> None:
        """It is there, and does nothing."""
        process = self._started[pod]
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    def end(self, which: Pods, ordinal: int) -> int:
        status = super().end(which, ordinal)
        assert status in (0, 143), self.output(which, ordinal)
        return status


class Job:
    """A gate, the servers that it starts, and one that trains on a
    thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        objects = render("overlays/gke")
        roles = {p.role: p for p in pods(objects)}
        self.ps, self.gate = roles["ps"], roles["gate"]
        job = job_of(objects) | {
            "PERSIA_SERVE_PS_CHECKPOINTS": str(folder / "checkpoints"),
            "PERSIA_SERVE_PS_THREADS": "1",
        }
        self.nodes = Nodes(folder, job, links(objects))
        keys = folder / "keys"
        monkeypatch.setenv("PERSIA_TLS_CA", str(keys / "ca.pem"))
        monkeypatch.setenv("PERSIA_TOKEN_FILE", str(keys / "token"))
        admin = str(keys / "admin-token")
        monkeypatch.setenv("PERSIA_ADMIN_TOKEN_FILE", admin)
        self.cluster = self._make_cluster(objects, folder)
        self.cluster.add("scalegates", self._gate(objects))
        (target,) = (
            o
            for o in of_kind(objects, "StatefulSet")
            if o["metadata"]["name"] == "persia-ps"
        )
        spec = target["spec"] | {"replicas": 1}  # as where it is left out
        self.cluster.add("statefulsets", target | {"spec": spec})
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._controller = self._make_controller()
        self._threads: list[threading.Thread] = []
        self._store: persia.Store | None = None
        self._times = 0

    def _make_cluster(self, objects: list[Object], folder: Path) -> Any:
        (crd,) = of_kind(render("gate"), "CustomResourceDefinition")
        (role,) = of_kind(objects, "Role")
        made = Cluster([crd], role)
        self.gate_url = made.url
        return made

    def _make_controller(self) -> Any:
        return StatefulSets(
            self.cluster,
            "persia-ps",
            lambda ordinal: self.nodes.start(self.ps, ordinal),
            lambda ordinal: self.nodes.end(self.ps, ordinal),
        )

    def begin(self) -> None:
        """All of them run."""
        self._begin(self._control)
        self.start_gate()
        for ordinal in range(2):
            self.until(partial(self.nodes.runs, self.ps, ordinal))
            self.nodes.until(self.ps, "readinessProbe", 200, ordinal)
        self._store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=[f"{self.nodes.net}.{i}:8888" for i in range(2)],
            job="counted",
            timeout=120.0,
        )
        self._bags = persia.EmbeddingBagCollection(
            store=self._store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=2, feature_names=["f"], init=0.0
                )
            ],
        )
        self._add()
        # So that a move takes a while.
        more = torch.arange(1_000, 200_000)
        self._store.set_rows("t", more, torch.ones(len(more), 2))
        self._begin(self._add)

    def until(self, so: Callable[[], bool], seconds: float = 100) -> None:
        """Waits, unless a thread fails."""
        wait_until(lambda: self._errors or so(), seconds)
        assert not self._errors, self._errors

    def _gate(self, objects: list[Object]) -> Object:
        (gate,) = of_kind(objects, "ScaleGate")
        address = f"{self.nodes.net}.{{ordinal}}:8888"
        return gate | {"spec": gate["spec"] | {"address": address}}

    def _begin(self, body: Callable[[], None]) -> None:
        def run() -> None:
            try:
                while not self._over.is_set():
                    body()
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _control(self) -> None:
        with self._lock:
            self._controller.step()
        time.sleep(0.1)

    def _add(self) -> None:
        batch = persia.JaggedBatch(["f"], IDS)
        (-self._bags(batch).values().sum()).backward()
        assert self._store is not None
        self._store.flush()
        self._times += 1

    def start_gate(self, ordinal: int = 0) -> None:
        self.nodes.start(
            self.gate,
            ordinal,
            *("--api", self.gate_url, "--namespace", "persia"),
            *("--interval", "0.1"),
        )

    def kill(self, which: Pods, ordinal: int = 0) -> None:
        """kill -9; it starts again, as on Kubernetes."""
        with self._lock:
            if self.nodes.runs(which, ordinal):
                self.nodes.kill(f"{which.name}-{ordinal}")
                if which is self.gate:
                    self.start_gate(ordinal)
                else:
                    self.nodes.start(which, ordinal)

    def freeze(self, ordinal: int, seconds: float) -> None:
        with self._lock:
            if self.nodes.runs(self.ps, ordinal):
                self.nodes.freeze(f"persia-ps-{ordinal}", seconds)

    def want(self, replicas: int) -> None:
        self.cluster.scale("scalegates", "persia-ps", replicas)

    @property
    def status(self) -> Object:
        made = self.cluster.get("scalegates", "persia-ps")
        return dict(made.get("status", {}))

    def settle(self, replicas: int) -> None:
        """Until there are so many servers, and their shards are even."""

        def is_so() -> bool:
            status = self.status
            return (
                status.get("phase") == "Steady"
                and status["replicas"] == replicas
            )

        try:
            self.until(is_so, 400)
        except AssertionError as error:
            error.add_note(f"{replicas} wanted: {self.status}")
            raise

    def check(self) -> None:
        """Each update was applied once."""
        before = self._times
        self.until(lambda: self._times > before + 2)
        self._end()
        assert not self._errors, self._errors
        assert self._store is not None
        rows = torch.as_tensor(self._store.rows("t", IDS.tolist())[:, 0])
        assert rows.tolist() == [self._times] * len(IDS)

    def _end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self._end()
        if self._store is not None:
            self._store.close()
        self.nodes.kill()
        self.cluster.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path, monkeypatch)) as made:
        made.begin()
        yield made


@pytest.mark.timeout(1000)
def test_servers_grow_and_shrink_while_one_trains(job: Job) -> None:
    job.start_gate(1)  # two gates
    for replicas in (4, 2):
        job.want(replicas)
        job.settle(replicas)
    job.check()
    load = scaled_by("persia-gate")
    assert load
    job.until(lambda: load <= job.nodes.gauges(job.gate))
    job.nodes.stop(job.gate)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_kills(job: Job, seed: int) -> None:
    """kill -9 of a gate, of a server that has a shard, and of one that gets
    it, at any moment; servers that freeze, an API server that fails."""
    some = random.Random(seed)
    for replicas in (4, 2, 3, 2):
        job.want(replicas)
        for _ in range(some.randrange(1, 4)):
            time.sleep(some.random() * 2)
            what = some.random()
            if what < 0.3:
                job.kill(job.gate)
            elif what < 0.8:
                job.kill(job.ps, some.randrange(4))
            elif what < 0.9:
                job.freeze(some.randrange(4), 2 * some.random())
            else:
                job.cluster.faults.extend([500, 409, None, "hang", 410])
        job.settle(replicas)
    job.check()
