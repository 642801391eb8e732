"""``persia gate``: the number of parameter servers in a cluster."""

from __future__ import annotations

from typing import Any

from persia.base.options import validated
from persia.cli.flags import with_flags
from persia.cli.options import DryRun, would
from persia.cli.shared import begin
from persia.kubernetes.process import GateConfig, serve_gate

_PANELS = {
    "name": "What it follows",
    "interval": "The process",
    "metrics_port": "Metrics",
}


@with_flags(GateConfig, _PANELS)
def command(dry_run: DryRun = False, **flags: Any) -> None:
    """Follow a ScaleGate of Kubernetes: move shards before servers end.

    It raises the number of servers of a StatefulSet, and has shards moved to
    those that are new. Before the number falls, the shards leave those that
    are to end. Servers are asked as by persia scale ps, with the tokens and
    certificates of the environment.

    persia gate --name persia-ps --api http://127.0.0.1:8001 --namespace persia
    """
    config = validated(GateConfig, flags)
    begin(config.model_dump())
    if dry_run:
        would(f"follow ScaleGate {config.where()}/{config.name}")
        return
    serve_gate(config)
