"""The manifests of deploy/, as kubectl renders them."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"

#: What is applied: of each a folder of deploy/.
APPLIED = (
    "overlays/local",
    "overlays/gke",
    "overlays/gke-spot",
    "overlays/gke-trainjob",
    "overlays/gke-elastic",
    "serving",
    "overlays/serving-local",
    "overlays/serving-gke",
    "gate",
)

Object = dict[str, Any]


@functools.cache
def render(folder: str) -> list[Object]:
    """The objects of a folder of :data:`APPLIED`, or of one at another path;
    none changes them."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: it renders the manifests")
    done = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [o for o in yaml.load_all(done.stdout, loader) if o]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


@dataclasses.dataclass(frozen=True)
class Pods:
    """The pods of an object, which have one container.

    Attributes:
        owner: the object.
        template: of its pods.
        replicas: how many there are; None: an autoscaler says it.
    """

    owner: Object
    template: Object
    replicas: int | None

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def role(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> Object:
        return dict(self.template["spec"])

    @property
    def container(self) -> Object:
        (only,) = self.spec["containers"]
        return dict(only)

    @property
    def ports(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for p in self.container["ports"]}

    @property
    def mounts(self) -> dict[str, str]:
        """Name of a volume -> where it is."""
        return {
            m["name"]: m["mountPath"] for m in self.container["volumeMounts"]
        }

    @property
    def volumes(self) -> dict[str, Object]:
        claims = self.owner["spec"].get("volumeClaimTemplates", [])
        made = {c["metadata"]["name"]: {"own": c} for c in claims}
        return made | {v["name"]: v for v in self.spec["volumes"]}

    @property
    def options(self) -> dict[str, str]:
        """Flags of the command -> their values; "" of a switch."""
        words = [a for a in self.container["args"] if a.startswith("--")]
        return {w.partition("=")[0]: w.partition("=")[2] for w in words}


def jobs_of(made: Object) -> list[Object]:
    """Of a JobSet, or of the one that a TrainingRuntime makes."""
    spec: Object = made["spec"]
    if made["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return list(spec["replicatedJobs"])


def pods(objects: list[Object]) -> Iterator[Pods]:
    """Those of all objects that have pods."""
    for made in objects:
        spec = made.get("spec", {})
        if made["kind"] in ("JobSet", "TrainingRuntime"):
            for job in jobs_of(made):
                inner = job["template"]["spec"]
                yield Pods(made, inner["template"], inner.get("parallelism"))
        elif "template" in spec:
            count = spec.get("replicas", spec.get("parallelism"))
            yield Pods(made, spec["template"], count)


def job_of(objects: list[Object]) -> dict[str, str]:
    """The data of the ConfigMap of the job; empty where there is none."""
    maps = of_kind(objects, "ConfigMap")
    return dict(maps[0]["data"]) if maps else {}
