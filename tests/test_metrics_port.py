"""The port of metrics and probes."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from persia.base.health import LIVE, PATHS, READY, STARTUP, Health
from persia.prometheus import Page


class One:
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("persia_one", "One.", value=1)


def ask(page: Page, path: str) -> tuple[int, bytes]:
    """The status and the text of an answer."""
    try:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{page.port}{path}")
    except urllib.error.HTTPError as error:
        answer = error
    with contextlib.closing(answer):
        return answer.status, answer.read()


def test_only_the_path_of_metrics_has_them() -> None:
    page = Page(0, "127.0.0.1", Health())
    page.add(One())
    status, text = ask(page, "/metrics")
    assert status == 200 and b"persia_one 1.0" in text
    for path in (
        "",
        "/",
        "/healthz",
        "/health",
        "/health/live/",
        "/metrics/x",
        "/%2e%2e/metrics",
    ):
        status, text = ask(page, path)
        assert status == 404 and b"persia_one" not in text


@pytest.mark.parametrize(
    ("state", "statuses"),
    [
        ("starts", {LIVE: 200, STARTUP: 503, READY: 503}),
        ("serves", {LIVE: 200, STARTUP: 200, READY: 200}),
        ("ends", {LIVE: 200, STARTUP: 200, READY: 503}),
    ],
)
def test_probes_tell_start_service_and_end_apart(
    state: str, statuses: dict[str, int]
) -> None:
    health = Health()
    page = Page(0, "127.0.0.1", health)
    if state != "starts":
        health.serves()
    if state == "ends":
        health.ends()
    assert set(statuses) == set(PATHS)
    assert {path: ask(page, path)[0] for path in PATHS} == statuses
