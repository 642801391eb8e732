"""Where Persia runs: a module of its own, which setup.py runs as a file."""

from __future__ import annotations

import os
import sys

_MACHINES = "x86_64", "amd64"


def unsupported(
    system: str | None = None,
    machine: str | None = None,
    python: tuple[int, ...] | None = None,
) -> str | None:
    """Why Persia does not run here, in one sentence; None where it does.

    Args:
        system: as ``sys.platform`` (default: this one).
        machine: as ``os.uname().machine`` (default: this one).
        python: its version (default: of this Python).
    """
    system = sys.platform if system is None else system
    if machine is None:
        # Windows has no uname.
        machine = os.uname().machine if hasattr(os, "uname") else "unknown"
    version = (sys.version_info[:2] if python is None else python)[:2]
    if (
        system == "linux"
        and machine.lower() in _MACHINES
        and version >= (3, 11)
    ):
        return None
    said = ".".join(str(number) for number in version)
    return (
        "Persia runs on Linux on x86-64 with Python 3.11 or later, and this "
        f"is Python {said} on {system} ({machine}): use such a machine, a "
        "container or a virtual machine (docs/install.md)"
    )
