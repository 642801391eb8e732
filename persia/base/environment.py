"""Variables of the environment that are for Persia."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from persia.base.warning import warn

# Kubernetes gives each process variables for each service of its namespace: a
# service persia-metrics is PERSIA_METRICS_PORT=tcp://10.0.0.1:9100.
_LINK = re.compile(r"(tcp|udp|sctp)://")

warned: set[str] = set()


def variable(
    name: str, environment: Mapping[str, str] | None = None
) -> str | None:
    """The value of a variable; None where it is not set, or empty, or one
    that Kubernetes has made for a service.

    Args:
        environment: default: that of the process.
    """
    value = (os.environ if environment is None else environment).get(name)
    if value and _LINK.match(value):
        _warn([name])
        return None
    return value or None


def drop_links() -> None:
    """Removes such variables from this process and those that it starts."""
    names = [
        name
        for name, value in os.environ.items()
        if name.startswith("PERSIA_") and _LINK.match(value)
    ]
    _warn(names)
    for name in names:
        del os.environ[name]


def _warn(names: Iterable[str]) -> None:
    new = sorted(set(names) - warned)
    warned.update(new)
    if new:
        warn(
            f"{', '.join(new)}: ignored, as Kubernetes has set it for a "
            "service of that name; set enableServiceLinks: false in the pod, "
            "or rename the service"
        )
