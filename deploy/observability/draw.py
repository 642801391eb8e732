"""Draws the dashboards without Grafana: each panel as a PNG, with what a
Prometheus has kept.

    python deploy/observability/draw.py http://localhost:9090 --minutes 60
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib.dates
import matplotlib.pyplot as plt
import observability
from observability import Panel

_STEPS = 200  # in a picture


def legend_of(form: str, labels: dict[str, str]) -> str:
    """The legend of a series, as Grafana makes it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), form)


def ranges(url: str, expr: str, seconds: float) -> list[dict[str, Any]]:
    """The series of an expression, from so many seconds ago until now.

    Raises:
        urllib.error.URLError: that Prometheus does not answer.
    """
    now = time.time()
    asked = {
        "query": expr,
        "start": now - seconds,
        "end": now,
        "step": max(1.0, seconds / _STEPS),
    }
    query = urllib.parse.urlencode(asked)
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}") as page:
        found: list[dict[str, Any]] = json.load(page)["data"]["result"]
    return found


def draw(url: str, panel: Panel, seconds: float, path: Path) -> int:
    """Draws a panel; how many series it has.

    Args:
        url: of a Prometheus.
        panel: of a dashboard.
        seconds: until now.
        path: of the picture.
    """
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    count = 0
    for expr, legend in panel.series:
        for one in ranges(url, expr, seconds):
            times, values = zip(*one["values"], strict=True)
            axes.plot(
                [datetime.datetime.fromtimestamp(t) for t in times],
                [float(v) for v in values],
                label=legend_of(legend, one["metric"]),
            )
            count += 1
    axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M:%S"))
    axes.set_title(panel.title)
    axes.set_ylabel(panel.unit)
    if count:
        axes.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)
    return count


def draw_all(url: str, seconds: float, folder: Path) -> dict[Path, int]:
    """Draws all panels into a folder; the series of each picture."""
    plt.switch_backend("Agg")
    found = {}
    for name, panels in observability.DASHBOARDS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, panel in enumerate(panels, 1):
            words = "-".join(re.findall(r"[a-z0-9]+", panel.title.lower()))
            path = folder / name / f"{number:02d}-{words}.png"
            found[path] = draw(url, panel, seconds, path)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the Prometheus")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path("panels"))
    given = parser.parse_args()
    made = draw_all(given.url.rstrip("/"), given.minutes * 60, given.out)
    for path, series in made.items():
        print(f"{path}: {series} series")
