"""The manifests and the gate with a real API server of Kubernetes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.cluster import Refused
from tests.deploy.manifests import Object, of_kind, render
from tests.deploy.real import PROGRAMS, Kubelet, Real, real
from tests.deploy.test_gate_processes import Job
from tests.system.processes import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

FOLDERS = ("overlays/local", "overlays/gke-spot", "serving", "overlays/gke")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """With the kind, the policy, and an overlay."""
    with real(tmp_path_factory.mktemp("real") / "cluster") as made:
        made.apply(render("gate"))
        wait_until(lambda: knows_gates(made), 30)
        made.apply(render("overlays/gke"))
        yield made


class RealJob(Job):
    """Its StatefulSet is a real one, and the gate has only its rights."""

    def _make_cluster(self, objects: list[Object], folder: Path) -> Real:
        made = Real(folder / "cluster")
        made.apply(render("gate"))
        wait_until(lambda: knows_gates(made), 30)
        made.controllers()
        kinds = "Namespace", "ServiceAccount", "Role", "RoleBinding"
        made.apply(of_kind(objects, *kinds))
        self.gate_url = made.proxy("persia-gate")
        return made

    def _make_controller(self) -> Kubelet:
        return Kubelet(
            self.cluster,
            "ps",
            lambda ordinal: self.nodes.start(self.ps, ordinal),
            lambda ordinal: self.nodes.end(self.ps, ordinal),
            lambda ordinal: (
                self.nodes.ask(self.ps, "readinessProbe", ordinal) == 200
            ),
        )


def test_servers_grow_and_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one trains."""
    if not PROGRAMS:
        pytest.skip("PERSIA_TEST_KUBERNETES names no folder")
    with contextlib.closing(RealJob(tmp_path, monkeypatch)) as job:
        job.begin()
        job.start_gate(1)
        for replicas in (4, 2, 3, 2):
            job.want(replicas)
            job.settle(replicas)
        job.check()


def knows_gates(made: Real) -> bool:
    done = made.kubectl("get", "scalegates")
    return done.returncode == 0


def change(here: Real, **spec: object) -> Object:
    return here.ask("PATCH", "scalegates", "persia-ps", {"spec": spec})["spec"]


@pytest.mark.parametrize("overlay", FOLDERS)
def test_all_fields_are_known(overlay: str, here: Real) -> None:
    objects = render(overlay)
    here.kubectl("delete", "statefulsets", "--all")
    here.apply(objects)


def test_the_schema(here: Real) -> None:
    spec = change(here)
    assert (spec["min"], spec["max"], spec["paused"]) == (2, 8, False)
    here.scale("scalegates", "persia-ps", 3)
    found = here.ask("GET", "scalegates/scale", "persia-ps")
    assert found["spec"]["replicas"] == 3
    assert "misspelt" not in change(here, misspelt=3)
    for wrong in (
        {"replicas": 0},
        {"max": 5000},
        {"targetRef": {"apiVersion": "apps/v1", "kind": "Job", "name": "a"}},
        {"paused": "yes"},
    ):
        with pytest.raises(Refused) as refused:
            change(here, **wrong)
        assert refused.value.status == 422


def test_only_the_gate_lowers_the_number(here: Real) -> None:
    gate = here.account("persia-gate")
    way = "statefulsets", "persia-ps"
    here.scale(*way, 4)
    for wrong in (3, 1):
        with pytest.raises(Refused) as refused:
            here.scale(*way, wrong)
        assert refused.value.status == 422
        with pytest.raises(Refused):
            here.ask("PATCH", *way, {"spec": {"replicas": wrong}})
    scale = here.ask("GET", "statefulsets/scale", "persia-ps")
    scale["spec"]["replicas"] = 3
    here.ask("PUT", "statefulsets/scale", "persia-ps", scale, gate)
    with pytest.raises(Refused) as refused:  # the version that was read
        here.ask("PUT", "statefulsets/scale", "persia-ps", scale, gate)
    assert refused.value.status == 409
    here.scale(*way, 0)
    here.scale(*way, 2)
    here.scale("statefulsets", "persia-worker", 3)
    here.scale("statefulsets", "persia-worker", 1)


def test_what_the_gate_may_do(here: Real) -> None:
    done = here.kubectl(
        *("auth", "can-i", "--list", "--no-headers"),
        token=here.account("persia-gate"),
    )
    rights = {
        tuple(line.split())
        for line in done.stdout.splitlines()
        if "persia-ps" in line
    }
    assert rights == {
        ("scalegates.persia.dev", "[]", "[persia-ps]", "[get]"),
        ("scalegates.persia.dev/status", "[]", "[persia-ps]", "[update]"),
        ("statefulsets.apps", "[]", "[persia-ps]", "[get]"),
        ("statefulsets.apps/scale", "[]", "[persia-ps]", "[update]"),
    }
    for verb, resource in (
        ("get", "secrets"),
        ("list", "pods"),
        ("create", "pods/exec"),
        ("patch", "statefulsets/persia-ps"),
        ("delete", "statefulsets/persia-ps"),
        ("get", "statefulsets/persia-worker"),
    ):
        done = here.kubectl(
            *("auth", "can-i", verb, resource),
            token=here.account("persia-gate"),
        )
        assert done.stdout.strip() == "no", (verb, resource)
