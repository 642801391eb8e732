"""How many processes a role needs, by its load. The oracle of the formula is
the text of Kubernetes' documentation."""

from __future__ import annotations

import contextlib
import http.server
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.distributed.autoscale import Autoscaler, last_decisions
from persia.distributed.load import (
    LOADER,
    SERVER,
    WINDOW,
    WORKER,
    Decision,
    Limits,
    LoadWindow,
    Look,
    ServerWindow,
    plan,
    wanted,
)
from persia.errors import StorageError


@pytest.mark.parametrize(
    ("count", "load", "want"),
    [
        (1, 2.0, 2),  # ceil(current * value / target)
        (3, 0.5, 2),
        (4, 1.05, 4),  # within the tolerance of a tenth
        (4, 0.95, 4),
        (4, 1.2, 5),
        (2, 0.0, 1),  # not below the least
        (3, 9.0, 8),  # not above the most
    ],
)
def test_the_formula(count: int, load: float, want: int) -> None:
    assert wanted(count, load, 1, 8) == want


@pytest.mark.parametrize(
    ("count", "load", "shards", "want"),
    [
        (11, 0.89, 32, 11),  # the fullest has 3 shards, and would have 4
        (12, 0.89, 32, 11),  # it has 3, and keeps 3
        (8, 1.11, 32, 11),  # it has 4, also with 9 or 10
        (2, 0.3, 8, 1),
        (4, 1.05, 7, 4),
        (4, 1.5, 8, 8),  # none has less than a shard
        (3, 1.2, 4, 4),
        (2, 9.0, 64, 16),
    ],
)
def test_shards_are_whole(
    count: int, load: float, shards: int, want: int
) -> None:
    assert wanted(count, load, 1, 16, shards) == want


@given(st.integers(1, 64), st.floats(0, 3), st.integers(1, 512))
def test_fewer_servers_hold_what_there_is(
    count: int, load: float, shards: int
) -> None:
    count = min(count, shards)
    plain = wanted(count, load, 1, 64)
    found = wanted(count, load, 1, 64, shards)
    assert plain <= found <= 64 and (plain > count) == (found > count)
    if found < count:
        fullest = math.ceil(shards / found) / math.ceil(shards / count)
        assert fullest * load <= 1
        assert Decision(SERVER, count, found, load, shards).foreseen <= 1


LIMITS = Limits(2, 5, out=20, into=50)
loads = st.lists(st.floats(0, 3), min_size=1, max_size=200)


def looks(role: str, seen: Sequence[float]) -> list[Look]:
    """Every five seconds."""
    return [Look(5.0 * i, {role: load}) for i, load in enumerate(seen)]


@given(loads)
def test_a_plan_keeps_its_limits_and_its_windows(seen: list[float]) -> None:
    """One change a window, in the direction of all that was wanted in it."""
    count, last, since = 2, 0.0, 0
    for i in range(len(seen)):
        now, all_of = 5.0 * i, looks(LOADER, seen)[since : i + 1]
        decision = plan(all_of, {LOADER: count}, {LOADER: LIMITS})
        if decision is None:
            continue
        assert 2 <= decision.after <= 5
        out = decision.after > decision.before == count
        window = 20 if out else 50
        assert now - last >= window or not last
        recent = [
            wanted(count, seen[k], 2, 5)
            for k in range(since, i + 1)
            if now - window <= 5.0 * k
        ]
        assert (min if out else max)(recent) == decision.after
        count, last, since = decision.after, now, i + 1


roles = st.sampled_from([SERVER, WORKER, LOADER])


@given(
    st.lists(st.dictionaries(roles, st.floats(0, 4)), max_size=40),
    st.dictionaries(roles, st.integers(1, 5), min_size=1),
    st.integers(1, 15),
)
def test_a_plan_of_several_roles(
    seen: list[dict[str, float]], counts: dict[str, int], budget: int
) -> None:
    """It is a function of what was seen, keeps to the budget and limits, and
    a server that needs more goes first."""
    spec = {role: Limits(1, 6, 10, 20) for role in counts}
    all_of = [Look(5.0 * i, one) for i, one in enumerate(seen)]
    decision = plan(all_of, counts, spec, budget)
    assert decision == plan(list(all_of), dict(counts), spec, budget)
    alone = [
        plan(all_of, counts, {role: limits}, budget)
        for role, limits in spec.items()
    ]
    assert (decision is None) == (not any(alone))
    if decision is None:
        return
    assert decision in alone
    grows = decision.after > decision.before
    if grows:
        more = decision.after - decision.before
        assert sum(counts.values()) + more <= budget
    out = [d for d in alone if d is not None and d.after > d.before]
    assert grows == bool(out)
    if any(d.role == SERVER for d in out):
        assert decision.role == SERVER
    elif out:
        assert decision.load == max(d.load for d in out)


def test_a_peak_changes_nothing() -> None:
    seen = [1.0, 2.0, 2.0, 1.0, 2.0, 0.2, 1.0, 0.2] * 10
    limits = Limits(1, 4, out=20, into=50)
    for i in range(len(seen)):
        found = looks(LOADER, seen)[: i + 1]
        assert plan(found, {LOADER: 2}, {LOADER: limits}) is None


def test_silence_is_no_load() -> None:
    """What no process says for a while counts as nothing: a window begins."""
    limits = {LOADER: Limits(1, 4, out=20, into=50)}
    seen = looks(LOADER, [2.0] * 5)
    assert plan(seen, {LOADER: 1}, limits) == Decision(LOADER, 1, 2, 2.0)
    seen += [Look(25.0, {}), Look(30.0, {LOADER: 2.0})]
    assert plan(seen, {LOADER: 1}, limits) is None
    assert plan(seen[:5], {}, limits) is None


