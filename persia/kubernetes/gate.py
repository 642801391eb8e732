"""The number of parameter servers of a job in a cluster.

A ScaleGate says how many there are to be; an autoscaler, or a user, changes
that. The gate looks every few seconds at what is there, and does one thing:
it raises the number of the StatefulSet, begins the move of a shard, or lowers
the number by one where the last server has no shard. It remembers nothing
that counts, so it may be killed at any time. What decides is
:func:`persia.distributed.steps.next_step`.

One gate acts. It writes its name into the status of the ScaleGate before each
act, with the version of the object that it has read; another gate waits until
that has not changed for a while. The number of the StatefulSet is replaced
with the version that was read before the servers were asked.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import http.client
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, Self

import pydantic
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import Field

from persia import _core
from persia.base.logs import say
from persia.distributed.load import SERVER, wanted
from persia.distributed.scaling import Answer, Move, Scaling
from persia.distributed.steps import Phase, Servers, Step, next_step
from persia.errors import InvalidArgument, PersiaError
from persia.kubernetes.api import Api, Object
from persia.prometheus import of_loads

_GATES = "/apis/persia.dev/v1alpha1/namespaces/{}/scalegates/{}"
_SETS = "/apis/apps/v1/namespaces/{}/statefulsets/{}"

_LEASE = 15.0  # seconds after which a silent gate is taken for dead
_ACT = 5.0  # seconds from its status in which a gate may act
_AGAIN = 30.0  # seconds from a move that failed to the next one
_BETWEEN = 1e-6  # of a server, so that ceil() is sure
_PAGE = 1.0  # seconds for the metrics of a server
_PAGE_BYTES = 8 << 20
_NEAR = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_LOAD = re.compile(
    r'^persia_load\{role="server"\} ([0-9.e+-]+)$', re.MULTILINE
)
_BYTES = re.compile(
    r'^persia_shard_bytes\{.*\bshard="(\d+)".*\} (\S+)$', re.MULTILINE
)


class Target(pydantic.BaseModel):
    """What is scaled."""

    apiVersion: Literal["apps/v1"]
    kind: Literal["StatefulSet"]
    name: str


class GateSpec(pydantic.BaseModel):
    """The ``spec`` of a ScaleGate; ``deploy/gate/crd.yaml`` describes it."""

    targetRef: Target
    replicas: int = Field(1, ge=1)
    min: int = Field(1, ge=1)
    max: int = Field(4096, ge=1)
    namespace: str = "default"
    address: str | None = None
    paused: bool = False
    dryRun: bool = False

    @classmethod
    def of(cls, gate: Object) -> Self:
        """That of an object.

        Raises:
            InvalidArgument: it is none.
        """
        try:
            return cls.model_validate(gate.get("spec"))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidArgument(f"spec.{where}: {first['msg']}") from None

    @property
    def want(self) -> int:
        """So many servers are wanted."""
        return max(self.min, min(self.replicas, self.max))


class Ways(Protocol):
    """What the gate asks servers: see :class:`Scaling`."""

    def look(self) -> dict[str, Answer | PersiaError]: ...
    def settle(self, found: Mapping[str, Answer | PersiaError]) -> None: ...
    def begin(self, move: Move) -> None: ...
    def close(self) -> None: ...


class Gate:
    """Makes the number of servers that of a ScaleGate.

    Args:
        api: of the cluster.
        namespace: of the ScaleGate and its StatefulSet.
        name: of the ScaleGate.
        who: of this process: no other gate has that name.
        connect: gives the way to servers: their addresses, and the namespace
            of their tables.
        page: gives the metrics of a server by their URL; "": it has none.
        clock: seconds that do not go back.

    Attributes:
        load: of the servers, for an autoscaler. 1 while a change is carried
            out: it would ask for more before the last change has helped. None:
            not known.
        step: that was last taken, or is waited for.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        who: str,
        connect: Callable[[Sequence[str], str], Ways] | None = None,
        page: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load: float | None = None
        self.step: Step | None = None
        self._api, self._who = api, who
        self._path = _GATES.format(namespace, name)
        self._namespace = namespace
        self._connect = connect or _connect
        self._page = page or _metrics
        self._clock = clock
        self._ways: Ways | None = None
        self._known: tuple[str, ...] = ()
        self._other: tuple[Any, ...] = ()
        self._heard = 0.0
        self._failed: dict[int, float] = {}  # moves, and when that was seen
        self._said = ""

    @property
    def soon(self) -> bool:
        """Whether the next look may find something to do."""
        return self.step is not None and self.step.phase in (
            Phase.MOVING,
            Phase.DRAINING,
        )

    def close(self) -> None:
        """Ends the connections. Another gate need not wait."""
        self._drop()
        with contextlib.suppress(PersiaError):
            gate = self._api.get(self._path)
            if gate.get("status", {}).get("holder") == self._who:
                gate["status"]["holder"] = ""
                self._api.put(f"{self._path}/status", gate)

    def look(self) -> None:
        """Looks at what is there, and does what follows."""
        try:
            self._look()
        except PersiaError as error:
            self.load = self.step = None
            self._drop()  # tokens and certificates may be new ones
            self._say(f"{type(error).__name__}: {error}", "warning")

    def _say(self, text: str, level: Any = "info") -> None:
        if text != self._said:
            say(text, level)
        self._said = text

    def _drop(self) -> None:
        if self._ways is not None:
            self._ways.close()
        self._ways, self._known = None, ()

    # ---- one look

    def _look(self) -> None:
        began = self._clock()
        gate = self._api.get(self._path)
        if not self._may_act(gate, began):
            self.load = self.step = None
            return
        spec = GateSpec.of(gate)
        path = _SETS.format(self._namespace, spec.targetRef.name)
        target = self._api.get(path)
        addresses = [
            _address(spec, target, i) for i in range(_replicas(target))
        ]
        ways = self._ways_to(addresses, spec.namespace)
        found = ways.look() if ways is not None else {}
        seen = _seen(spec, target, addresses, found)
        step = next_step(seen, spec.want)
        if step.move and (why := self._late(found, began)):
            step = next_step(dataclasses.replace(seen, waits=why), spec.want)
        pages = self._pages(target, addresses)
        self.load = _load_of(step, seen, spec, pages)
        self.step = step
        until = self._clock() + _ACT
        self._write(gate, target, spec, step, pages)
        self._say(f"{step.phase}: {step.text}" if step.text else step.phase)
        if spec.dryRun:
            return
        if self._clock() > until:
            self._say(
                f"the status took more than {_ACT:g} s: nothing is done until "
                "the next look",
                "warning",
            )
            return
        if ways is not None:
            ways.settle(found)
        if step.count is not None:
            scale = self._scale(target, step.count)
            self._api.put(f"{path}/scale", scale)
        elif step.move is not None and ways is not None:
            ways.begin(step.move)

    def _may_act(self, gate: Object, now: float) -> bool:
        """Whether no other gate acts."""
        if gate["metadata"].get("deletionTimestamp"):
            self._say("the ScaleGate is being deleted")
            return False
        status = gate.get("status", {})
        holder = status.get("holder")
        if holder in (None, "", self._who):
            return True
        if self._other != (holder, status.get("renewed")):
            self._other = (holder, status.get("renewed"))
            self._heard = now
        if now < self._heard + _LEASE:
            self._say(f"{holder} acts")
            return False
        return True

    def _late(
        self, found: Mapping[str, Answer | PersiaError], now: float
    ) -> str:
        """Why no move begins yet: the last one has failed just now. "": one
        may begin."""
        for address, one in found.items():
            if not isinstance(one, Answer) or one.state != _core.MOVED_FAILED:
                continue
            if now < self._failed.setdefault(one.id, now) + _AGAIN:
                return f"shard {one.shard} stays at {address}: {one.text}"
        return ""

    def _ways_to(
        self, addresses: Sequence[str], namespace: str
    ) -> Ways | None:
        known = (namespace, *addresses)
        if known != self._known:
            self._drop()
            if addresses:
                self._ways = self._connect(addresses, namespace)
            self._known = known
        return self._ways

    def _pages(
        self, target: Object, addresses: Sequence[str]
    ) -> dict[str, str]:
        """The metrics of servers, by their addresses."""
        port = _port(target, "metrics")
        if port is None or not addresses:
            return {}
        urls = [
            f"http://{a.rpartition(':')[0]}:{port}/metrics" for a in addresses
        ]
        with ThreadPoolExecutor(min(len(urls), 32)) as pool:
            return dict(zip(addresses, pool.map(self._page, urls)))

    def _write(
        self,
        gate: Object,
        target: Object,
        spec: GateSpec,
        step: Step,
        pages: dict[str, str],
    ) -> None:
        """Writes the status: no other gate acts on what this one has read,
        or for a while from now on."""
        sizes = {
            int(shard): float(size)
            for text in pages.values()
            for shard, size in _BYTES.findall(text)
        }
        moving = [move.shard for move in step.left]
        text = f"dry run: {step.text}" if spec.dryRun else step.text
        labels = target["spec"]["selector"].get("matchLabels", {})
        gate = copy.deepcopy(gate)
        gate["status"] = {
            "replicas": _replicas(target),
            "selector": ",".join(f"{k}={v}" for k, v in labels.items()),
            "phase": step.phase,
            "shardsLeft": len(moving),
            "bytesLeft": int(sum(sizes.get(shard, 0) for shard in moving)),
            "message": text,
            "observedGeneration": gate["metadata"].get("generation", 0),
            "holder": self._who,
            "renewed": datetime.datetime.now(datetime.UTC).isoformat(),
        }
        self._api.put(f"{self._path}/status", gate)

    def _scale(self, target: Object, count: int) -> Object:
        about = target["metadata"]
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {
                "name": about["name"],
                "namespace": self._namespace,
                "resourceVersion": about["resourceVersion"],
            },
            "spec": {"replicas": count},
        }

    # ---- metrics

    def collect(self) -> Iterator[Metric]:
        """For Prometheus, and for an autoscaler."""
        step, load = self.step, self.load
        if load is not None:
            yield of_loads({SERVER: load})
        yield GaugeMetricFamily(
            "persia_gate_acts",
            "1: this gate acts; 0: another one does, or it cannot.",
            float(step is not None),
        )
        yield GaugeMetricFamily(
            "persia_gate_blocked",
            "1: the servers cannot be changed, see the ScaleGate's message.",
            float(step is not None and step.phase == Phase.BLOCKED),
        )
        yield GaugeMetricFamily(
            "persia_gate_shards_left",
            "Shards that are still to move.",
            float(len(step.left)) if step is not None else 0.0,
        )


