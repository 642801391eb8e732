"""A stand-in for the API server of Kubernetes, and for the controller of
StatefulSets.

It has what the gate relies on: versions of objects (409), subresources that
change nothing else, schemas with defaults of custom resources, and roles.
kmock has no versions, which keep two gates apart.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import http.server
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema

from tests.deploy.manifests import Object

_PATH = re.compile(
    r"/apis/([\w.]+)/(\w+)/namespaces/([\w-]+)/(\w+)/([\w-]+)(/(status|scale))?"
)


class Refused(Exception):
    """An answer that is no object."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """Objects by their kinds and names, served over HTTP.

    Args:
        crds: CustomResourceDefinitions.
        role: whose rules every request is held against; None: none is.
        keys: folder of `persia certs`: https, and a token; None: http.

    Attributes:
        url: of the API server.
        faults: what the next requests get, in their place: a status, or
            "hang"; None: nothing.
        requests: verb and resource of all that were allowed.
    """

    def __init__(
        self,
        crds: list[Object] | None = None,
        role: Object | None = None,
        keys: Path | None = None,
    ) -> None:
        self.faults: collections.deque[int | str | None] = collections.deque()
        self.requests: list[tuple[str, str]] = []
        self._objects: dict[tuple[str, str], Object] = {}
        self._schemas = {
            crd["spec"]["names"]["plural"]: _schema(crd) for crd in crds or []
        }
        self._role = role
        self._version = 0
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), self._handler()
        )
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._token = None
        if keys is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            pair = keys / "server.pem", keys / "server-key.pem"
            context.load_cert_chain(*pair)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True
            )
            self._token = (keys / "token").read_text().strip()
        threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        ).start()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    # ---- objects

    def add(self, resource: str, made: Object) -> None:
        """Creates an object."""
        made = copy.deepcopy(made)
        name = made["metadata"]["name"]
        made["metadata"] |= {"generation": 1, "uid": f"{resource}/{name}"}
        self._check(resource, made)
        with self._lock:
            self._store(resource, name, made)

    def get(self, resource: str, name: str) -> Object:
        with self._lock:
            if (resource, name) not in self._objects:
                raise Refused(404, f"no {resource} {name}")
            return copy.deepcopy(self._objects[resource, name])

    def change(
        self, resource: str, name: str, fn: Callable[[Object], None]
    ) -> None:
        """Changes the ``spec`` of an object, as a user with kubectl does."""
        with self._lock:
            made = self.get(resource, name)
            fn(made)
            self._replace(resource, name, "", made)

    def scale(self, resource: str, name: str, replicas: int) -> None:
        """As an autoscaler does."""
        with self._lock:
            made = self.get(resource, name)
            body = {
                "metadata": made["metadata"],
                "spec": {"replicas": replicas},
            }
            self._replace(resource, name, "scale", body)

    def set_status(self, resource: str, name: str, **status: Any) -> None:
        with self._lock:
            made = self.get(resource, name)
            made["status"] = made.get("status", {}) | status
            self._replace(resource, name, "status", made)

    def _store(self, resource: str, name: str, made: Object) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        self._objects[resource, name] = made

    def _check(self, resource: str, made: Object) -> None:
        schema = self._schemas.get(resource)
        if schema is None:
            return
        _prune(schema, made)
        try:
            jsonschema.validate(made, schema)
        except jsonschema.ValidationError as error:
            raise Refused(422, error.message) from None

    def _replace(
        self, resource: str, name: str, sub: str, body: Object
    ) -> Object:
        with self._lock:
            now = self.get(resource, name)
            wanted = body.get("metadata", {}).get("resourceVersion")
            if wanted and wanted != now["metadata"]["resourceVersion"]:
                raise Refused(409, f"{resource} {name} has been modified")
            before = copy.deepcopy(now)
            if sub == "status":
                now["status"] = body.get("status", {})
            elif sub == "scale":
                now["spec"]["replicas"] = body["spec"].get("replicas", 0)
            else:
                now["spec"] = body["spec"]
            if now["spec"] != before["spec"]:
                now["metadata"]["generation"] += 1
            self._check(resource, now)
            if now != before:  # else it has its version, as on Kubernetes
                self._store(resource, name, now)
            return _scale_of(now) if sub == "scale" else copy.deepcopy(now)

    # ---- requests

    def _allow(self, verb: str, group: str, resource: str, name: str) -> None:
        for rule in (self._role or {}).get("rules", []):
            if (
                group in rule["apiGroups"]
                and resource in rule["resources"]
                and verb in rule["verbs"]
                and name in rule.get("resourceNames", [name])
            ):
                break
        else:
            if self._role is not None:
                raise Refused(403, f"{verb} {resource} {name} is forbidden")
        self.requests.append((verb, resource))

    def answer(self, method: str, path: str, body: Object | None) -> Object:
        """What a request gets."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise Refused(404, f"no {path}")
        group, _, _, resource, name, _, sub = found.groups()
        verb = {"GET": "get", "PUT": "update"}.get(method)
        if verb is None:
            raise Refused(405, method)
        full = f"{resource}/{sub}" if sub else resource
        self._allow(verb, group, full, name)
        if method == "GET":
            made = self.get(resource, name)
            return _scale_of(made) if sub == "scale" else made
        assert body is not None
        return self._replace(resource, name, sub or "", body)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                fault = None
                with contextlib.suppress(IndexError):
                    fault = cluster.faults.popleft()
                if fault == "hang":
                    cluster._over.wait(60)
                    return
                shown = self.headers.get("Authorization")
                try:
                    if cluster._token and shown != f"Bearer {cluster._token}":
                        raise Refused(401, "no token")
                    if isinstance(fault, int):
                        raise Refused(fault, "as the test wants it")
                    found = cluster.answer(self.command, self.path, body)
                    status = 200
                except Refused as refused:
                    status, found = refused.status, {"message": str(refused)}
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextlib.contextmanager
def cluster(*how: Any) -> Iterator[Cluster]:
    made = Cluster(*how)
    try:
        yield made
    finally:
        made.close()


