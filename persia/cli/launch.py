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
        int, typer.Option(min=1, max=4096, help="Number of parameter servers.")
    ] = 1,
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
        int,
        typer.Option(
            min=0,
            max=256,
            help="Number of embedding workers, whose addresses the command "
            "finds in PERSIA_WORKERS.",
        ),
    ] = 0,
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
            help="Start loaders while ranks wait for batches, and end some "
            "while they wait for ranks.",
        ),
    ] = False,
    scale_out_after: Annotated[
        float,
        typer.Option(
            callback=seconds,
            help="Seconds for which more loaders must have been wanted.",
        ),
    ] = 60.0,
    scale_in_after: Annotated[
        float,
        typer.Option(
            callback=seconds,
            help="Seconds for which fewer loaders must have been wanted.",
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
        Path | None,
        typer.Option(
            help="Folder of checkpoint roots, for the command in "
            "PERSIA_CHECKPOINTS."
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
    from persia.distributed.launch import Cluster, run

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
    options: list[str] = []
    for name, value in given.items():
        if value is not None:
            options += [name, str(value)]
    if checkpoints is None and file.get("checkpoints") is not None:
        checkpoints = Path(str(file["checkpoints"]))
    if metrics_port is None:
        metrics_port = _port(file.get("metrics_port"))
    least, most = _range(loaders, autoscale)
    feed_options = [*(["--data", data] if data else []), *shlex.split(feed)]
    feed_options, variables = hidden(feed_options)
    cluster = Cluster(
        command,
        ps,
        options,
        shards=shards,
        checkpoints=checkpoints,
        metrics_port=metrics_port,
        tls=tls,
        embedding_workers=embedding_workers,
        loaders=least,
        loaders_max=most if autoscale else None,
        scale_after=(scale_out_after, scale_in_after),
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


def _range(text: str, scaled: bool) -> tuple[int, int]:
    """(1, 4) of "1:4", (2, 2) of "2"."""
    first, colon, last = text.partition(":")
    low, high = (
        int(part) if part.isdecimal() else -1
        for part in (first, last or first)
    )
    if not 0 <= low <= high <= 256:
        raise typer.BadParameter(
            f"--loaders {text}: need a number from 0 to 256, or two as in 1:4"
        )
    if bool(colon) != scaled:
        raise typer.BadParameter(
            f"--loaders {text}: LEAST:MOST and --autoscale go together"
        )
    return low, high


def _port(value: object) -> int | None:
    """Of a file; the servers refuse what is none."""
    return int(str(value)) if str(value).isdecimal() else None
