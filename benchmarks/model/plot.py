"""The drawing of what the model has found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.common import BATCH
from benchmarks.model.events import Result
from benchmarks.model.growth import Point

DIM = 64  # of a row


def draw(
    path: str,
    servers: Sequence[int],
    scaled: Mapping[int, Sequence[Result]],
    grown: Mapping[tuple[float, bool], Sequence[Point]],
) -> None:
    """Draws it.

    Args:
        path: of the file.
        servers: of each result.
        scaled: results, by the number of ranks.
        grown: the growing job, by the rows that a sample makes, and whether
            moves are made side by side.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "persia"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for ranks, results in scaled.items():
        rates = [r.steps * BATCH / 1e6 for r in results]
        left.loglog(servers, rates, marker="o", label=f"{ranks:,} ranks")
    left.axhline(1.91, linestyle="--", color="gray")
    left.annotate("the paper, 100 T parameters", (servers[0], 2.05))
    left.set(xlabel="servers", ylabel="million samples per second")
    left.legend()
    colors = {fresh: f"C{i}" for i, (fresh, _) in enumerate(grown)}
    for (fresh, together), points in grown.items():
        most: dict[float, float] = {}  # by the parameters, in 10^12
        for p in points:
            log = math.log10(fresh * p.samples * DIM / 1e12)
            at = 10 ** round(log, 1)
            most[at] = max(most.get(at, 0.0), p.fullest)
        right.semilogx(
            list(most),
            list(most.values()),
            linestyle="-" if together else ":",
            color=colors[fresh],
            label=f"{fresh} new rows per sample"
            + ("" if together else ", one move at a time"),
        )
        if points[-1].fullest > 1:
            right.plot([at], [1], "x", color=colors[fresh])
    right.set(
        xlabel="parameters, $10^{12}$; x: a server is full",
        ylabel="memory of the fullest server",
        xlim=(0.5, 110),
        ylim=(0.5, 1.05),
    )
    right.legend(fontsize="x-small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
