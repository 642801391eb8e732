"""The manifests and the gate with a real API server of Kubernetes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.cluster import Refused
from tests.deploy.manifests import (
    DEPLOY,
    Object,
    job_of,
    of_kind,
    pods,
    render,
)
from tests.deploy.real import PROGRAMS, Kubelet, Real, real
from tests.deploy.test_commands import links, machine, write_clicks
from tests.deploy.test_gate_processes import Job
from tests.system.processes import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

UPDATES = "persia_updates_total"
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


def test_trainers_join_and_leave(tmp_path: Path) -> None:
    """The number of an Indexed Job changes while it trains."""
    (tmp_path / "overlay").mkdir()
    made = {
        "resources": [relative("overlays/local", tmp_path)],
        "components": [relative("components/elastic", tmp_path)],
    }
    text = yaml.safe_dump(made)
    (tmp_path / "overlay" / "kustomization.yaml").write_text(text)
    objects = render(str(tmp_path / "overlay"))
    roles = {p.role: p for p in pods(objects)}
    ps, worker = roles["ps"], roles["worker"]
    loader, trainer = roles["loader"], roles["trainer"]
    data = write_clicks(tmp_path / "clicks.csv")
    job = job_of(objects) | {
        "PERSIA_FEED_DATA": data,
        "PERSIA_TRAIN_DATA": data,
        "PERSIA_FEED_EPOCHS": "100000",
        "PERSIA_TRAIN_EPOCHS": "100000",
    }
    with (
        real(tmp_path / "cluster") as cluster,
        machine(tmp_path, job, links(objects)) as here,
    ):
        cluster.apply(of_kind(objects, "Namespace", "ServiceAccount"))
        cluster.controllers()
        cluster.apply([o for o in objects if o["kind"] == "ConfigMap"])
        cluster.apply([trainer.owner])
        kubelet = Kubelet(
            cluster,
            "trainer",
            lambda ordinal: here.start(trainer, ordinal),
            lambda ordinal: here.end(trainer, ordinal),
            lambda ordinal: True,
        )

        def until(so: Callable[[], bool]) -> None:
            wait_until(lambda: kubelet.step() or so(), 120)

        def scale(count: int) -> None:
            spec = {"parallelism": count, "completions": count}
            cluster.ask("PATCH", "jobs", "persia-trainer", {"spec": spec})

        def has_rank(rank: int) -> bool:
            wanted = f'persia_updates_lost_total{{rank="{rank}"}}'
            return here.runs(trainer, rank) and any(
                wanted in here.gauges(trainer, pod)
                for pod in range(2)
                if here.runs(trainer, pod)
            )

        def trained() -> float:
            found = here.values(ps).items()
            return sum(n for name, n in found if name.startswith(UPDATES))

        def trains() -> None:
            least = trained() + 20
            until(lambda: trained() > least)

        for role in (ps, worker, loader):
            here.start(role)
        until(lambda: has_rank(0))
        trains()
        scale(2)
        until(lambda: has_rank(1))
        trains()
        scale(1)
        until(lambda: not here.runs(trainer, 1))
        trains()


def relative(folder: str, to: Path) -> str:
    return os.path.relpath(DEPLOY / folder, to / "overlay")


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
