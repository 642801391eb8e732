"""``persia serve``: the processes that serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from persia.base.options import read_yaml, validated
from persia.cli.flags import with_flags
from persia.distributed.server import ServeConfig
from persia.distributed.server import serve as run
from persia.distributed.worker import WorkerConfig, serve_worker

__all__ = ["commands"]

commands = typer.Typer(no_args_is_help=True)


@commands.callback()
def _serve() -> None:
    """Serve rows, or batches with their embeddings."""


def _flag(name: str, *words: str) -> Any:
    """The flag of an option; what it means stands in ServeConfig."""
    field = ServeConfig.model_fields[name]
    shown = isinstance(field.default, str | int | float) and not words
    default = str(field.default) if shown and field.default else False
    if "(default: " in (field.description or ""):
        default = False
    return typer.Option(*words, help=field.description, show_default=default)


@commands.command()
def ps(
    host: Annotated[str | None, _flag("host")] = None,
    port: Annotated[int | None, _flag("port")] = None,
    shard: Annotated[str | None, _flag("shard")] = None,
    shards: Annotated[int | None, _flag("shards")] = None,
    namespace: Annotated[str | None, _flag("namespace")] = None,
    threads: Annotated[int | None, _flag("threads")] = None,
    memory_limit: Annotated[str | None, _flag("memory_limit")] = None,
    message_limit: Annotated[str | None, _flag("message_limit")] = None,
    calls: Annotated[int | None, _flag("calls")] = None,
    connections: Annotated[int | None, _flag("connections")] = None,
    checkpoints: Annotated[Path | None, _flag("checkpoints")] = None,
    restore: Annotated[str | None, _flag("restore")] = None,
    or_empty: Annotated[bool | None, _flag("or_empty", "--or-empty")] = None,
    save_on_exit: Annotated[str | None, _flag("save_on_exit")] = None,
    metrics_port: Annotated[int | None, _flag("metrics_port")] = None,
    metrics_host: Annotated[str | None, _flag("metrics_host")] = None,
    token: Annotated[str | None, _flag("token")] = None,
    token_file: Annotated[Path | None, _flag("token_file")] = None,
    admin_token_file: Annotated[Path | None, _flag("admin_token_file")] = None,
    tls_cert: Annotated[Path | None, _flag("tls_cert")] = None,
    tls_key: Annotated[Path | None, _flag("tls_key")] = None,
    tls_ca: Annotated[Path | None, _flag("tls_ca")] = None,
    mutual_tls: Annotated[
        bool | None, _flag("mutual_tls", "--mutual-tls")
    ] = None,
    insecure: Annotated[bool | None, _flag("insecure", "--insecure")] = None,
    grace: Annotated[float | None, _flag("grace")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of these options; flags override it."),
    ] = None,
) -> None:
    """Serve one shard of the tables of a job.

    It prints a line "serving shard 0 of 2 on 127.0.0.1:8888" when it is
    ready, and stops at SIGTERM: requests that came are finished, the rows
    saved if --save-on-exit says so.
    """
    flags = {k: v for k, v in locals().items() if v is not None}
    flags.pop("config", None)
    file = read_yaml(config) if config is not None else {}
    run(validated(ServeConfig, file | flags))


@commands.command()
@with_flags(WorkerConfig)
def worker(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of these options; flags override it."),
    ] = None,
    **flags: Any,
) -> None:
    """Serve an embedding worker: batches of loaders, looked up for ranks.

    It prints a line "serving an embedding worker of 2 servers on
    127.0.0.1:8889" when it is ready, and stops at SIGTERM.
    """
    given = {k: v for k, v in flags.items() if v is not None}
    file = read_yaml(config) if config is not None else {}
    serve_worker(validated(WorkerConfig, file | given))