def _connect(addresses: Sequence[str], namespace: str) -> Ways:
    return Scaling(addresses, namespace=namespace, timeout=3.0)


def _metrics(url: str) -> str:
    """A page; "": there is none."""
    try:
        with _NEAR.open(url, timeout=_PAGE) as answer:
            return str(answer.read(_PAGE_BYTES).decode())
    except (OSError, ValueError, http.client.HTTPException):
        return ""


def _replicas(target: Object) -> int:
    return int(target["spec"].get("replicas", 1))


def _port(target: Object, name: str) -> int | None:
    """Of the first container."""
    pod = target["spec"]["template"]["spec"]
    for port in pod["containers"][0].get("ports", []):
        if port.get("name") == name:
            return int(port["containerPort"])
    return None


def _address(spec: GateSpec, target: Object, ordinal: int) -> str:
    """Of a pod, by the name that its Service gives."""
    if spec.address is not None:
        return spec.address.replace("{ordinal}", str(ordinal))
    about, service = target["metadata"], target["spec"].get("serviceName")
    port = _port(target, "grpc")
    if not service or port is None:
        raise InvalidArgument(
            f"StatefulSet {about['name']}: it has no serviceName, or its "
            "first container no port with the name grpc; set spec.address"
        )
    host = f"{about['name']}-{ordinal}.{service}.{about['namespace']}.svc"
    return f"{host}:{port}"


