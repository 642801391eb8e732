"""The manifests of deploy/: against the schemas of Kubernetes, the options of
the commands, and each other."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator

import pytest
import yaml

from persia.base.health import PATHS
from persia.base.version import RELEASE
from tests.deploy.manifests import (
    APPLIED,
    DEPLOY,
    Object,
    Pods,
    job_of,
    jobs_of,
    of_kind,
    pods,
    render,
)

sys.path.insert(0, str(DEPLOY.parent / "docs" / "_tools"))
import tables

validator = pytest.importorskip(
    "kubernetes_validate", reason="pip install 'persia[test]'"
)

#: The oldest and the newest version of Kubernetes that are supported.
VERSIONS = ("1.30.0", "1.37.0")
#: Their schemas are of others.
FOREIGN = {
    "Certificate",
    "Issuer",
    "JobSet",
    "PodMonitoring",
    "ScaleGate",  # its schema is ours: see test_gate.py
    "ScaledObject",
    "TrainJob",
    "TrainingRuntime",
}
#: They are in no namespace, and of no job.
OF_CLUSTERS = {
    "CustomResourceDefinition",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
#: Variables of torchrun.
TORCHRUN = {
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_MAX_RESTARTS",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}
EVERY = pytest.mark.parametrize("folder", APPLIED)


def variables() -> set[str]:
    """All that Persia reads, those of options among them."""
    found = set(tables.VARIABLES) | {"POD_NAME"}
    for command, model in tables.configurations().items():
        for name, field in model.model_fields.items():
            words = f"{command} {field.alias or name}".upper()
            found.add(re.sub(r"[ -]", "_", words))
    return found


def command_of(pods: Pods) -> str:
    """The command of Persia in a container, such as "persia serve ps"."""
    words = [a for a in pods.container["args"] if not a.startswith("-")]
    text = " ".join(["persia", *words]).replace("persia persia", "persia")
    known: dict[str, object] = tables.configurations()
    return next(c for c in known if f"{text} ".startswith(f"{c} "))


def all_pods() -> Iterator[tuple[str, Pods]]:
    for folder in APPLIED:
        for found in pods(render(folder)):
            yield folder, found


@EVERY
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_have_the_schemas_of_kubernetes(
    folder: str, version: str
) -> None:
    for made in render(folder):
        if made["kind"] not in FOREIGN:
            validator.validate(made, version, strict=True)


@EVERY
def test_a_jobs_pods_have_the_schemas_of_pods(folder: str) -> None:
    for made in of_kind(render(folder), "JobSet", "TrainingRuntime"):
        for job in jobs_of(made):
            plain = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": job["name"]},
                "spec": job["template"]["spec"],
            }
            validator.validate(plain, VERSIONS[0], strict=True)


@EVERY
def test_all_objects_have_the_label_of_the_job_and_the_namespace(
    folder: str,
) -> None:
    for made in render(folder):
        if made["kind"] in OF_CLUSTERS:
            assert folder == "gate"
            continue
        assert made["metadata"]["labels"]["persia-job"] == "clicks"
        if made["kind"] != "Namespace":
            assert made["metadata"]["namespace"] == "persia"
    for found in pods(render(folder)):
        assert found.labels["persia-job"] == "clicks"


def test_pods_are_closed() -> None:
    for _, found in all_pods():
        spec, container = found.spec, found.container
        assert spec["enableServiceLinks"] is False
        asks = found.role == "gate"  # the API server
        assert spec["automountServiceAccountToken"] is asks
        assert spec["securityContext"]["runAsNonRoot"] is True
        profile = spec["securityContext"]["seccompProfile"]
        assert profile == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        requests = container["resources"]["requests"]
        limits = container["resources"]["limits"]
        assert requests["memory"] == limits["memory"]


def bytes_of(text: str) -> int:
    """Of "48GiB" or "54Gi"."""
    found = re.fullmatch(r"(\d+)([MGT])iB?", text)
    assert found is not None, text
    return int(found[1]) << {"M": 20, "G": 30, "T": 40}[found[2]]


def test_servers_have_memory_and_disk_for_their_rows() -> None:
    seen = 0
    for folder, found in all_pods():
        if found.role != "ps":
            continue
        job = job_of(render(folder))
        rows = bytes_of(job["PERSIA_SERVE_PS_MEMORY_LIMIT"])
        words = " ".join(found.container["args"])
        assert "--memory-limit" not in words  # it would decide
        memory = found.container["resources"]["limits"]["memory"]
        assert bytes_of(memory) >= rows + (1 << 30)
        (servers,) = (
            one
            for one in render(folder)
            if one["kind"] == "StatefulSet"
            and one["metadata"]["name"] == "persia-ps"
        )
        for claim in servers["spec"].get("volumeClaimTemplates", ()):
            disk = claim["spec"]["resources"]["requests"]["storage"]
            shards = int(job["PERSIA_SHARDS"])
            assert bytes_of(disk) >= 2 * rows + (2 << 30) * shards
        seen += 1
    assert seen >= 4


def test_every_variable_is_known() -> None:
    known = variables()
    for folder, found in all_pods():
        names = {e["name"] for e in found.container.get("env", [])}
        if found.container.get("envFrom"):
            names |= set(job_of(render(folder)))
        assert names <= known | TORCHRUN, names - known - TORCHRUN


def test_no_secret_is_in_a_variable_or_an_argument() -> None:
    for folder, found in all_pods():
        names = {e["name"] for e in found.container.get("env", [])}
        names |= set(job_of(render(folder)))
        assert not names & {"PERSIA_TOKEN", "PERSIA_ADMIN_TOKEN"}
        assert "--token" not in found.options


def test_every_flag_is_an_option_of_its_command() -> None:
    own = {"--log-format"}  # of all commands
    for _, found in all_pods():
        command = command_of(found)
        model = tables.configurations()[command]
        known = {
            "--" + (f.alias or name).replace("_", "-")
            for name, f in model.model_fields.items()
        }
        known |= {"--resume"} if command == "persia train" else set()
        assert set(found.options) <= known | own, command


def test_files_of_options_are_in_volumes() -> None:
    for folder, found in all_pods():
        given = list(found.options.values())
        prefix = command_of(found).upper().replace(" ", "_") + "_"
        given += [
            value
            for name, value in job_of(render(folder)).items()
            if name.startswith(prefix)
        ]
        given += [
            str(e["value"])
            for e in found.container.get("env", [])
            if "value" in e
        ]
        given += [a for a in found.container["args"] if "=/" in a]
        mounts = tuple(f"{m}/" for m in found.mounts.values())
        for text in given:
            path = text.partition("=")[2] if "=/" in text else text
            if path.startswith("/"):
                assert path.startswith(mounts), text
        assert set(found.mounts) == set(found.volumes)


def test_ports_of_services_containers_and_options_are_the_same() -> None:
    for folder, found in all_pods():
        for flag, name in (("--port", ""), ("--metrics-port", "metrics")):
            if flag not in found.options:
                continue
            ports = found.ports
            value = int(found.options[flag])
            assert value in ([ports[name]] if name else ports.values())
        for made in of_kind(render(folder), "Service"):
            selector = made["spec"]["selector"]
            if selector.items() <= found.labels.items():
                ports = {p["name"]: p["port"] for p in made["spec"]["ports"]}
                assert ports.items() <= found.ports.items()


def test_the_metrics_of_every_role_are_reached() -> None:
    for _, found in all_pods():
        given = {
            e["name"]: e.get("value") for e in found.container.get("env", [])
        }
        port, host = (
            found.options.get(f"--metrics-{what}")
            or given.get(f"PERSIA_METRICS_{what.upper()}")
            for what in ("port", "host")
        )
        assert port == str(found.ports["metrics"])
        assert host == "0.0.0.0", found.role


def test_probes_ask_for_pages_that_exist() -> None:
    for _, found in all_pods():
        asked = [
            found.container[p]
            for p in ("livenessProbe", "readinessProbe")
            if p in found.container
        ]
        for probe in asked:
            assert probe["httpGet"]["path"] in PATHS
            assert probe["httpGet"]["port"] in found.ports
        # What restores for long is alive; it must not be ended for it.
        assert "startupProbe" not in found.container
        assert len(asked) == 2 or found.role in ("loader", "trainer")


def selected(selector: Object, labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return wanted.items() <= labels.items()


@EVERY
def test_budgets_and_services_select_pods_of_one_role(folder: str) -> None:
    objects = render(folder)
    found = list(pods(objects))
    selectors = [
        o["spec"]["selector"] for o in of_kind(objects, "PodDisruptionBudget")
    ]
    selectors += [
        {"matchLabels": o["spec"]["selector"]}
        for o in of_kind(objects, "Service")
    ]
    for selector in selectors:
        assert sum(selected(selector, p.labels) for p in found) == 1
    for one in found:
        own = one.owner["spec"].get("selector")
        assert own is None or selected(own, one.labels)


#: Who opens connections to whom, on which port.
CALLS = {
    ("ps", "ps", 8888),  # they move shards
    ("gate", "ps", 8888),
    ("gate", "ps", 9100),
    ("worker", "ps", 8888),
    ("trainer", "ps", 8888),
    ("loader", "worker", 8889),
    ("trainer", "worker", 8889),
}


def test_policies_allow_what_roles_need_and_no_more() -> None:
    objects = render("overlays/gke")
    policies = of_kind(objects, "NetworkPolicy")
    roles = {p.role: p.labels for p in pods(objects)}
    allowed = set()
    for policy in policies:
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        for rule in spec.get("ingress", []):
            for peer in rule["from"]:
                if "namespaceSelector" in peer:
                    assert rule["ports"] == [{"port": 9100}]
                    continue
                allowed |= {
                    (source, target, port["port"])
                    for source, its in roles.items()
                    for target, others in roles.items()
                    for port in rule.get("ports", [{"port": 0}])
                    if selected(peer["podSelector"], its)
                    and selected(spec["podSelector"], others)
                }
    assert allowed == CALLS | {("trainer", "trainer", 0)}
    every = [p for p in policies if p["spec"]["podSelector"] == {}]
    assert any("ingress" not in p["spec"] for p in every)


def has(found: object, wanted: object) -> bool:
    """Whether an object has all that another one has."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            has(found.get(name), value) for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and all(
            itertools.starmap(has, zip(found, wanted, strict=True))
        )
    return found == wanted


