"""The very commands of the containers of the overlay for one machine, as
processes: with their arguments, their environment and their files."""

from __future__ import annotations

import contextlib
import csv
import random
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from persia import _core
from persia.distributed import write_certificates
from tests.deploy.manifests import Object, Pods, job_of, of_kind, pods, render
from tests.ready import python
from tests.system.processes import environment, wait_until
from tests.system.shards import free_port

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

#: What the entry of the image, and a command in it, are here.
PROGRAMS = {
    "persia": ["-m", "persia"],
    "torchrun": ["-m", "torch.distributed.run"],
}
#: Secret, key -> file of `persia certs`: as the guide makes them.
SECRETS = {
    ("persia-tls", "ca.crt"): "ca.pem",
    ("persia-tls", "tls.crt"): "server.pem",
    ("persia-tls", "tls.key"): "server-key.pem",
    ("persia-tokens", "token"): "token",
    ("persia-tokens", "admin-token"): "admin-token",
}
#: Variables that are addresses of pods.
ADDRESSES = (
    "PERSIA_SERVERS",
    "PERSIA_WORKERS",
    "PERSIA_SERVE_PS_JOIN",
    "PET_RDZV_ENDPOINT",
)
ROWS = 4096


def links(objects: list[Object]) -> dict[str, str]:
    """What Kubernetes would set with enableServiceLinks, and worse: for
    services that have the names of options."""
    names = [o["metadata"]["name"] for o in of_kind(objects, "Service")]
    made = {}
    for name in (*names, "persia-serve-ps", "persia-train", "persia"):
        prefix = name.upper().replace("-", "_")
        made[f"{prefix}_PORT"] = "tcp://10.0.0.1:8888"
        made[f"{prefix}_PORT_8888_TCP"] = "tcp://10.0.0.1:8888"
        made[f"{prefix}_PORT_8888_TCP_ADDR"] = "10.0.0.1"
        made[f"{prefix}_SERVICE_HOST"] = "10.0.0.1"
        made[f"{prefix}_SERVICE_PORT"] = "8888"
    return made


def has_torch(which: Pods) -> bool:
    """Whether its image has."""
    return not which.container["image"].startswith("persia-ps:")


