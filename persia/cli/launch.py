"""``persia launch``: a cluster on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from persia.base.options import read_yaml
from persia.cli.feed import FeedConfig
from persia.cli.options import DryRun, seconds, would
from persia.cli.shared import log_variables

#: What follows "--" is another program's.
SETTINGS = {"allow_interspersed_args": False}

# How options of a server begin that its clients must know of.
_SECURITY = ("tls_", "token", "admin_token", "mutual_tls")


def command(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The command that uses the servers, and its arguments.",
            metavar="-- COMMAND...",
        ),
    ],
    ps: Annotated[
        str,
        typer.Option(
            help="Number of parameter servers. With --autoscale from least to "
            "most, such as 1:4."
        ),
    ] = "1",
    shards: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Shards of the tables, which the servers divide among them: "
            "one for each server if it is not given. Of a job whose number of "
            "servers changes later it stays the same.",
        ),
    ] = None,
    embedding_workers: Annotated[
        str,
        typer.Option(
            help="Number of embedding workers, whose addresses the command "
            "finds in PERSIA_WORKERS. With --autoscale from least to most, "
            "such as 1:4.",
        ),
    ] = "0",
    loaders: Annotated[
        str,
        typer.Option(
            help="Number of data loaders: persia feed, to the workers. With "
            "--autoscale from least to most, such as 1:4.",
        ),
    ] = "0",
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Start and end processes as their loads say: of the roles "
            "with a number from least to most.",
        ),
    ] = False,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most processes of all roles that --autoscale changes, "
            "together.",
        ),
    ] = None,
    scale_log: Annotated[
        Path | None,
        typer.Option(
            help="File that gets each decision of --autoscale, as a line of "
            "JSON; persia status --scale-log shows the last ones."
        ),
    ] = None,
    scale_dry_run: Annotated[
        bool,
        typer.Option(
            "--scale-dry-run",
            help="Print what --autoscale would change, and change nothing.",
        ),
    ] = False,
    scale_out_after: Annotated[
        float,
        typer.Option(
            callback=seconds,
            help="Seconds for which more processes must have been wanted.",
        ),
    ] = 60.0,
    scale_in_after: Annotated[
        float,
        typer.Option(
            callback=seconds,
            help="Seconds for which fewer processes must have been wanted.",
        ),
    ] = 600.0,
    parts: Annotated[
        int,
        typer.Option(
            min=0,
            max=256,
            help="Parts of the data, which data loaders share; 0: each has "
            "its own share.",
        ),
    ] = 0,
    data: Annotated[
        str | None,
        typer.Option(help="What the data loaders read: their --data."),
    ] = None,
    feed: Annotated[
        str,
        typer.Option(
            help="More options of the data loaders, such as '--samples 1000 "
            "--epochs 2'."
        ),
    ] = "",
    ps_config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of options of persia serve ps; its port is not "
            "used."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each server.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Memory of all tables of a server, such as 64GiB."),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Folder of checkpoint roots, or its URL; a folder is for the "
            "command in PERSIA_CHECKPOINTS."
        ),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            help="Begin with the rows of this checkpoint root there."
        ),
    ] = None,
    save_on_exit: Annotated[
        str | None,
        typer.Option(
            help="Write the rows into this checkpoint root at the end."
        ),
    ] = None,
    durable: Annotated[
        Literal["off", "process", "disk"],
        typer.Option(
            help="Servers keep a log in the folder of --log: process or disk, "
            "as of persia serve ps --durable. The next start continues it."
        ),
    ] = "off",
    log: Annotated[
        str | None, typer.Option(help="Folder of the logs of --durable.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Prometheus metrics of server 0; the others follow.",
        ),
    ] = None,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Mutual TLS and tokens, made for this."),
    ] = False,
    start_timeout: Annotated[
        float,
        typer.Option(
            callback=seconds, help="Seconds until all servers must be ready."
        ),
    ] = 60.0,
    grace: Annotated[
        float,
        typer.Option(
            callback=seconds,
            help="Seconds from a signal until all have ended; what has not "
            "then is killed.",
        ),
    ] = 30.0,
    dry_run: DryRun = False,
) -> None:
    """Start parameter servers here, and a command that uses them.

    The command finds their addresses in PERSIA_SERVERS, those of embedding
    workers in PERSIA_WORKERS. It starts with them,
    or, where they restore a checkpoint, when all are ready. When it ends, or a
    process fails, all others end, too, and whatever they have started; the
    exit status is that of what failed, else of the command.

    persia launch --ps 2 -- torchrun --nproc-per-node 2 train.py

    persia launch --ps 2 --embedding-workers 1 --loaders 1 -- persia train
    """
    from persia.distributed.addresses import namespace_of
    from persia.distributed.autoscale import check_log
    from persia.distributed.commands import Cluster
    from persia.distributed.launch import run
    from persia.distributed.load import LOADER, SERVER, WORKER

    file = {} if ps_config is None else read_yaml(ps_config, "--ps-config")
    given = {
        "--config": ps_config,
        "--threads": threads,
        "--memory-limit": memory_limit,
        "--restore": restore,
        "--save-on-exit": save_on_exit,
        "--durable": None if durable == "off" else durable,
        "--log": log,
    }
    level = file.get("durable") if durable == "off" else durable
    options: list[str] = []
    for name, value in given.items():
        if value is not None:
            options += [name, str(value)]
    if checkpoints is None and file.get("checkpoints") is not None:
        checkpoints = str(file["checkpoints"])
    if metrics_port is None:
        metrics_port = _port(file.get("metrics_port"))
    ranges = {
        SERVER: _range("--ps", ps, 1, 4096),
        WORKER: _range("--embedding-workers", embedding_workers, 0, 256),
        LOADER: _range("--loaders", loaders, 0, 256),
    }
    least = {role: low for role, (low, _) in ranges.items()}
    most = {role: high for role, (_, high) in ranges.items() if high}
    if bool(most) != autoscale:
        raise typer.BadParameter(
            "LEAST:MOST of --ps, --embedding-workers or --loaders and "
            "--autoscale go together"
        )
    feed_options = [*(["--data", data] if data else []), *shlex.split(feed)]
    feed_options, variables = hidden(feed_options)
    cluster = Cluster(
        command,
        least[SERVER],
        options,
        shards=shards,
        log=(log or file.get("log")) if level in ("process", "disk") else None,
        namespace=namespace_of(file.get("namespace")),
        checkpoints=checkpoints,
        metrics_port=metrics_port,
        tls=tls,
        embedding_workers=least[WORKER],
        loaders=least[LOADER],
        most=most,
        scale_after=(scale_out_after, scale_in_after),
        budget=budget,
        scale_log=scale_log,
        scale_dry=scale_dry_run,
        parts=parts,
        feed=feed_options,
        loader_variables=variables,
        secured=any(name.startswith(_SECURITY) for name in file),
        host=str(file.get("host", "127.0.0.1")),
        wait=bool(restore or file.get("restore")),
        start=start_timeout,
        grace=grace,
    )
    if dry_run:
        for line in cluster.command_lines():
            would(f"start: {shlex.join(line)}")
        return
    if scale_log is not None:
        check_log(scale_log)
    os.environ.update(log_variables())  # of what it starts, too
    raise typer.Exit(run(cluster))


def hidden(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Options of ``persia feed`` as arguments, and those that are URLs as
    variables: a URL may have a key in it, and every user of the machine sees
    the arguments of a process."""
    fields = FeedConfig.model_fields.values()
    flags = {
        f"--{field.alias or name}".replace("_", "-")
        for name, field in zip(FeedConfig.model_fields, fields, strict=True)
        if field.annotation is bool
    }
    arguments: list[str] = []
    variables: dict[str, str] = {}
    for word in words:
        name, value = "--data", word
        if word.startswith("--"):
            name, _, value = word.partition("=")
        elif (
            arguments
            and arguments[-1].startswith("--")
            and "=" not in arguments[-1]
            and arguments[-1].replace("--no-", "--") not in flags
        ):
            name = arguments[-1]
        if "://" not in value:
            arguments.append(word)
            continue
        if arguments and name == arguments[-1]:
            arguments.pop()
        option = name.removeprefix("--").replace("-", "_").upper()
        variables[f"PERSIA_FEED_{option}"] = value
    return arguments, variables


def _range(name: str, text: str, low: int, high: int) -> tuple[int, int]:
    """(1, 4) of "1:4"; (2, 0) of "2", which has no most."""
    first, colon, last = text.partition(":")
    least, most = (
        int(part) if part.isdecimal() else -1
        for part in (first, last or first)
    )
    if not low <= least <= most <= high:
        raise typer.BadParameter(
            f"{name} {text}: need a number from {low} to {high}, or two as in "
            "1:4"
        )
    return least, most if colon else 0


def _port(value: object) -> int | None:
    """Of a file; the servers refuse what is none."""
    return int(str(value)) if str(value).isdecimal() else None
