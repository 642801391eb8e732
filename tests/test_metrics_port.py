"""The port of metrics."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from persia import prometheus


class One:
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("persia_one", "One.", value=1)


def test_only_the_path_of_metrics_has_them() -> None:
    port = prometheus.listen(One(), 0, "127.0.0.1")
    address = f"http://127.0.0.1:{port}"
    with contextlib.closing(urllib.request.urlopen(f"{address}/metrics")) as p:
        assert p.status == 200 and b"persia_one 1.0" in p.read()
    for path in (
        "",
        "/",
        "/healthz",
        "/ready",
        "/metrics/x",
        "/%2e%2e/metrics",
    ):
        with pytest.raises(urllib.error.HTTPError) as info:
            urllib.request.urlopen(f"{address}{path}")
        with info.value as page:
            assert page.code == 404 and b"persia_one" not in page.read()
