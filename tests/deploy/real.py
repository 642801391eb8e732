"""A real API server of Kubernetes with its controllers, and a stand-in for
kubelets.

``PERSIA_TEST_KUBERNETES`` names a folder with the programs kube-apiserver,
kube-controller-manager and etcd. No pod runs in a container: what a test
gives starts its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cluster import Refused
from tests.deploy.manifests import Object
from tests.system.processes import wait_until
from tests.system.shards import free_port

PROGRAMS = os.environ.get("PERSIA_TEST_KUBERNETES", "")

#: Kinds of other projects, which a new cluster does not know.
FOREIGN = (
    "Certificate",
    "Issuer",
    "JobSet",
    "PodMonitoring",
    "ScaledObject",
    "TrainJob",
)

_ADMIN = "admin"  # a token
_INDEX = (
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
)
_TYPES = {
    "PATCH": "application/merge-patch+json",
    "POST": "application/json",
}
_APIS = {
    "pods": "/api/v1",
    "serviceaccounts": "/api/v1",
    "jobs": "/apis/batch/v1",
    "statefulsets": "/apis/apps/v1",
    "scalegates": "/apis/persia.dev/v1alpha1",
}


class Real:
    """A cluster without nodes. Attributes and methods are those of
    :class:`tests.deploy.cluster.Cluster`, as far as they are needed.

    Args:
        folder: of its files.
    """

    namespace = "persia"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._url = f"https://127.0.0.1:{free_port()}"
        folder.mkdir()
        (folder / "tokens").write_text(f"{_ADMIN},admin,admin,system:masters")
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        key = self._folder / "key"
        words = ["openssl", "genrsa", "-out", str(key), "2048"]
        subprocess.run(words, check=True, capture_output=True)
        store = f"http://127.0.0.1:{free_port()}"
        self._start(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}",
            f"--listen-peer-urls=http://127.0.0.1:{free_port()}",
        )
        self._start(
            "kube-apiserver",
            f"--etcd-servers={store}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._url.rpartition(':')[2]}",
            f"--cert-dir={self._folder / 'keys'}",
            "--service-account-issuer=https://cluster.test",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={self._folder / 'tokens'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        wait_until(self._is_ready, 100)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, Refused):
            return self._ask("GET", "/readyz") == {}
        return False

    def _start(self, program: str, *words: str) -> None:
        path = Path(PROGRAMS) / program
        with open(self._folder / f"{program}.log", "ab") as log:
            self._started.append(
                subprocess.Popen(
                    [str(path) if path.exists() else program, *words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def controllers(self) -> None:
        """Those of StatefulSets and Jobs run."""
        config = self._folder / "config"
        config.write_text(
            yaml.safe_dump(
                {
                    "kind": "Config",
                    "apiVersion": "v1",
                    "clusters": [
                        {
                            "name": "it",
                            "cluster": {
                                "server": self._url,
                                "insecure-skip-tls-verify": True,
                            },
                        }
                    ],
                    "users": [{"name": "it", "user": {"token": _ADMIN}}],
                    "contexts": [
                        {
                            "name": "it",
                            "context": {"cluster": "it", "user": "it"},
                        }
                    ],
                    "current-context": "it",
                }
            )
        )
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            "--controllers=statefulset-controller,job-controller",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self._folder / 'keys-of-controllers'}",
        )

    def close(self) -> None:
        for process in reversed(self._started):
            process.kill()
            process.wait()

    # ---- requests

    def kubectl(
        self, *words: str, given: str = "", token: str = _ADMIN
    ) -> subprocess.CompletedProcess[str]:
        """What the program answers."""
        return subprocess.run(
            ["kubectl", *self._way(token), "-n", self.namespace, *words],
            input=given,
            capture_output=True,
            text=True,
        )

    def _way(self, token: str) -> list[str]:
        return [
            f"--server={self._url}",
            "--insecure-skip-tls-verify",
            f"--token={token}",
        ]

    def apply(self, objects: list[Object]) -> None:
        """All but those of other projects. A field that is not known is an
        error."""
        known = [o for o in objects if o["kind"] not in FOREIGN]
        done = self.kubectl(
            *("apply", "--validate=strict", "-f", "-"),
            given=yaml.safe_dump_all(known),
        )
        assert done.returncode == 0, done.stderr

    def account(self, name: str) -> str:
        """A token of a service account."""
        done = self.kubectl("create", "token", name)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def proxy(self, account: str) -> str:
        """The URL of a proxy that asks with an account."""
        port = free_port()
        self._started.append(
            subprocess.Popen(
                [
                    "kubectl",
                    *self._way(self.account(account)),
                    *("proxy", f"--port={port}"),
                ],
                stdout=subprocess.DEVNULL,
            )
        )
        return f"http://127.0.0.1:{port}"

    def ask(
        self,
        verb: str,
        resource: str,
        name: str = "",
        body: Object | None = None,
        token: str = _ADMIN,
    ) -> Object:
        """Asks for an object, or (without a name) for all.

        Raises:
            Refused: it was.
        """
        base = _APIS[resource.partition("/")[0]]
        kind, _, sub = resource.partition("/")
        words = [base, "namespaces", self.namespace, kind, name, sub]
        path = "/".join(word for word in words if word)
        return self._ask(verb, path, body, token)

    def _ask(
        self,
        verb: str,
        path: str,
        body: Object | None = None,
        token: str = _ADMIN,
    ) -> Object:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=verb,
            headers={
                "Authorization": f"Bearer {token}",
                "Content-Type": _TYPES.get(verb, "application/json"),
            },
        )
        try:
            with urllib.request.urlopen(request, context=context) as answer:
                data = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode()) from None
        return {} if data == b"ok" else dict(json.loads(data))

    # ---- as the stand-in

    def add(self, resource: str, made: Object) -> None:
        self.ask("POST", resource, body=made)

    def get(self, resource: str, name: str) -> Object:
        return self.ask("GET", resource, name)

    def scale(
        self, resource: str, name: str, replicas: int, token: str = _ADMIN
    ) -> None:
        body = {"spec": {"replicas": replicas}}
        self.ask("PATCH", f"{resource}/scale", name, body, token)


@contextlib.contextmanager
def real(folder: Path) -> Iterator[Real]:
    """A cluster; the test is skipped where its programs are not there."""
    if not PROGRAMS:
        pytest.skip("PERSIA_TEST_KUBERNETES names no folder")
    made = Real(folder)
    try:
        yield made
    finally:
        made.close()


class Kubelet:
    """Runs the pods that controllers make.

    Args:
        role: of the pods.
        start, stop: take the number of a pod; stop waits for its end.
        ready: whether one is.
    """

    def __init__(
        self,
        here: Real,
        role: str,
        start: Callable[[int], None],
        stop: Callable[[int], None],
        ready: Callable[[int], bool],
    ) -> None:
        self._here, self._role = here, role
        self._start, self._stop, self._ready = start, stop, ready
        self._runs: dict[str, int] = {}

    def step(self) -> None:
        found = self._here.ask("GET", "pods")["items"]
        for pod in found:
            about = pod["metadata"]
            if about["labels"]["app.kubernetes.io/component"] == self._role:
                self._look(pod, about["name"])

    def _look(self, pod: Object, name: str) -> None:
        labels = pod["metadata"]["labels"]
        ordinal = int(next(labels[one] for one in _INDEX if one in labels))
        if pod["metadata"].get("deletionTimestamp"):
            if self._runs.pop(name, None) is not None:
                self._stop(ordinal)
            now = {"gracePeriodSeconds": 0}
            with contextlib.suppress(Refused):
                self._here.ask("DELETE", "pods", name, now)
        elif name not in self._runs:
            self._bind(name)
            self._runs[name] = ordinal
            self._start(ordinal)
            self._say(name, "False")
        elif _is(pod, "Ready") != self._ready(ordinal):
            self._say(name, str(self._ready(ordinal)))

    def _bind(self, name: str) -> None:
        self._here.ask(
            "POST",
            "pods/binding",
            name,
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": "one"},
            },
        )

    def _say(self, name: str, ready: str) -> None:
        conditions = [{"type": "Ready", "status": ready}]
        status: dict[str, Any] = {"phase": "Running", "conditions": conditions}
        self._here.ask("PATCH", "pods/status", name, {"status": status})


def _is(pod: Object, condition: str) -> bool:
    some = pod.get("status", {}).get("conditions", [])
    return any(
        one["type"] == condition and one["status"] == "True" for one in some
    )