def test_a_train_job_starts_the_trainers_of_its_runtime() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models",
        reason="pip install kubeflow-trainer-api",
    )
    objects = render("overlays/gke-trainjob")
    (job,) = of_kind(objects, "TrainJob")
    (runtime,) = of_kind(objects, "TrainingRuntime")
    for made in (job, runtime):
        model = getattr(models, f"TrainerV1alpha1{made['kind']}")
        # What it does not know it leaves out; defaults it adds.
        assert has(model.from_dict(made).to_dict(), made)
    wanted = job["spec"]["runtimeRef"]
    assert (wanted["kind"], wanted["name"]) == (
        runtime["kind"],
        runtime["metadata"]["name"],
    )
    assert job["spec"]["trainer"]["numNodes"] == int(
        job_of(objects)["PET_NNODES"]
    )
    (trainer,) = (p for p in pods(objects) if p.role == "trainer")
    (node,) = jobs_of(runtime)
    assert (node["name"], trainer.container["name"]) == ("node", "node")
    # Those of torchrun are the trainer's.
    given = {e["name"] for e in trainer.container["env"]}
    assert not given & TORCHRUN
    (other,) = (p for p in pods(render("overlays/gke")) if p.role == "trainer")
    assert trainer.container["args"] == other.container["args"]
    assert not of_kind(objects, "JobSet")


