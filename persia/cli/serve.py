"""``persia serve``: the processes that serve."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from persia.base.options import validated
from persia.cli.flags import with_flags
from persia.cli.options import DryRun, would
from persia.cli.shared import Commands, begin
from persia.distributed.server import ServeConfig, find_join, find_shards
from persia.distributed.shards import serve as run
from persia.distributed.shards import these
from persia.distributed.worker import WorkerConfig, serve_worker
from persia.serving.config import ModelConfig, RelayConfig, named_paths

commands = Commands(no_args_is_help=True)


@commands.callback()
def _serve() -> None:
    """Serve rows, batches with their embeddings, models, or exports."""


_PANELS = {  # the first option of each group
    "host": "Where it listens",
    "threads": "Limits",
    "token": "Security",
    "grace": "The process",
    "namespace": "Where it listens",
    "shard": "Its part of the tables",
    "checkpoints": "Checkpoints",
    "metrics_port": "Metrics",
    "admin_token_file": "Security",
}
_MODEL_PANELS = {
    "host": "Where it listens",
    "processes": "Batches",
    "request_samples": "Limits",
    "versions": "Versions",
    "metrics_port": "Metrics",
    "token": "Security",
    "grace": "The process",
}
_EXPORT_PANELS = {
    "host": "Where it listens",
    "token": "Security",
    "grace": "The process",
    "connections": "Where it listens",
    "metrics_port": "Metrics",
}
_WORKER_PANELS = {
    "host": "Where it listens",
    "threads": "Limits",
    "token": "Security",
    "grace": "The process",
    "namespace": "Where it listens",
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
    joins = find_join(config)
    which = (
        f"no shard yet, beside {joins},"
        if joins
        else these(*find_shards(config))
    )
    config.security(config.admin_token_file)  # its files can be read
    if dry_run:
        would(f"serve {which} on {config.host}:{config.port}")
        return
    run(config)


@commands.command()
@with_flags(ModelConfig, _MODEL_PANELS)
def model(
    exports: Annotated[
        list[str],
        typer.Argument(
            help="Folders of persia export, or URLs: PATH or NAME=PATH; a "
            "name is the last part of a path.",
            metavar="MODEL...",
        ),
    ],
    dry_run: DryRun = False,
    **flags: Any,
) -> None:
    """Answer requests over HTTP and gRPC: the Open Inference Protocol v2.

    It prints a line "serving 1 model on 127.0.0.1:8080" when it is ready.
    A new version of an export answers as soon as it is current there. At
    SIGTERM it answers the requests in flight, and exits.

    persia serve model exported

    persia serve model clicks=exported --port 9000 --metrics-port 9001

    persia serve model s3://bucket/models/clicks --cache /var/cache/models
    """
    from persia.serving.processes import serve_models

    config = validated(ModelConfig, flags)
    begin({"exports": exports} | config.model_dump())
    config.security()  # its files can be read
    if dry_run:
        from persia.serving.folder import find_version

        for name, path in named_paths(tuple(exports)).items():
            version = find_version(path).manifest.name
            would(f"serve {name}, version {version}")
        return
    serve_models(config, tuple(exports))


@commands.command()
@with_flags(RelayConfig, _EXPORT_PANELS)
def export(
    exports: Annotated[
        list[str],
        typer.Argument(
            help="Folders of persia export or persia train --publish-to: PATH "
            "or NAME=PATH; a name is the last part of a path.",
            metavar="EXPORT...",
        ),
    ],
    dry_run: DryRun = False,
    **flags: Any,
) -> None:
    """Hand versions and packets out to other machines, over HTTP.

    It prints a line "serving 1 export on 127.0.0.1:8090" when it is ready.
    All that reads an export takes http://HOST:PORT/NAME, or https://. Packets
    of a training arrive as soon as they are written.

    persia serve export exported

    persia serve model http://127.0.0.1:8090/exported
    """
    from persia.serving.web import find_uvicorn

    config = validated(RelayConfig, flags)
    begin({"exports": exports} | config.model_dump())
    config.security()  # its files can be read
    find_uvicorn()
    from persia.serving.relay import roots_of, serve_exports

    if dry_run:
        for name, root in roots_of(tuple(exports)).items():
            would(f"serve {root} as {name}")
        return
    serve_exports(config, tuple(exports))


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
        would(
            f"serve an embedding worker of {config.servers} on "
            f"{config.host}:{config.port}"
        )
        return
    serve_worker(config)
