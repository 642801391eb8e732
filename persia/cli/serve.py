"""``persia serve``: the processes that serve."""

from __future__ import annotations

from typing import Any

from persia.base.logs import say
from persia.base.options import validated
from persia.cli.flags import with_flags
from persia.cli.options import DryRun
from persia.cli.shared import Commands, begin
from persia.distributed.server import ServeConfig, find_shards
from persia.distributed.shards import serve as run
from persia.distributed.shards import these
from persia.distributed.worker import WorkerConfig, serve_worker

commands = Commands(no_args_is_help=True)


@commands.callback()
def _serve() -> None:
    """Serve rows, or batches with their embeddings."""


_PANELS = {  # the first option of each group
    "host": "Where it listens",
    "threads": "Limits",
    "token": "Security",
    "grace": "The process",
    "shard": "Its part of the tables",
    "checkpoints": "Checkpoints",
    "metrics_port": "Metrics",
    "admin_token_file": "Security",
}
_WORKER_PANELS = {
    "host": "Where it listens",
    "threads": "Limits",
    "token": "Security",
    "grace": "The process",
    "servers": "Parameter servers",
    "loaders": "Batches",
    "metrics_port": "Metrics",
    "loader_silence": "Batches",
    "timeout": "Parameter servers",
}


@commands.command()
@with_flags(ServeConfig, _PANELS)
def ps(dry_run: DryRun = False, **flags: Any) -> None:
    """Serve one shard of the tables of a job, or several.

    It prints a line "serving shard 0 of 2 on 127.0.0.1:8888" when it is
    ready. At SIGTERM it finishes the requests that have arrived, saves its
    rows where --save-on-exit names a checkpoint root, and exits.

    persia serve ps --shard 0/2 --checkpoints /shared/ckpt
    """
    config = validated(ServeConfig, flags)
    begin(config.model_dump())
    which = these(*find_shards(config))
    config.security(config.admin_token_file)  # its files can be read
    if dry_run:
        say(f"would serve {which} on {config.host}:{config.port}")
        return
    run(config)


@commands.command()
@with_flags(WorkerConfig, _WORKER_PANELS)
def worker(dry_run: DryRun = False, **flags: Any) -> None:
    """Serve an embedding worker: batches of loaders, looked up for ranks.

    It prints a line "serving an embedding worker of 2 servers on
    127.0.0.1:8889" when it is ready, and stops at SIGTERM.

    persia serve worker --servers ps0:8888,ps1:8888
    """
    config = validated(WorkerConfig, flags)
    begin(config.model_dump())
    config.security()  # its files can be read
    if dry_run:
        say(
            f"would serve an embedding worker of {config.servers} on "
            f"{config.host}:{config.port}"
        )
        return
    serve_worker(config)
