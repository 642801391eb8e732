"""``persia gate`` against a stand-in of a cluster, with servers that are
played: what it does, and what it never does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia import _core
from persia.distributed import write_certificates
from persia.distributed.load import SERVER, wanted
from persia.distributed.scaling import Answer, Move
from persia.errors import (
    AccessDenied,
    InvalidArgument,
    PersiaError,
    StorageError,
    Unavailable,
)
from persia.kubernetes.api import Api
from persia.kubernetes.gate import Gate, load_for
from tests.deploy.cluster import Cluster, Refused, StatefulSets, cluster
from tests.deploy.manifests import DEPLOY, Object

SHARDS = 8


def documents(path: str) -> list[Object]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def of(path: str, kind: str) -> Object:
    (found,) = (o for o in documents(path) if o["kind"] == kind)
    return dict(found)


CRD = of("gate/crd.yaml", "CustomResourceDefinition")
GATE = of("components/gate/gate.yaml", "ScaleGate")
ROLE = of("components/gate/gate.yaml", "Role")
SERVERS = of("base/servers.yaml", "StatefulSet")


class Servers:
    """They answer as parameter servers do.

    Attributes:
        here: the shards of each that runs, by its number.
        silent: those that do not answer now.
        move: the one that runs, with its number.
        between: is called after they were asked, and before the answers are
            used.
    """

    def __init__(self) -> None:
        self.here: dict[int, set[int]] = {}
        self.silent: set[int] = set()
        self.move: tuple[Move, int] | None = None
        self.between: Callable[[], None] | None = None
        self.moved = 0
        self.failed: dict[int, tuple[Move, int]] = {}
        self._number = 0

    def start(self, ordinal: int) -> None:
        first = ordinal * SHARDS // 2
        mine = range(first, first + SHARDS // 2) if ordinal < 2 else ()
        self.here[ordinal] = set(mine)

    def stop(self, ordinal: int) -> None:
        """No shard is lost with it."""
        assert not self.here.pop(ordinal)
        self.silent.discard(ordinal)
        if self.move is not None:
            assert ordinal not in ends(self.move[0])

    def step(self) -> None:
        """The move ends, if its servers are there."""
        if self.move is None:
            return
        move, _ = self.move
        source, target = ends(move)
        if self.here.keys() >= {source, target}:
            self.here[source].remove(move.shard)
            self.here[target].add(move.shard)
            self.moved += 1
        self.move = None

    def fail(self) -> None:
        """Its shard stays."""
        if self.move is not None:
            move, number = self.move
            self.failed[ends(move)[0]] = move, number
        self.move = None

    def begin(self, move: Move) -> None:
        source, target = ends(move)
        if self.move is not None:
            raise Unavailable("another one moves a shard")
        for ordinal in (source, target):
            if ordinal not in self.here or ordinal in self.silent:
                raise Unavailable(f"{ordinal} does not answer")
        if move.shard not in self.here[source]:
            raise InvalidArgument("it is not here")
        self._number += 1
        self.move = move, self._number


def ends(move: Move) -> tuple[int, int]:
    return ordinal_of(move.source), ordinal_of(move.target)


def ordinal_of(address: str) -> int:
    name, service, _, end = address.partition(":")[0].split(".")
    assert (service, end) == ("persia-ps", "svc")
    return int(name.removeprefix("persia-ps-"))


class Ways:
    """The way of a gate to them."""

    def __init__(
        self, servers: Servers, addresses: Sequence[str], namespace: str
    ) -> None:
        assert namespace == "default"
        self._servers, self._addresses = servers, addresses

    def look(self) -> dict[str, Answer | PersiaError]:
        found: dict[str, Answer | PersiaError] = {}
        for address in self._addresses:
            ordinal = ordinal_of(address)
            if ordinal not in self._servers.here or (
                ordinal in self._servers.silent
            ):
                found[address] = Unavailable("no answer")
                continue
            found[address] = self._answer(ordinal)
        between, self._servers.between = self._servers.between, None
        if between is not None:
            between()
        return found

    def _answer(self, ordinal: int) -> Answer:
        servers = self._servers
        state, last = _core.MOVED_NONE, servers.failed.get(ordinal)
        if last is not None:
            state = _core.MOVED_FAILED
        if servers.move is not None and ends(servers.move[0])[0] == ordinal:
            state, last = _core.MOVED_RUNNING, servers.move
        return Answer(
            here=sorted(servers.here[ordinal]),
            shards=SHARDS,
            state=state,
            shard=last[0].shard if last is not None else 0,
            id=last[1] if last is not None else 0,
            by="a gate",
            text="why",
        )

    def settle(self, found: Any) -> None:
        pass

    def begin(self, move: Move) -> None:
        self._servers.begin(move)

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Job:
    """A cluster, its servers, and the gates."""

    cluster: Cluster
    servers: Servers
    controller: StatefulSets
    now: float = 0.0
    loads: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gates = [self.make_gate(name) for name in ("a", "b")]

    def make_gate(self, who: str) -> Gate:
        return Gate(
            Api(self.cluster.url, timeout=0.5),
            *("persia", "persia-ps", who),
            connect=lambda *how: Ways(self.servers, *how),
            page=lambda url: self.loads.get(url, ""),
            clock=lambda: self.now,
        )

    def look(self, which: int = 0) -> None:
        self.now += 5.0
        self.gates[which].look()

    def settle(self, most: int = 200) -> None:
        """Until nothing has changed for longer than another gate acts."""
        quiet = 0
        for _ in range(most):
            before = self.state()
            self.look()
            self.controller.step()
            self.servers.step()
            same = self.state() == before and self.phase == "Steady"
            quiet = quiet + 1 if same else 0
            if quiet > 4:
                return
        raise AssertionError(self.status)

    def state(self) -> object:
        spec = self.cluster.get("statefulsets", "persia-ps")["spec"]
        here = {k: frozenset(v) for k, v in self.servers.here.items()}
        return spec["replicas"], here, self.servers.move

    def want(self, replicas: int) -> None:
        self.cluster.scale("scalegates", "persia-ps", replicas)

    @property
    def status(self) -> Object:
        made = self.cluster.get("scalegates", "persia-ps")
        return dict(made.get("status", {}))

    @property
    def phase(self) -> str:
        return str(self.status.get("phase"))

    @property
    def count(self) -> int:
        made = self.cluster.get("statefulsets", "persia-ps")
        return int(made["spec"]["replicas"])

    @property
    def sizes(self) -> list[int]:
        return [len(self.servers.here[i]) for i in sorted(self.servers.here)]


def made(here: Cluster, **spec: Any) -> Job:
    gate = GATE | {"spec": GATE["spec"] | {"min": 2} | spec}
    gate["metadata"] = GATE["metadata"] | {"namespace": "persia"}
    here.add("scalegates", gate)
    target = dict(SERVERS)
    target["spec"] = {**SERVERS["spec"], "replicas": 2}
    target["metadata"] = {**SERVERS["metadata"], "namespace": "persia"}
    here.add("statefulsets", target)
    servers = Servers()
    controller = StatefulSets(here, "persia-ps", servers.start, servers.stop)
    controller.step()
    return Job(here, servers, controller)


@pytest.fixture
def job() -> Iterator[Job]:
    with cluster([CRD], ROLE) as here:
        yield made(here)


def test_servers_grow_and_shrink(job: Job) -> None:
    job.settle()
    assert (job.count, job.sizes) == (2, [4, 4])
    job.want(4)
    job.settle()
    assert (job.count, job.sizes) == (4, [2, 2, 2, 2])
    assert job.servers.moved == 4
    job.want(2)
    job.settle()
    assert (job.count, job.sizes) == (2, [4, 4])
    assert job.servers.moved == 8
    assert set(job.cluster.requests) == {
        ("get", "scalegates"),
        ("update", "scalegates/status"),
        ("get", "statefulsets"),
        ("update", "statefulsets/scale"),
    }


def test_a_status_says_what_happens(job: Job) -> None:
    job.want(4)
    job.look()
    assert job.phase == "Growing" and job.status["replicas"] == 2
    job.controller.step()
    job.loads = {
        f"http://persia-ps-{i}.persia-ps.persia.svc:9100/metrics": (
            f'persia_shard_bytes{{namespace="n",shard="{i}",shards="8"}} '
            "700.0\n"
            'persia_load{role="server"} 1.05\n'
        )
        for i in range(4)
    }
    job.look()
    first = job.status
    assert (first["phase"], first["shardsLeft"]) == ("Moving", 4)
    assert first["bytesLeft"] == 1400  # of shards 2 and 3
    assert first["selector"] == "app.kubernetes.io/component=ps"
    scale = job.cluster.answer(
        "GET",
        "/apis/apps/v1/namespaces/persia/statefulsets/persia-ps",
        None,
    )
    assert scale["spec"]["replicas"] == 4
    # While shards move an autoscaler is to ask for no more.
    assert job.gates[0].load == 1.0
    job.look()
    assert job.servers.move is not None and job.status["shardsLeft"] == 4
    job.settle()
    assert job.gates[0].load == 1.05
    assert {m.name: m.samples[0] for m in job.gates[0].collect()}[
        "persia_load"
    ].labels == {"role": SERVER}


def test_limits_hold_whatever_is_wanted(job: Job) -> None:
    job.want(1)
    job.settle()
    assert job.count == 2
    job.want(100)
    job.settle()
    assert (job.count, job.sizes) == (8, [1] * 8)


def test_a_dry_run_changes_nothing(job: Job) -> None:
    def change(gate: Object) -> None:
        gate["spec"] |= {"dryRun": True, "replicas": 4}

    job.cluster.change("scalegates", "persia-ps", change)
    for _ in range(3):
        job.look()
    assert job.count == 2 and job.phase == "Growing"


@pytest.mark.parametrize(
    "change",
    [
        {"paused": True},
        {"currentRevision": "0"},
    ],
)
def test_what_forbids_a_change(job: Job, change: dict[str, Any]) -> None:
    job.want(4)
    if "paused" in change:
        job.cluster.change(
            "scalegates", "persia-ps", lambda gate: gate["spec"].update(change)
        )
    else:
        job.cluster.set_status("statefulsets", "persia-ps", **change)
    job.look()
    assert job.count == 2 and job.phase == "Blocked"


def test_servers_that_others_have_added_are_drained(job: Job) -> None:
    job.settle()
    job.cluster.scale("statefulsets", "persia-ps", 3)
    job.settle()
    assert (job.count, job.sizes) == (2, [4, 4])


def test_stopped_servers_stay_stopped(job: Job) -> None:
    job.settle()
    job.servers.here = {0: set(), 1: set()}
    job.cluster.scale("statefulsets", "persia-ps", 0)
    for _ in range(3):
        job.controller.step()
        job.look()
    assert job.count == 0 and not job.controller.pods


def test_a_pod_that_never_starts_can_be_given_up(job: Job) -> None:
    job.want(4)
    job.look()
    job.controller.step()
    job.servers.silent = {3}
    for _ in range(5):
        job.look()
        job.servers.step()
    assert job.count == 4 and job.sizes == [4, 4, 0, 0]
    job.want(2)
    job.settle()
    assert job.count == 2


def test_a_move_that_fails_is_made_again_later(job: Job) -> None:
    """Each one copies a shard."""
    job.want(4)
    job.look()
    job.controller.step()
    job.look()
    assert job.servers.move is not None
    job.servers.fail()
    for _ in range(5):
        job.look()
        assert job.servers.move is None
        assert "why" in job.status["message"]
    job.look()
    job.look()
    assert job.servers.move is not None
    job.settle()
    assert job.sizes == [2, 2, 2, 2]


def test_an_autoscaler_does_not_run_away(job: Job) -> None:
    """HPA asks all the time, by the gauge of the gate. Each server is full
    with four shards, and has 0.4 of the right size a shard."""
    for _ in range(100):
        job.loads = {
            f"http://persia-ps-{i}.persia-ps.persia.svc:9100/metrics": (
                f'persia_load{{role="server"}} {0.4 * len(here)}\n'
            )
            for i, here in job.servers.here.items()
        }
        job.look()
        load = job.gates[0].load
        if load is not None:
            spec = job.cluster.get("scalegates", "persia-ps")["spec"]
            job.want(wanted(max(spec["replicas"], 2), load, 2, 8))
        job.controller.step()
        job.servers.step()
    assert (job.count, job.sizes) == (4, [2, 2, 2, 2])


@given(st.integers(1, 64), st.floats(0, 5), st.integers(0, 64))
def test_an_autoscaler_counts_whole_shards(
    count: int, load: float, more: int
) -> None:
    """By HPA's formula alone it gets the number that we would take, or none
    that is within a tenth."""
    want = wanted(count, load, 1, 64, count + more)
    seen = load_for(count, want, load)
    found = wanted(count, seen, 1, 64)
    assert found == want or (found == count and 0.9 * count < want)


def test_a_second_gate_waits_for_the_first(job: Job) -> None:
    job.want(4)
    job.look(0)
    job.controller.step()
    for _ in range(5):
        job.look(1)
    assert job.servers.move is not None  # the first one is silent for 15 s
    assert job.status["holder"] == "b"
    job.look(0)
    assert job.status["holder"] == "b"
    assert job.gates[0].load is None  # an autoscaler is to ask the other one
    job.gates[1].close()
    job.look(0)
    assert job.status["holder"] == "a"


def empty_last(job: Job) -> None:
    """Three servers; the last one has no shard, and is to end."""
    job.want(3)
    job.settle()
    job.want(2)
    while job.sizes[-1]:
        job.look()
        job.servers.step()


def test_a_gate_that_was_overtaken_does_nothing(job: Job) -> None:
    """It would end a server that another gate has given a shard since."""
    empty_last(job)
    job.gates[1].look()  # it sees the other one for the last time
    job.now += 20.0

    def other() -> None:
        job.want(3)
        job.gates[1].look()
        assert job.servers.move is not None
        job.servers.step()

    job.servers.between = other
    job.gates[0].look()
    job.controller.step()
    assert job.count == 3 and job.sizes[-1] == 1


def test_a_gate_that_looks_slowly_acts(job: Job) -> None:
    """As on a machine with too much to do, or beside silent servers."""
    empty_last(job)

    def slow() -> None:
        job.now += 60.0

    job.servers.between = slow
    job.look()
    job.controller.step()
    assert job.count == 2


def test_a_gate_whose_status_was_slow_does_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gate may act by then."""
    empty_last(job)
    put = Api.put

    def slow(self: Api, path: str, body: Object) -> Object:
        job.now += 20.0 if path.endswith("/status") else 0.0
        return put(self, path, body)

    with monkeypatch.context() as slowly:
        slowly.setattr(Api, "put", slow)
        job.look()
    assert job.count == 3
    job.look()
    assert job.count == 2