def test_calls_that_wait_are_a_load() -> None:
    """The share of their time before their work begins, of threads that are
    at work."""
    window = ServerWindow(threads=4)
    window.add(0.0, 0.0, 0.0, 0.0, 0, 0)
    half, _ = window.add(1.0, 0.0, 0.0, 0.0, 0, 0, waited=4.0, worked=4.0)
    assert half == pytest.approx(1.0)
    # Half of the threads, and calls wait for a third of their time.
    third, _ = window.add(2.0, 0.0, 0.0, 0.0, 0, 0, waited=4.0, worked=8.0)
    assert third == pytest.approx(1 / 3 / 0.5)
    idle = ServerWindow(threads=4)
    idle.add(0.0, 0.0, 0.0, 0.0, 0, 0)
    none, _ = idle.add(1.0, 0.0, 0.0, 0.0, 0, 0, waited=0.04, worked=0.04)
    assert none == pytest.approx(0.01)
    assert idle.add(2.0, 1.6, 0.0, 0.0, 0, 0, 0.04, 0.04)[0] >= 0.99


@given(
    st.lists(
        st.tuples(st.floats(0.5, 9), st.integers(0, 1000)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 10**6),
)
def test_the_load_of_a_server(
    steps: list[tuple[float, int]], limit: int
) -> None:
    """The share of its memory in a minute, at 10 bytes a row, against sums of
    the rows that were made within the window; a shard that leaves begins
    another one."""
    window, now, rows = ServerWindow(), 0.0, 0
    at = [(0.0, 0)]
    load, growth = window.add(now, 0.0, 0.0, float(limit), 0, 0)
    assert (load, growth) == (0.0, 0.0)
    for span, made in steps:
        now, rows = now + span, rows + made
        at.append((now, rows))
        load, growth = window.add(now, 0.0, 10.0 * rows, limit, rows, rows)
        older = [one for one in at[:-1] if one[0] <= now - WINDOW]
        then, before = older[-1] if older else at[0]
        mean = 10 * (rows - before) / (now - then)
        assert growth == pytest.approx(mean, abs=1e-6)
        soon = (10 * rows + 60 * mean) / (0.85 * limit)
        assert load == pytest.approx(soon)
    gone = window.add(now + 1, 0.0, 5.0, 0.0, 1, rows - 1)
    assert gone == (0.0, 0.0)
    busy, _ = window.add(now + 2, 0.8, 5.0, 0.0, 1, rows - 1)
    assert busy == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.floats(0.1, 9), st.floats(0, 1), st.floats(0, 1))),
)
def test_loads_are_shares_of_the_window(
    steps: list[tuple[float, float, float]],
) -> None:
    """Against sums of the steps that the window holds."""
    window, now, starved, blocked = LoadWindow(), 0.0, 0.0, 0.0
    counters = {"starved_ns": 0.0, "blocked_ns": 0.0}
    assert window.add(now, counters, 0.0)["loader"] == 1.0
    at = [(0.0, 0.0, 0.0)]
    for span, e, b in steps:
        now, starved, blocked = (
            now + span,
            starved + e * span,
            blocked + b * span,
        )
        at.append((now, starved, blocked))
        found = window.add(
            now, {"starved_ns": starved * 1e9, "blocked_ns": blocked * 1e9}, 0
        )
        older = [one for one in at[:-1] if one[0] <= now - WINDOW]
        then, before, held = older[-1] if older else at[0]
        share = (starved - before - blocked + held) / (now - then)
        assert found["loader"] == pytest.approx(1 + share, abs=1e-6)
        assert found["trainer"] == pytest.approx(1 - share, abs=1e-6)
        assert found["embedding-worker"] == 0.0


@contextlib.contextmanager
def worker(load: float) -> Iterator[int]:
    """Answers as the metrics of an embedding worker do."""
    text = (
        f'persia_load{{role="loader"}} {load}\n'
        "persia_embedding_worker_trained_total 7.0\n"
    )

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_workers_are_asked(tmp_path: Path) -> None:
    """The mean of those that answer, once all loaders send."""
    log = tmp_path / "decisions"
    with pytest.raises(StorageError):
        last_decisions(log, 3)
    with worker(1.6) as one, worker(2.4) as two:
        spec = {LOADER: Limits(1, 4, out=0, into=0)}
        scaler = Autoscaler(spec, log=log)
        counts = {LOADER: 1}
        assert scaler.ask([one, two, 1], counts, ready=False) == []
        assert scaler.ask([one, two], counts, ready=True) == []  # not yet
        scaler.due = 0
        want = Decision(LOADER, 1, 2, 2.0)
        assert scaler.ask([one, two, 1], counts, ready=True) == [want]
        assert "loaders stay at 1" in scaler.failed(want, "no room")
        dry = Autoscaler(spec, dry=True)
        (said,) = dry.ask([one, two], counts, ready=True)
        assert said == f"{want} (dry run)"
        lost = Autoscaler(spec, log=tmp_path)  # which takes no line
        assert lost.ask([one, two], counts, ready=True) == [want]
    first, second = last_decisions(log, 3)
    assert first["text"] == str(want)
    assert (second["role"], second["failed"]) == (LOADER, "no room")
    log.write_text("[1]\n{")
    with pytest.raises(StorageError):
        last_decisions(log, 3)