def _seen(
    spec: GateSpec,
    target: Object,
    addresses: Sequence[str],
    found: dict[str, Answer | PersiaError],
) -> Servers:
    here = {a: one.here for a, one in found.items() if isinstance(one, Answer)}
    shards = {one.shards for one in found.values() if isinstance(one, Answer)}
    waits = next(
        (
            f"{one.by} moves shard {one.shard} of {a}: {one.text}"
            for a, one in found.items()
            if isinstance(one, Answer) and one.state == _core.MOVED_RUNNING
        ),
        "",
    )
    status = target.get("status", {})
    if status.get("observedGeneration", 0) < target["metadata"]["generation"]:
        waits = waits or "the controller of the StatefulSet follows"
    blocked = _blocked(spec, target)
    if not blocked and not here and found:
        address, error = next(iter(found.items()))
        blocked = f"no server answers; {address}: {error}"
    if len(shards) > 1:
        blocked = "the servers are of jobs with different numbers of shards"
    return Servers(addresses, here, max(shards, default=0), waits, blocked)


def _blocked(spec: GateSpec, target: Object) -> str:
    """Why the StatefulSet is to be left alone; "": it is not."""
    about, status = target["metadata"], target.get("status", {})
    if spec.paused:
        return "spec.paused is true"
    if about.get("deletionTimestamp"):
        return "the StatefulSet is being deleted"
    if status.get("currentRevision") != status.get("updateRevision"):
        return "the StatefulSet rolls out another template"
    return ""


def _load_of(
    step: Step,
    seen: Servers,
    spec: GateSpec,
    pages: Mapping[str, str],
) -> float | None:
    """For an autoscaler, from the load of the fullest server; None: one with
    shards does not say it."""
    if step.phase != Phase.STEADY:
        return 1.0
    loads = []
    for address, shards in seen.here.items():
        said = _LOAD.search(pages.get(address, ""))
        if said is None and shards:
            return None
        if said is not None:
            loads.append(float(said[1]))
    if not loads:
        return None
    count, load = len(seen.addresses), max(loads)
    want = wanted(count, load, spec.min, spec.max, seen.shards)
    return load_for(count, want, load)


def load_for(count: int, want: int, load: float) -> float:
    """The load that an autoscaler is to see, which knows nothing of shards:
    the nearest to the true one by which HPA's formula gives what is wanted.

    Args:
        count: servers that there are.
        want: servers that are wanted, by :func:`wanted`.
        load: of the fullest server.
    """
    if want == count:
        return load if wanted(count, load, 1, want + 1) == count else 1.0
    low, high = (want - 1 + _BETWEEN) / count, (want - _BETWEEN) / count
    return min(max(load, low), high)
