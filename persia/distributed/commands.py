"""What ``persia launch`` starts: the command line of each process."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from persia.base.urls import Url
from persia.distributed.load import LOADER, SERVER
from persia.errors import InvalidArgument

if TYPE_CHECKING:
    from persia.distributed.kept import Kept

_NAME = "localhost"  # of all servers in their certificate, whatever the host


class Cluster:
    """Servers, and a command with their addresses in PERSIA_SERVERS.

    The command starts with the servers: what it imports takes longer than
    their start, and clients wait for servers that do not listen yet.

    Args:
        command: and its arguments.
        servers: how many.
        shards: of the tables, which the servers divide among them; None: one
            for each server.
        options: of ``persia serve ps``, for each server.
        log: folder of the servers' logs, which ``options`` name, too; None:
            they have none.
        namespace: of the tables.
        checkpoints: folder of the servers' checkpoints, or its URL. The
            command finds a folder in PERSIA_CHECKPOINTS.
        metrics_port: of server 0, the others follow; None: no metrics.
        tls: make certificates and tokens for servers and command.
        embedding_workers: which the command finds in PERSIA_WORKERS.
        loaders: data loaders, which send them batches.
        most: roles whose numbers follow their loads ("server",
            "embedding-worker", "loader"), and how many there may be of each:
            ``servers``, ``embedding_workers`` and ``loaders`` are the least.
        scale_after: seconds for which more, and fewer, must have been wanted.
        budget: processes of these roles together, at most; None: no limit.
        scale_log: a file that gets each decision; None: there is none.
        scale_dry: decisions are printed, and not carried out.
        feed: options of ``persia feed``, for each loader.
        loader_variables: more of them, in the environment of the loaders.
        parts: of the data, which loaders share; 0: each has its own.
        secured: the options of the servers have some already, which the
            command finds in its environment. Else what is there of others is
            not for these servers, and the command does not get it.
        host: where the servers listen.
        wait: start the command when all servers serve: they load rows, which
            may take longer than clients wait.
        start: seconds within which all servers must be ready.
        grace: seconds from a signal until all have ended: what has not then
            is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        servers: int = 1,
        options: Sequence[str] = (),
        *,
        shards: int | None = None,
        log: str | None = None,
        namespace: str = "default",
        checkpoints: str | None = None,
        metrics_port: int | None = None,
        tls: bool = False,
        embedding_workers: int = 0,
        loaders: int = 0,
        most: Mapping[str, int] | None = None,
        scale_after: tuple[float, float] = (60.0, 600.0),
        budget: int | None = None,
        scale_log: Path | None = None,
        scale_dry: bool = False,
        feed: Sequence[str] = (),
        loader_variables: Mapping[str, str] | None = None,
        parts: int = 0,
        secured: bool = False,
        host: str = "127.0.0.1",
        wait: bool = False,
        start: float = 60.0,
        grace: float = 30.0,
    ) -> None:
        if not command:
            raise InvalidArgument(
                "no command: persia launch --ps 2 -- python train.py"
            )
        if shutil.which(command[0]) is None:
            raise InvalidArgument(
                f"{command[0]}: no such command, or it cannot be executed"
            )
        if servers < 1:
            raise InvalidArgument(f"servers is {servers}, need at least 1")
        self.most = dict(most or {})
        servers_most = self.most.get(SERVER, servers)
        if shards is None and servers_most > servers:
            shards = 2 * servers_most  # so that each has about as many
        if shards is not None and shards < servers_most:
            raise InvalidArgument(
                f"shards is {shards}, but each of {servers_most} servers "
                "needs one"
            )
        self.log = None if log is None else Path(log)
        if loaders and not embedding_workers:
            raise InvalidArgument(
                "data loaders send batches to embedding workers: give "
                "`embedding_workers`, too"
            )
        if parts and not loaders:
            raise InvalidArgument(
                "`parts` are what data loaders share: give `loaders`, too"
            )
        loaders_most = self.most.get(LOADER, 0)
        if loaders_most and not loaders <= loaders_most <= parts:
            raise InvalidArgument(
                f"`loaders` from {loaders} to {loaders_most} share {parts} "
                "parts of the data: give `parts`, at least as many"
            )
        if embedding_workers and secured:
            raise InvalidArgument(
                "`embedding_workers` with TLS or tokens of `ps_config`: "
                "they would have none; give `tls` in their place"
            )
        self.embedding_workers = embedding_workers
        self.loaders = loaders
        self.scale_after = scale_after
        self.budget = budget
        self.scale_log = scale_log
        self.scale_dry = scale_dry
        self.feed = list(feed)
        self.loader_variables = dict(loader_variables or {})
        self.parts = parts
        self.command = list(command)
        self.servers = servers
        self.shards = shards
        self.namespace = namespace
        self.options = list(options)
        self.variables: dict[str, str] = {}
        if checkpoints is not None and Url(checkpoints).local is None:
            self.options += ["--checkpoints", checkpoints]
        elif checkpoints is not None:
            folder = Path(Url(checkpoints).local or "").absolute()
            # The command may look there before a server has made it; where it
            # cannot be made the servers say so.
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            self.options += ["--checkpoints", str(folder)]
            self.variables["PERSIA_CHECKPOINTS"] = str(folder)
        self.metrics_port = metrics_port
        self.tls = tls
        self.secured = secured
        self.host = host
        self.wait = wait
        self.start = start
        self.grace = grace

    def server_command(
        self, server: int, port: int, options: Sequence[str]
    ) -> list[str]:
        """What starts a server."""
        command = [sys.executable, "-m", "persia", "serve", "ps"]
        command += ["--host", self.host, "--port", str(port)]
        command += ["--shard", f"{server}/{self.servers}"]
        if self.shards is not None:
            command += ["--server-count", str(self.servers)]
            command += ["--shards", str(self.shards)]
        return [*command, *self._server_options(server), *options]

    def join_command(
        self, server: int, port: int, join: str, options: Sequence[str]
    ) -> list[str]:
        """What starts a server that joins the one at an address."""
        command = [sys.executable, "-m", "persia", "serve", "ps"]
        command += ["--host", self.host, "--port", str(port), "--join", join]
        own = self._server_options(server)
        if "--restore" in own:  # it has no rows of its own
            at = own.index("--restore")
            del own[at : at + 2]
        if self.log is not None:  # the last one counts
            own += ["--log", str(self.log / f"ps{server}")]
        return [*command, *own, *options]

    def kept(self) -> Kept | None:
        """Its servers and their ports in earlier runs; None: any will do.

        Raises:
            InvalidArgument: their number was to change, and now is not.
            SchemaMismatch, CorruptFile: see :class:`Kept`.
        """
        if self.log is None:
            return None
        from persia.distributed import kept

        if SERVER in self.most:
            job = kept.Job(
                namespace=self.namespace,
                host=self.host,
                servers=self.servers,
                shards=self.shards or self.servers,
            )
            return kept.Kept(self.log, job)
        if kept.is_kept(self.log):
            raise InvalidArgument(
                f"`log={self.log}` has the logs of servers whose number "
                "changes: give `autoscale`, and `ps` as in 1:4"
            )
        return None

    def move_command(self, addresses: Sequence[str], to: int) -> list[str]:
        """What gives all shards to the first ``to`` of the servers."""
        command = [sys.executable, "-m", "persia", "scale", "ps"]
        return [
            *command,
            *("--to", str(to), "--servers", ",".join(addresses)),
        ]

    def _server_options(self, server: int) -> list[str]:
        options = []
        if self.metrics_port is not None:
            options += ["--metrics-port", str(self.metrics_port + server)]
        elif SERVER in self.most:
            options += ["--metrics-port", "0"]
        options += ["--grace", str(min(self.grace, 86400))]
        return [*options, *self.options]

    def worker_command(self, port: int, options: Sequence[str]) -> list[str]:
        """What starts an embedding worker."""
        command = [sys.executable, "-m", "persia", "serve", "worker"]
        command += ["--host", self.host, "--port", str(port)]
        command += ["--loaders", str(max(self.parts or self.loaders, 1))]
        if self.most:
            command += ["--metrics-port", "0"]
        command += ["--grace", str(min(self.grace, 86400))]
        return [*command, "--timeout", str(max(self.start, 1.0)), *options]

    def loader_command(self, loader: int) -> list[str]:
        """What starts a data loader."""
        command = [sys.executable, "-m", "persia", "feed", *self.feed]
        if self.parts:
            command += ["--parts", str(self.parts)]
        count = self.most.get(LOADER, self.loaders)
        return [*command, "--loader", f"{loader}/{count}"]

    def command_lines(self) -> list[list[str]]:
        """What would be started, for people: ports are chosen then."""
        return [
            *(self.server_command(i, 0, []) for i in range(self.servers)),
            *(
                self.worker_command(0, [])
                for _ in range(self.embedding_workers)
            ),
            *(self.loader_command(i) for i in range(self.loaders)),
            self.command,
        ]

    @contextlib.contextmanager
    def security(self) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Options of the servers and environment of the command."""
        if not self.tls:
            yield [], {}
            return
        from persia.distributed.certs import write_certificates

        with tempfile.TemporaryDirectory(prefix="persia-launch-") as name:
            folder = Path(name)
            write_certificates(folder, ["127.0.0.1", _NAME])
            options = {
                "--tls-ca": "ca.pem",
                "--tls-cert": "server.pem",
                "--tls-key": "server-key.pem",
                "--token-file": "token",
                "--admin-token-file": "admin-token",
            }
            variables = {
                "PERSIA_TLS_CA": "ca.pem",
                "PERSIA_TLS_CERT": "client.pem",
                "PERSIA_TLS_KEY": "client-key.pem",
                "PERSIA_TOKEN_FILE": "token",
                "PERSIA_ADMIN_TOKEN_FILE": "admin-token",
            }
            flags = ["--mutual-tls"]
            for option, file in options.items():
                flags += [option, str(folder / file)]
            files = {k: str(folder / v) for k, v in variables.items()}
            yield flags, {"PERSIA_TLS_SERVER_NAME": _NAME} | files