def test_a_number_that_has_changed_is_not_replaced(job: Job) -> None:
    empty_last(job)
    job.servers.between = lambda: job.cluster.scale(
        "statefulsets", "persia-ps", 5
    )
    job.look()
    assert job.count == 5


@pytest.mark.parametrize("fault", [401, 403, 404, 409, 410, 422, 429, 500])
@pytest.mark.parametrize("at", range(4))
def test_faults_of_the_api_change_nothing(
    job: Job, fault: int, at: int
) -> None:
    """The next look does what the failed one did not."""
    job.want(4)
    job.cluster.faults.extend([*[None] * at, fault])
    job.look()
    assert job.count == 2
    assert job.gates[0].load is None
    job.settle()
    assert (job.count, job.sizes) == (4, [2, 2, 2, 2])


@pytest.mark.parametrize("at", range(4))
def test_an_api_that_hangs_is_given_up(job: Job, at: int) -> None:
    job.want(4)
    job.cluster.faults.extend([*[None] * at, "hang"])
    job.look()
    assert job.count == 2
    job.settle()
    assert job.count == 4


def test_another_role_is_not_enough() -> None:
    """Of the rules each one is needed."""
    for i in range(len(ROLE["rules"])):
        rules = [r for k, r in enumerate(ROLE["rules"]) if k != i]
        with cluster([CRD], ROLE | {"rules": rules}) as here:
            job = made(here)
            job.want(4)
            job.look()
            assert job.count == 2


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:port"])
def test_an_api_server_has_a_url(url: str) -> None:
    with pytest.raises(InvalidArgument):
        Api(url)


