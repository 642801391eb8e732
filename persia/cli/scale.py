"""``persia scale``: more or fewer processes for a job that runs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from persia.base.counts import counted
from persia.base.logs import say
from persia.cli.options import (
    DryRun,
    Json,
    Namespace,
    Servers,
    Timeout,
    print_json,
)
from persia.cli.plan import print_cost
from persia.cli.shared import Commands
from persia.errors import InvalidArgument

_PAUSE = 2.0  # seconds between two lines about the rows of a move

commands = Commands(no_args_is_help=True)


@commands.callback()
def _scale() -> None:
    """Give a job that runs more or fewer processes."""


@commands.command()
def ps(
    to: Annotated[
        int,
        typer.Option(
            help="So many of the servers share the shards evenly: the first "
            "ones of --servers. The others have none then, and can be "
            "stopped.",
            show_default=False,
        ),
    ],
    servers: Servers = None,
    namespace: Namespace = "default",
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Moves that are made side by side, at most (default: as many "
            "as there are, one for each server).",
        ),
    ] = None,
    revive: Annotated[
        bool,
        typer.Option(
            "--revive",
            help="Shards that no server has any more begin again first, with "
            "the rows of the checkpoint of serve ps --restore, or without "
            "rows. Name all servers: one that is not named may have them.",
        ),
    ] = False,
    timeout: Timeout = 10.0,
    json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Move shards between parameter servers while a job trains.

    A server that is to be new is started before, with persia serve ps --join.
    A server is in one move at a time. Ctrl-C gives up the moves that have
    begun: their shards stay where they were, unless they have left already.
    The same command, given again, waits for what an earlier one has begun,
    and does the rest. With --dry-run it says what the moves cost.

    persia scale ps --to 3 --servers ps0:8888,ps1:8888,ps2:8888
    """
    from persia.distributed import costs
    from persia.distributed.addresses import resolve
    from persia.distributed.scaling import Progress, Scaling, plan
    from persia.distributed.security import Security
    from persia.distributed.status import ask

    if not servers:
        raise InvalidArgument(
            "`servers`: give the address of each server of the job, or set "
            "PERSIA_SERVERS"
        )
    addresses, security = resolve(servers, Security.from_environment())
    said: list[str] = []
    cost: costs.ScaleCost | None = None
    shown: dict[int, tuple[str, float]] = {}

    def show(progress: Progress) -> None:
        text, again = shown.get(progress.number, ("", 0.0))
        if text == progress.text and progress.seconds < again:
            return
        shown[progress.number] = progress.text, progress.seconds + _PAUSE
        move = progress.move
        rows = f", {counted(progress.rows, 'row')}" if progress.rows else ""
        line = (
            f"move {progress.number} of {progress.count}: shard {move.shard} "
            f"from {move.source} to {move.target}: {progress.text}{rows}"
        )
        tell(line, f" ({progress.seconds:.1f} s)")

    def tell(line: str, more: str = "") -> None:
        if said[-1:] != [line]:
            said.append(line)
            say(line + more, aside=json)

    with Scaling(
        addresses, namespace=namespace, security=security, timeout=timeout
    ) as scaling:
        if revive and not dry_run:
            for shard, address in scaling.revive(to, tell).items():
                tell(f"shard {shard} begins again at {address}")
        places = scaling.places(tell)
        moves = plan(places, to)
        if dry_run:
            for move in moves:
                say(
                    f"would move shard {move.shard} from {move.source} to "
                    f"{move.target}",
                    aside=json,
                )
            found = ask(
                addresses,
                namespace=namespace,
                security=security,
                timeout=timeout,
                interval=1.0,
            )
            cost = costs.of_job(places, to, found)
        else:
            scaling.run(moves, show, at_once)
            places = scaling.places()
    if json:
        more = {"cost": dataclasses.asdict(cost)} if cost else {}
        print_json({"moves": len(moves), "servers": places} | more)
        return
    if cost is not None:
        print_cost(cost, counted(to, "server"))
        return
    for address, shards in places.items():
        numbers = ", ".join(map(str, shards))
        print(f"{address}: " + (f"shards {numbers}" if shards else "no shard"))