class Machine:
    """Runs pods as processes.

    Args:
        folder: of their files.
        job: the data of the ConfigMap.
        services: variables for services.
        hosts: addresses of pods.
    """

    def __init__(
        self,
        folder: Path,
        job: dict[str, str],
        services: dict[str, str],
        hosts: Sequence[str] = ("127.0.0.1",),
    ) -> None:
        self._folder = folder
        self._job = job
        self._services = services
        self._ports: dict[tuple[str, int], int] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        keys = folder / "keys"
        write_certificates(keys, list(hosts))
        for (secret, key), name in SECRETS.items():
            (folder / secret).mkdir(exist_ok=True)
            (folder / secret / key).symlink_to(keys / name)
        (folder / "persia-shared").mkdir()
        # The image of servers and workers has none.
        (folder / "torch.py").write_text("raise ImportError('no torch')\n")

    def host(self, pod: str) -> str:
        """The address of a pod here."""
        return "127.0.0.1"

    def port(self, pod: str, wanted: int) -> int:
        """That a container's port is here."""
        if (pod, wanted) not in self._ports:
            self._ports[pod, wanted] = free_port()
        return self._ports[pod, wanted]

    def start(self, which: Pods, ordinal: int = 0, *more: str) -> None:
        """One pod of them, with more arguments."""
        pod = f"{which.name}-{ordinal}"
        self._make_folders(which, pod)
        # Kubernetes writes the values of variables into arguments.
        words = [
            re.sub(r"\$\((\w+)\)", lambda m: self._job[m[1]], word)
            for word in which.container["args"]
        ]
        words = [*(self._here(which, pod, word) for word in words), *more]
        program = which.container.get("command", ["persia"])
        assert len(program) == 1
        interpreter = python() if has_torch(which) else sys.executable
        with open(self._folder / f"{pod}.log", "ab") as log:
            self._started[pod] = subprocess.Popen(
                [interpreter, *PROGRAMS[program[0]], *words],
                env=self._environment(which, pod),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _make_folders(self, which: Pods, pod: str) -> None:
        """Of its volumes."""
        for volume in which.volumes.values():
            self._place(pod, volume).mkdir(parents=True, exist_ok=True)

    def _place(self, pod: str, volume: Object) -> Path:
        """The folder that a volume is."""
        if "secret" in volume:
            return self._folder / str(volume["secret"]["secretName"])
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            return self._folder / str(name)
        own = volume["own"]["metadata"] if "own" in volume else volume
        return self._folder / f"{pod}-{own['name']}"

    def _here(self, which: Pods, pod: str, text: str) -> str:
        """With folders, addresses and ports of this machine."""
        folders = {
            path: str(self._place(pod, which.volumes[name]))
            for name, path in which.mounts.items()
        }
        paths = "|".join(map(re.escape, folders))
        mounted = rf"(?<=[=])({paths})(?=/|$)|^({paths})(?=/|$)"
        text = re.sub(mounted, lambda m: folders[m[0]], text)
        for port in which.ports.values():
            if text.endswith(f"={port}"):
                mapped = self.port(pod, port)
                text = text.removesuffix(str(port)) + str(mapped)
        return text.replace("=0.0.0.0", f"={self.host(pod)}")

    def _environment(self, which: Pods, pod: str) -> dict[str, str]:
        made = environment(**self._services)
        for source in which.container.get("envFrom", []):
            assert source == {"configMapRef": {"name": "persia-job"}}
            made |= {
                name: self._here(which, pod, value)
                if value.startswith("/shared/")
                else value
                for name, value in self._job.items()
            }
        for entry in which.container.get("env", []):
            made[entry["name"]] = self._value(which, pod, entry)
        for name in ADDRESSES:
            if name in made:
                made[name] = self._addresses(made[name])
        if not has_torch(which):
            made["PYTHONPATH"] = f"{self._folder}:{made['PYTHONPATH']}"
        return made | {"OMP_NUM_THREADS": "1"}

    def _value(self, which: Pods, pod: str, entry: Object) -> str:
        if "valueFrom" in entry:
            if source := entry["valueFrom"].get("configMapKeyRef"):
                return self._job[source["key"]]
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            return {"metadata.name": pod}.get(path, "0")
        value = str(entry["value"])
        if entry["name"] == "PET_MASTER_ADDR":
            # The first pod of the JobSet, and its subdomain.
            assert value == f"{which.name}-{which.role}-0-0.{which.name}"
            return self.host(pod)
        if value.isdecimal() and int(value) in which.ports.values():
            return str(self.port(pod, int(value)))
        if value == "0.0.0.0":
            return self.host(pod)
        return self._here(which, pod, value)

    def _addresses(self, text: str) -> str:
        """Of pods by their names: persia-ps-0.persia-ps.persia.svc:8888."""
        found = []
        for address in text.split(","):
            name, port = address.split(":")
            pod = name.split(".")[0]
            found.append(f"{self.host(pod)}:{self.port(pod, int(port))}")
        return ",".join(found)

    def _url(self, which: Pods, ordinal: int, path: str) -> str:
        """Of a page beside its metrics."""
        pod = f"{which.name}-{ordinal}"
        port = self.port(pod, which.ports["metrics"])
        return f"http://{self.host(pod)}:{port}{path}"

    def ask(self, which: Pods, probe: str, ordinal: int = 0) -> int:
        """The status that a probe gets; 0: nothing listens."""
        asked = which.container[probe]["httpGet"]
        assert asked["port"] == "metrics"
        url = self._url(which, ordinal, asked["path"])
        try:
            with urllib.request.urlopen(url) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return int(error.code)
        except OSError:
            return 0

    def until(
        self, which: Pods, probe: str, status: int, ordinal: int = 0
    ) -> None:
        """Waits until a probe gets a status."""

        def answered() -> bool:
            ended = self._started[f"{which.name}-{ordinal}"].poll()
            assert ended is None, self.output(which, ordinal)
            return self.ask(which, probe, ordinal) == status

        wait_until(answered, 120)

    def gauges(self, which: Pods, ordinal: int = 0) -> set[str]:
        """Names and labels on its page; none before there is one."""
        return set(self.values(which, ordinal))

    def values(self, which: Pods, ordinal: int = 0) -> dict[str, float]:
        """The gauges with their values."""
        url = self._url(which, ordinal, "/metrics")
        try:
            page = urllib.request.urlopen(url)
        except OSError:
            ended = self._started[f"{which.name}-{ordinal}"].poll()
            assert ended is None, self.output(which, ordinal)
            return {}
        with page:
            lines = str(page.read(), "utf-8").splitlines()
        found = [line.rpartition(" ") for line in lines if line[0] != "#"]
        return {name: float(value) for name, _, value in found}

    def ends(self, which: Pods, ordinal: int = 0) -> None:
        """Waits until the process has ended by itself, with status 0."""
        done = self._started.pop(f"{which.name}-{ordinal}")
        assert done.wait(timeout=300) == 0, self.output(which, ordinal)

    def stop(self, which: Pods, ordinal: int = 0) -> None:
        """As Kubernetes does."""
        pod = f"{which.name}-{ordinal}"
        self._started[pod].send_signal(signal.SIGTERM)
        self.ends(which, ordinal)

    def runs(self, which: Pods, ordinal: int) -> bool:
        return f"{which.name}-{ordinal}" in self._started

    def end(self, which: Pods, ordinal: int) -> int:
        """SIGTERM, which may find it at its start; its status."""
        process = self._started.pop(f"{which.name}-{ordinal}")
        process.terminate()
        return process.wait(timeout=100)

    def output(self, which: Pods, ordinal: int = 0) -> str:
        return (self._folder / f"{which.name}-{ordinal}.log").read_text()

    def kill(self, *some: str) -> None:
        """kill -9 of these pods, or of all."""
        for pod in some or list(self._started):
            process = self._started.pop(pod)
            process.kill()
            process.wait()


@contextlib.contextmanager
def machine(*how: Any) -> Iterator[Machine]:
    made = Machine(*how)
    try:
        yield made
    finally:
        made.kill()


def write_clicks(path: Path) -> str:
    """A small log of clicks."""
    some = random.Random(3)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "user", "item", "price"])
        for _ in range(ROWS):
            user, item = some.randrange(50), some.randrange(80)
            label = int(some.random() < (0.8 if user % 2 else 0.2))
            row = (label, f"u{user}", f"i{item}", some.random())
            writer.writerow(row)
    return str(path)