def test_a_pod_asks_with_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By https, with a token that is renewed."""
    write_certificates(tmp_path, ["127.0.0.1"])
    (tmp_path / "ca.crt").symlink_to(tmp_path / "ca.pem")
    monkeypatch.setattr("persia.kubernetes.api.ACCOUNT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidArgument):
        Api.of_pod()
    path = "/apis/apps/v1/namespaces/persia/statefulsets/persia-ps"
    with cluster([CRD], None, tmp_path) as here:
        made(here)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(here.port))
        api = Api.of_pod()
        assert api.get(path)["metadata"]["name"] == "persia-ps"
        good = (tmp_path / "token").read_text()
        (tmp_path / "token").write_text("old\n")
        with pytest.raises(AccessDenied):
            api.get(path)
        (tmp_path / "token").write_text(good)
        api.get(path)
        (tmp_path / "ca.crt").unlink()
        write_certificates(tmp_path / "other", ["127.0.0.1"])
        (tmp_path / "ca.crt").symlink_to(tmp_path / "other" / "ca.pem")
        with pytest.raises(Unavailable):
            api.get(path)
        (tmp_path / "token").unlink()
        with pytest.raises(StorageError):
            api.get(path)


def test_the_schema_refuses_what_makes_no_sense(job: Job) -> None:
    for spec in (
        {"replicas": 0},
        {"min": 0},
        {"max": 5000},
        {"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment"}},
        {"address": 1},
    ):
        with pytest.raises(Refused) as refused:
            job.cluster.change(
                *("scalegates", "persia-ps"),
                lambda gate, spec=spec: gate["spec"].update(spec),
            )
        assert refused.value.status == 422


actions = st.lists(
    st.one_of(
        st.tuples(st.just("look"), st.integers(0, 1)),
        st.tuples(st.just("between"), st.integers(0, 1)),
        st.tuples(st.just("want"), st.integers(1, 6)),
        st.tuples(st.just("raise"), st.integers(1, 6)),
        st.tuples(st.just("silent"), st.integers(0, 5)),
        st.tuples(st.just("answers"), st.integers(0, 5)),
        st.tuples(st.just("fault"), st.sampled_from([409, 410, 500])),
        st.tuples(st.just("late"), st.integers(1, 30)),
        st.tuples(
            st.sampled_from(["controller", "move", "fails", "new gate"]),
            st.just(0),
        ),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(actions)
def test_whatever_happens_no_shard_is_lost(
    seen: list[tuple[str, int]],
) -> None:
    """Two gates, faults, kills, servers that come and go: no server ends that
    has a shard; then all is as it is wanted."""
    with cluster([CRD], ROLE) as here:
        job = made(here)
        for action, n in seen:
            act(job, action, n)
            spread = sorted(
                s for some in job.servers.here.values() for s in some
            )
            assert spread == list(range(SHARDS))
        job.cluster.faults.clear()
        job.servers.silent.clear()
        job.servers.failed.clear()
        job.servers.between = None
        job.now += 60.0
        job.want(3)
        job.settle()
        assert (job.count, sum(job.sizes)) == (3, SHARDS)
        assert max(job.sizes) - min(job.sizes) <= 1


def act(job: Job, action: str, n: int) -> None:
    match action:
        case "look":
            job.look(n)
        case "between":
            job.servers.between = lambda: job.look(n)
        case "want":
            job.want(n)
        case "raise":
            job.cluster.scale("statefulsets", "persia-ps", max(n, job.count))
        case "silent":
            job.servers.silent.add(n)
        case "answers":
            job.servers.silent.discard(n)
        case "fault":
            job.cluster.faults.append(n)
        case "late":
            job.now += n
        case "controller":
            job.controller.step()
        case "move":
            job.servers.step()
        case "fails":
            job.servers.fail()
        case "new gate":
            job.gates[0] = job.make_gate("c")
