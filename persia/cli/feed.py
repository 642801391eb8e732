"""``persia feed``: a data loader as a process."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any

import pydantic
import typer
from pydantic import Field

from persia.base.options import validated
from persia.cli.flags import positional, with_flags
from persia.errors import InvalidArgument
from persia.train.config import of_train, resolve

__all__ = ["command"]

# Options of the data, which mean what they mean in persia train.
_DATA = (
    *("data", "table_schema", "samples", "shuffle", "eval_data", "eval_split"),
    *("batch_size", "epochs", "seed"),
)


class FeedConfig(pydantic.BaseModel):
    """The options of ``persia feed``; their names are those of the flags."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=()
    )

    data: str = of_train("data")
    table_schema: str | None = of_train("table_schema")
    samples: int = of_train("samples")
    shuffle: int = of_train("shuffle")
    eval_data: str | None = of_train("eval_data")
    eval_split: float | None = of_train("eval_split")
    batch_size: int = of_train("batch_size")
    epochs: int = of_train("epochs")
    seed: int = of_train("seed")
    workers: str | None = Field(
        None,
        description="host:port of embedding workers, with commas between "
        "(default: PERSIA_WORKERS).",
    )
    namespace: str | None = Field(
        None,
        description="That of the workers: the name of the job (default: "
        "PERSIA_NAMESPACE, else default).",
    )
    shard: str = Field(
        "0/1",
        pattern="^[0-9]+/[0-9]+$",
        description="Which data loader of how many, such as 0/2: each sends "
        "its share of the batches.",
    )
    job: str | None = Field(
        None,
        description="A loader with this name that is started again, with the "
        "same options, continues where the servers are; not for kafka:// "
        "(default: PERSIA_RUN_ID, which persia launch sets).",
    )
    timeout: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="Seconds after which it is an error that no worker can "
        "be reached.",
    )
    move_after: float | None = Field(
        None,
        ge=0,
        le=86400,
        description="Seconds after which the batches of a worker that cannot "
        "be reached go to others (default: a sixth of --timeout).",
    )

    def name(self) -> str | None:
        """What these batches are called, if they can be made again."""
        job = self.job or os.environ.get("PERSIA_RUN_ID")
        if not job or self.data.startswith("kafka://"):
            return None
        of = {*_DATA, "shard", "namespace"} - {"epochs"}
        options = self.model_dump(mode="json", include=of)
        return json.dumps([job, options], sort_keys=True)


@with_flags(FeedConfig)
def command(
    file: Annotated[
        str | None,
        typer.Argument(help="The same as --data.", metavar="data"),
    ] = None,
    **flags: Any,
) -> None:
    """Send the batches of a data set to embedding workers.

    They are those that persia train makes with the same options. What that
    holds out to score on is not sent. With --job a loader that was killed can
    be started again: it continues with what servers do not have.

    persia feed clicks.parquet --workers worker0:8889
    """
    given = {k: v for k, v in flags.items() if v is not None}
    given |= positional(file, given)
    config = validated(FeedConfig, given)
    index, count = map(int, config.shard.split("/"))
    if index >= count:
        raise InvalidArgument(
            f"--shard {config.shard}: loaders are 0 to N - 1 of N"
        )
    from persia.data import Sender
    from persia.train.sources import open_data

    what = resolve(
        config.model_dump(by_alias=True, exclude_none=True, include=set(_DATA))
    )
    source, _ = open_data(what, (index, count))
    began = time.monotonic()
    samples = 0
    with Sender(
        config.workers,
        namespace=config.namespace,
        name=config.name(),
        timeout=config.timeout,
        move_after=config.move_after,
    ) as sender:
        print(f"sending {what.data} to embedding workers", flush=True)
        for epoch in range(what.epochs):
            source.epoch = epoch
            for batch in source:
                sender.send(batch)
                samples += len(batch)
            sender.end()
        sender.flush()
        stats = sender.stats()
    seconds = time.monotonic() - began
    print(
        f"sent {stats['sent']:,} batches, {samples:,} samples, {what.epochs} "
        f"epoch{'s' if what.epochs > 1 else ''}, in {seconds:.1f} s",
        flush=True,
    )
    if stats["passed"]:
        print(
            f"{stats['passed']:,} of them servers had already: they were not "
            "sent",
            flush=True,
        )
