"""The process of ``persia gate``."""

from __future__ import annotations

import contextlib
import os
import socket

import pydantic
from pydantic import Field

from persia.base.environment import variable
from persia.base.logs import say
from persia.base.signals import Signals
from persia.distributed.serving import MetricsHost, MetricsPort, page_of
from persia.errors import InvalidArgument
from persia.kubernetes.api import ACCOUNT, Api
from persia.kubernetes.gate import Gate

_SOON = 1.0  # seconds from one look to the next while shards move
_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"


class GateConfig(pydantic.BaseModel):
    """The options of ``persia gate``; their names are those of the flags."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "persia-ps",
        pattern=_NAME,
        description="The ScaleGate that it follows.",
    )
    namespace: str | None = Field(
        None,
        pattern=_NAME,
        description="Namespace of Kubernetes in which it is (default: that of "
        "this pod).",
    )
    api: str | None = Field(
        None,
        description="URL of the API server, such as that of kubectl proxy "
        "(default: that of the cluster of this pod, with its account).",
    )
    interval: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="Seconds from one look to the next.",
    )
    grace: float = Field(
        10.0,
        ge=0,
        le=86400,
        description="Seconds from SIGTERM or Ctrl-C until it has ended.",
    )
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"

    def where(self) -> str:
        """The namespace of Kubernetes.

        Raises:
            InvalidArgument: neither an option nor a pod says it.
        """
        if self.namespace is not None:
            return self.namespace
        try:
            return (ACCOUNT / "namespace").read_text().strip()
        except OSError:
            raise InvalidArgument(
                "this process is no pod of a cluster: give `namespace`"
            ) from None


def serve_gate(config: GateConfig) -> None:
    """Looks and acts until SIGTERM or SIGINT."""
    api = Api.of_pod() if config.api is None else Api(config.api)
    namespace = config.where()
    who = f"{variable('POD_NAME') or socket.gethostname()}/{os.getpid()}"
    with Signals(config.grace, "nothing was changed") as signals:
        gate = Gate(api, namespace, config.name, who)
        with contextlib.closing(gate):
            if page := page_of(config, signals.health):
                page.add(gate)
            signals.keep()
            signals.health.serves()
            say(f"{who} follows ScaleGate {namespace}/{config.name}")
            pause = 0.0
            while not signals.wait(pause):
                gate.look()
                pause = config.interval
                pause = min(pause, _SOON) if gate.soon else pause
            signals.health.ends()
            say("stopping")
