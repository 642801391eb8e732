"""The drawing of what the model has found."""

from __future__ import annotations

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
    left.set(xlabel="servers", ylabel="million samples/s")
    left.legend()
    for (fresh, together), points in grown.items():
        some = [p for p in points if p.moving or p in (points[0], points[-1])]
        (line,) = right.loglog(
            [max(fresh * p.samples * DIM / 1e12, 1e-3) for p in some],
            [p.servers for p in some],
            linestyle="-" if together else ":",
            label=f"{fresh} new rows a sample"
            + ("" if together else ", one move at a time"),
        )
        if points[-1].fullest > 1:
            right.plot(
                fresh * points[-1].samples * DIM / 1e12,
                points[-1].servers,
                "x",
                color=line.get_color(),
            )
    right.set(
        xlabel="parameters, 10^12; x: a server is full", ylabel="servers"
    )
    right.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
