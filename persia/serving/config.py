"""The options of ``persia serve model`` and ``persia serve export``. Nothing
of torch."""

from __future__ import annotations

import os
from pathlib import Path

import pydantic
from pydantic import Field

from persia.base.urls import Url
from persia.distributed.serving import Guarded, MetricsHost, MetricsPort
from persia.errors import InvalidArgument

INSECURE = "`insecure`: anyone who reaches this port may ask"


class ModelConfig(Guarded):
    """The options of ``persia serve model``; their names are those of the
    flags."""

    port: int = Field(
        8080, ge=0, le=65535, description="Port of HTTP; 0: any."
    )
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of gRPC (inference.GRPCInferenceService); 0: any.",
    )
    processes: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that serve the same ports. Rows are in memory "
        "once; process i has its metrics at `metrics_port` + i. Other limits "
        "are of each process.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads that compute (default: one a core, of all "
        "processes together).",
    )
    batch_samples: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="Samples that are computed together, of several requests; "
        "a request of more is computed alone.",
    )
    queue_samples: int = Field(
        16384,
        ge=1,
        le=1 << 30,
        description="Samples that may wait; beyond, requests are refused.",
    )
    request_samples: int = Field(
        4096, ge=1, le=1 << 24, description="Samples that a request may have."
    )
    body_limit: pydantic.ByteSize = Field(
        pydantic.ByteSize(64 << 20),
        ge=1 << 10,
        validate_default=True,
        description="Bytes that a request may have.",
    )
    connections: int = Field(
        4096,
        ge=1,
        le=65536,
        description="Connections and requests at once, of HTTP and of gRPC; "
        "more are refused.",
    )
    timeout: float = Field(
        10.0,
        gt=0,
        le=86400,
        description="Seconds that the head of a request may take, that its "
        "body may take, and that it may wait then, if it does not say.",
    )
    versions: int = Field(
        2,
        ge=1,
        le=1024,
        description="Versions of a model that stay mapped, for rollback.",
    )
    cache: Path | None = Field(
        None,
        description="Folder in which so many versions of a model in a bucket "
        "are kept (default: ~/.cache/persia/models).",
    )
    packet_rows_limit: pydantic.ByteSize = Field(
        pydantic.ByteSize(8 << 30),
        ge=0,
        validate_default=True,
        description="Bytes that rows of packets may take, of each table; "
        "beyond, the model waits for its next version. 0: any.",
    )
    poll: float = Field(
        5.0,
        ge=0,
        le=86400,
        description="Seconds between looks for a new version; 0: never.",
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of Prometheus metrics; 0: any."
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="Address of `metrics_port`, which has neither TLS nor a "
        "token.",
    )


class RelayConfig(Guarded):
    """The options of ``persia serve export``; their names are those of the
    flags."""

    port: int = Field(8090, ge=0, le=65535, description="Port; 0: any.")
    connections: int = Field(
        4096,
        ge=1,
        le=65536,
        description="Connections and requests at once; more are refused.",
    )
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"


def named_paths(texts: tuple[str, ...]) -> dict[str, str]:
    """Models by name, of ``NAME=PATH`` or ``PATH``, whose last part is its
    name.

    Raises:
        InvalidArgument: there is none, or a name twice, or an odd one.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, is_named, path = text.partition("=")
        if not is_named or "/" in name:
            url = Url(text)
            place = url.path if url.scheme else os.path.abspath(text)
            name, path = Path(place).name, text
        if not name or "/" in name or not name.isprintable():
            raise InvalidArgument(f"{text!r}: a model has a name without /")
        if name in found:
            raise InvalidArgument(
                f"two models have the name {name!r}: give NAME=PATH"
            )
        found[name] = path
    if not found:
        raise InvalidArgument("no model is given")
    return found
