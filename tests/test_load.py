"""How many processes a role needs, by its load. The oracle of the formula is
the text of Kubernetes' documentation."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.distributed.autoscale import Autoscaler
from persia.distributed.load import (
    WINDOW,
    Decision,
    LoadWindow,
    Scaler,
    wanted,
)


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


loads = st.lists(st.floats(0, 3), min_size=1, max_size=200)


@given(loads)
def test_a_scaler_keeps_its_limits_and_its_windows(seen: list[float]) -> None:
    """One change a window, in the direction of all that was wanted in it."""
    scaler, count, last = Scaler("loader", 2, 5, out=20, into=50), 2, 0.0
    for i, load in enumerate(seen):
        now = 5.0 * i
        decision = scaler.decide(now, count, [load])
        if decision is None:
            continue
        assert 2 <= decision.after <= 5
        out = decision.after > decision.before == count
        window = 20 if out else 50
        assert now - last >= window
        recent = [
            wanted(count, seen[k], 2, 5)
            for k in range(i + 1)
            if now - window <= 5.0 * k
        ]
        assert (min if out else max)(recent) == decision.after
        count, last = decision.after, now


def test_a_peak_changes_nothing() -> None:
    scaler = Scaler("loader", 1, 4, out=20, into=50)
    seen = [1.0, 2.0, 2.0, 1.0, 2.0, 0.2, 1.0, 0.2] * 10
    assert not any(
        scaler.decide(5.0 * i, 2, [load]) for i, load in enumerate(seen)
    )


def test_silence_is_no_load() -> None:
    """What no worker says for a while counts as nothing: a window begins."""
    scaler = Scaler("loader", 1, 4, out=20, into=50)
    for i in range(4):
        assert scaler.decide(5.0 * i, 1, [2.0]) is None
    assert scaler.decide(20.0, 1, []) is None
    assert scaler.decide(25.0, 1, [2.0]) is None


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


def test_workers_are_asked() -> None:
    """The mean of those that answer, once all loaders send."""
    with worker(1.6) as one, worker(2.4) as two:
        scaler = Autoscaler(1, 4, out=0, into=0)
        assert scaler.ask([one, two, 1], 1, ready=False) == []
        assert scaler.ask([one, two], 1, ready=True) == []  # not yet again
        scaler.due = 0
        assert scaler.ask([one, two, 1], 1, ready=True) == [
            Decision("loader", 1, 2, 2.0)
        ]