@pytest.mark.parametrize("folder", APPLIED[:3])
def test_the_numbers_of_a_job_agree(folder: str) -> None:
    objects = render(folder)
    job = job_of(objects)
    roles = {p.role: p for p in pods(objects)}
    servers = int(job["PERSIA_SERVE_PS_SERVER_COUNT"])
    gates = of_kind(objects, "ScaleGate")
    least = [gate["spec"]["min"] for gate in gates]
    assert roles["ps"].replicas == (None if gates else servers)
    assert least == [servers] * len(gates)
    assert int(job["PERSIA_SHARDS"]) >= servers
    assert roles["trainer"].replicas == int(job["PET_NNODES"])
    trainers = roles["trainer"].owner["spec"]["replicatedJobs"][0]["template"]
    assert trainers["spec"]["completions"] == int(job["PET_NNODES"])
    assert job["PERSIA_FEED_PARTS"] == job["PERSIA_SERVE_WORKER_LOADERS"]
    assert job["PERSIA_FEED_DATA"] == job["PERSIA_TRAIN_DATA"]
    most = {
        o["spec"]["scaleTargetRef"]["name"]: o["spec"]["maxReplicaCount"]
        for o in of_kind(objects, "ScaledObject")
    }
    for gate in gates:
        limits = gate["spec"]["max"], most[gate["metadata"]["name"]]
        assert max(limits) <= int(job["PERSIA_SHARDS"])
    workers = roles["worker"].replicas or most["persia-worker"]
    assert addresses(roles["ps"], servers) == job["PERSIA_SERVERS"]
    assert addresses(roles["worker"], workers) == job["PERSIA_WORKERS"]
    loaders = roles["loader"].replicas or most["persia-loader"]
    assert loaders <= int(job["PERSIA_FEED_PARTS"])
    # Servers write where trainers save.
    saved = job["PERSIA_TRAIN_SAVE"].rpartition("/")
    assert saved[0] == job["PERSIA_SERVE_PS_CHECKPOINTS"]
    for option in ("--restore", "--save-on-exit"):
        assert roles["ps"].options[option] == saved[2]
    # What a server holds is said once: no template changes with the number.
    text = json.dumps(roles["ps"].template)
    assert "SERVER_COUNT" not in text and "--shards" not in text