class StatefulSets:
    """The controller: pods are what ``start`` makes and ``stop`` ends.

    Args:
        start, stop: take the number of a pod. It starts those that are
            missing, and ends the highest one that is too many, one a step.
    """

    def __init__(
        self,
        here: Cluster,
        name: str,
        start: Callable[[int], None],
        stop: Callable[[int], None],
    ) -> None:
        self._here, self._name = here, name
        self._start, self._stop = start, stop
        self.pods: set[int] = set()

    def step(self) -> None:
        made = self._here.get("statefulsets", self._name)
        want = made["spec"].get("replicas", 1)
        for ordinal in range(want):
            if ordinal not in self.pods:
                self.pods.add(ordinal)
                self._start(ordinal)
        if max(self.pods, default=-1) >= want:
            last = max(self.pods)
            self._stop(last)
            self.pods.remove(last)
        self._here.set_status(
            "statefulsets",
            self._name,
            observedGeneration=made["metadata"]["generation"],
            replicas=len(self.pods),
            currentRevision="1",
            updateRevision="1",
        )


def _scale_of(made: Object) -> Object:
    about = made["metadata"]
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {
            "name": about["name"],
            "resourceVersion": about["resourceVersion"],
        },
        "spec": {"replicas": made["spec"]["replicas"]},
        "status": {
            "replicas": made.get("status", {}).get("replicas", 0),
            "selector": made.get("status", {}).get("selector", ""),
        },
    }


def _schema(crd: Object) -> Object:
    (version,) = crd["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def _prune(schema: Object, made: Any) -> None:
    """Removes what the schema has not, and sets its defaults."""
    known = schema.get("properties")
    if not isinstance(made, dict) or known is None:
        return
    about = made.get("metadata")
    for name in list(made):
        if name not in known and name not in ("apiVersion", "kind"):
            del made[name]
    if about is not None:
        made["metadata"] = about
    for name, one in known.items():
        if name not in made and "default" in one:
            made[name] = copy.deepcopy(one["default"])
        if name in made and name != "metadata":
            _prune(one, made[name])
