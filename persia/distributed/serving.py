"""What every process that serves has: where it listens, and its warnings.

How it ends: :class:`persia.base.signals.Signals`.
"""

from __future__ import annotations

import ipaddress
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, Self

import pydantic
from pydantic import Field

from persia import _core
from persia.base.health import Health
from persia.base.logs import say
from persia.distributed.addresses import namespace_of
from persia.distributed.security import Security
from persia.errors import InvalidArgument

if TYPE_CHECKING:
    from persia.prometheus import Page

# Files that the core opens at most, and connections that the system takes
# before they are counted.
_FILES, _BURST = 65536, 4096


MetricsPort = Annotated[
    int | None,
    Field(ge=0, le=65535, description="Port of Prometheus metrics; 0: any."),
]
MetricsHost = Annotated[
    str,
    Field(
        description="Address of `metrics_port`, which has neither TLS nor a "
        "token."
    ),
]


class Guarded(pydantic.BaseModel):
    """The options of all that serves: at which address, and to whom."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True
    )

    host: str = Field(
        "127.0.0.1", description="Address to listen on; 0.0.0.0: on all."
    )
    port: int = Field(
        8888, ge=0, le=65535, description="Port to listen on; 0: any."
    )
    token: pydantic.SecretStr | None = Field(
        None,
        description="Token that clients must show; beyond the loopback it "
        "needs TLS.",
    )
    token_file: Path | None = Field(None, description="File with the token.")
    tokens_file: Path | None = Field(
        None,
        description="File of lines ROLE NAME TOKEN: several tokens, each for "
        "what its roles may do (`persia tokens`).",
    )
    tls_cert: Path | None = Field(
        None, description="Certificate chain of the server, PEM."
    )
    tls_key: Path | None = Field(None, description="Key of `tls_cert`, PEM.")
    tls_ca: Path | None = Field(
        None, description="Certificates that clients' are signed with, PEM."
    )
    mutual_tls: bool = Field(
        False, description="Clients must show a certificate of `tls_ca`."
    )
    insecure: bool = Field(
        False,
        description="Allow other addresses than loopback without TLS and "
        "token.",
    )
    grace: float = Field(
        30.0,
        ge=0,
        le=86400,
        description="Seconds from SIGTERM or Ctrl-C until it has ended, "
        "whatever it waits for.",
    )

    @pydantic.model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.tls_ca is not None and not self.mutual_tls:
            raise ValueError(
                "`tls_ca` is what clients' certificates are checked with: "
                "give `mutual_tls`, too, or leave it out"
            )
        return self

    def security(self, admin_token_file: Path | None = None) -> Security:
        """TLS and tokens, read from their files.

        Raises:
            InvalidArgument: others than this machine could reach it without.
        """
        found = Security.load(
            ca=self.tls_ca,
            cert=self.tls_cert,
            key=self.tls_key,
            mutual=self.mutual_tls,
            token=None
            if self.token is None
            else self.token.get_secret_value(),
            token_file=self.token_file,
            tokens_file=self.tokens_file,
            insecure=self.insecure,
            admin_token_file=admin_token_file,
        )
        _check_address(self.host, found)
        return found


class Listening(Guarded):
    """The options of what serves Persia's own protocol."""

    namespace: str = Field(
        default_factory=namespace_of,
        min_length=1,
        max_length=255,
        description="A name of these tables, on all servers, workers and "
        "clients of them; clients of another one are refused (default: "
        "PERSIA_NAMESPACE, else default).",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads that serve (default: one a core).",
    )
    message_limit: pydantic.ByteSize = Field(
        pydantic.ByteSize(_core.MESSAGE_LIMIT),
        ge=2 << 20,  # what describes 4,096 tables must fit
        le=(2 << 30) - 1,
        validate_default=True,
        description="Most bytes of a request and of a reply, at least 2MiB.",
    )
    calls: int = Field(
        256, ge=1, le=65536, description="Requests in flight at once."
    )
    connections: int = Field(
        4096,
        ge=1,
        le=65536,
        description="Connections at once; more are closed. Each also needs a "
        "file descriptor (ulimit -n).",
    )


def few_files(connections: int) -> str | None:
    """What to tell where the process may open too few files for so many
    connections, and for those that are open before they are counted.

    gRPC's listener is lost for ever once no file descriptor is left.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    kept = min(connections, _FILES // 2)
    if hard == resource.RLIM_INFINITY or hard >= kept + _BURST:
        return None
    return (
        f"this process may open {hard} files only: it keeps at most "
        f"{min(connections, hard // 2 + 1)} connections, and a burst of more "
        "may leave it deaf to new ones; raise the limit (ulimit -Hn, "
        "LimitNOFILE=, --ulimit nofile=)"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_address(host: str, security: Security) -> None:
    """The rule of all that serves, see ``csrc/rpc/address.c``."""
    if is_loopback(host):
        return
    tokens = security.token is not None or security.tokens is not None
    if security.cert is None and tokens:
        raise InvalidArgument(
            f"{host}: a token would travel in the clear: give certificates "
            "(`tls_cert`, `tls_key`), or no token"
        )
    if not security.insecure and (security.cert is None or not tokens):
        raise InvalidArgument(
            f"serving at {host}: an address that other machines reach needs "
            "TLS and tokens (`tls_cert`, `tls_key`, `token_file` or "
            "`tokens_file`), or `insecure` where the network is trusted"
        )


def core_holes(config: Listening, holes: str) -> str | None:
    """What to tell where others than this machine reach a gRPC core with
    published holes: a client without a certificate can stop the server."""
    if not holes or config.mutual_tls or is_loopback(config.host):
        return None
    return (
        f"gRPC's core {_core.GRPC} has published holes ({holes}): anyone who "
        "reaches this port may stop the server; install Persia's wheel, which "
        "has a current core (docs/install.md), or give `mutual_tls`"
    )


def warn_of(config: Listening) -> None:
    """Says what is risky about serving so."""
    if config.insecure:
        say(
            "`insecure`: anyone who reaches this port may read and change all "
            "rows",
            "warning",
        )
    if few := few_files(config.connections):
        say(few, "warning")
    if open_to := core_holes(config, _core.GRPC_HOLES):
        say(open_to, "warning")


class _Port(Protocol):
    """Options of a process."""

    @property
    def metrics_port(self) -> int | None: ...
    @property
    def metrics_host(self) -> str: ...


def page_of(config: _Port, health: Health) -> Page | None:
    """What Prometheus and probes ask, where options name a port for it."""
    if config.metrics_port is None:
        return None
    from persia.prometheus import Page

    page = Page(config.metrics_port, config.metrics_host, health)
    say(f"metrics on http://{config.metrics_host}:{page.port}/metrics")
    return page