def addresses(which: Pods, count: int) -> str:
    """Of the pods of a StatefulSet, by the names that its Service gives."""
    service = which.owner["spec"]["serviceName"]
    names = (f"{which.name}-{i}.{service}.persia.svc" for i in range(count))
    return ",".join(f"{n}:{which.options['--port']}" for n in names)


def test_certificates_have_the_names_of_addresses() -> None:
    objects = render("overlays/gke")
    job = job_of(objects)
    (names,) = (
        o["spec"]["dnsNames"]
        for o in of_kind(objects, "Certificate")
        if o["metadata"]["name"] == "persia-tls"
    )
    given = f"{job['PERSIA_SERVERS']},{job['PERSIA_WORKERS']}".split(",")
    for address in given:
        host = address.partition(":")[0]
        assert "*." + host.partition(".")[2] in names
    # gRPC takes no wildcard of a name of two parts.
    assert all(n.count(".") > 1 for n in names)


def test_a_server_ends_within_the_grace_of_its_pod() -> None:
    for _, found in all_pods():
        default = 30.0
        grace = float(found.options.get("--grace", default))
        assert found.spec["terminationGracePeriodSeconds"] >= grace + 5


def test_triggers_read_a_ratio_of_each_worker() -> None:
    for made in of_kind(render("overlays/gke"), "ScaledObject"):
        servers = made["metadata"]["name"] == "persia-ps"
        for trigger in made["spec"]["triggers"]:
            # As AverageValue it would be divided by the number of pods.
            assert trigger["metricType"] == "Value"
            about = trigger["metadata"]
            every = about.get("aggregateFromKubeServiceEndpoints")
            assert every == (None if servers else "true")
            # The name and namespace of a Service, and the port of its pods.
            service = "persia-gate" if servers else "persia-worker"
            assert about["url"] == f"http://{service}.persia.svc:9100/metrics"


def test_images_are_of_this_release() -> None:
    for _, found in all_pods():
        name, _, tag = found.container["image"].rpartition(":")
        assert tag == RELEASE
        small = found.role in ("ps", "worker", "gate")
        wanted = "persia-ps" if small else "persia"
        assert name.rpartition("/")[2] == wanted


def test_yaml_of_every_file_is_read() -> None:
    for path in DEPLOY.rglob("*.yaml"):
        assert list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