def scaled_by(service: str) -> set[str]:
    """The gauges that KEDA reads there."""
    return {
        trigger["metadata"]["valueLocation"]
        for made in of_kind(render("overlays/gke"), "ScaledObject")
        for trigger in made["spec"]["triggers"]
        if f"//{service}." in trigger["metadata"]["url"]
    }


def test_four_roles_train_and_serve_by_the_manifests(tmp_path: Path) -> None:
    objects = render("overlays/local")
    served = render("overlays/serving-local")
    roles = {p.role: p for p in (*pods(objects), *pods(served))}
    data = write_clicks(tmp_path / "clicks.csv")
    job = job_of(objects) | {  # as the guide has users edit it
        "PERSIA_FEED_DATA": data,
        "PERSIA_TRAIN_DATA": data,
        "PERSIA_FEED_BATCH_SIZE": "128",
        "PERSIA_TRAIN_BATCH_SIZE": "128",
    }
    ps, worker, serving = roles["ps"], roles["worker"], roles["serving"]
    loader, trainer = roles["loader"], roles["trainer"]
    with machine(tmp_path, job, links([*objects, *served])) as here:
        here.start(worker)
        here.until(worker, "livenessProbe", 200)
        assert here.ask(worker, "readinessProbe") == 503
        here.start(ps)
        for role in (ps, worker):
            here.until(role, "livenessProbe", 200)
            here.until(role, "readinessProbe", 200)
        here.start(trainer)
        lost = 'persia_updates_lost_total{rank="0"}'
        wait_until(lambda: lost in here.gauges(trainer), 120)
        here.start(loader)
        here.until(loader, "livenessProbe", 200)
        here.ends(trainer)
        here.ends(loader)
        wait_until(lambda: scaled_by("persia-worker") <= here.gauges(worker))
        here.start(serving)
        here.until(serving, "readinessProbe", 200)
        for role in (serving, worker, ps):
            here.stop(role)
    shared = tmp_path / "persia-shared"
    assert list((shared / "checkpoints" / "clicks").glob("step-*"))
    assert list((shared / "exports" / "clicks").glob("v-*"))
    assert any(Path(tmp_path / "persia-ps-0-log").rglob("*"))


def test_a_second_server_joins_by_the_manifests(tmp_path: Path) -> None:
    """Pods behind the first ones have no shard until some move there."""
    objects = render("overlays/local")
    (ps,) = (p for p in pods(objects) if p.role == "ps")
    job = job_of(objects)
    with machine(tmp_path, job, links(objects)) as here:
        here.start(ps)
        here.until(ps, "readinessProbe", 200)
        here.start(ps, 1)
        here.until(ps, "readinessProbe", 200, 1)
        for ordinal in (1, 0):
            here.stop(ps, ordinal)
