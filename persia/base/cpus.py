"""The processors that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def text_of(path: Path) -> str:
    """Of a file of the kernel, without the end of its line; "" where there is
    none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPUs that the container of this process may use, in cores.

    Args:
        root: where ``proc`` and ``sys`` lie.

    Returns:
        The smallest quota from its cgroup up, or None: there is none.
    """
    quotas = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if kinds else "")
        inner = base / path.strip("/")
        for folder in (inner, *inner.parents):
            if kinds:
                quota = text_of(folder / "cpu.cfs_quota_us")
                period = text_of(folder / "cpu.cfs_period_us")
            else:
                quota, _, period = text_of(folder / "cpu.max").partition(" ")
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
            if folder == base:
                break
    return min(quotas, default=None)


def processors(root: Path = Path("/")) -> float:
    """In cores: those of its affinity, and no more than its quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota = cpu_quota(root)
    return allowed if quota is None else min(allowed, quota)
