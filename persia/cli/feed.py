"""``persia feed``: a data loader as a process."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import typer
from pydantic import Field

from persia.base.counts import counted
from persia.base.environment import variable
from persia.base.health import Health
from persia.base.logs import describe, say
from persia.base.memory import keep_memory
from persia.base.options import validated
from persia.base.signals import Ending
from persia.cli.bars import watched
from persia.cli.flags import positional, with_flags
from persia.cli.options import DryRun, Json, print_json, would
from persia.cli.shared import begin
from persia.distributed.serving import MetricsHost, MetricsPort, page_of
from persia.errors import InvalidArgument, MalformedData
from persia.train.config import TrainConfig, UrlText, of_train, resolve

if TYPE_CHECKING:
    from persia.data import Dataset, Sender
    from persia.data.feeding import Loader

# Options of the data, which mean what they mean in persia train.
_DATA = (
    *("data", "table_schema", "samples", "shuffle", "eval_data", "eval_split"),
    *("batch_size", "epochs", "seed", "label", "group"),
)


class FeedConfig(pydantic.BaseModel):
    """The options of ``persia feed``; their names are those of the flags."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    data: UrlText = of_train("data")
    table_schema: UrlText | None = of_train("table_schema")
    label: str | None = of_train("label")
    group: str | None = of_train("group")
    samples: int = of_train("samples")
    shuffle: int = of_train("shuffle")
    malformed_limit: float = of_train("malformed_limit")
    eval_data: UrlText | None = of_train("eval_data")
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
        description="Namespace of the tables of the workers (default: "
        "PERSIA_NAMESPACE, else default).",
    )
    loader: str = Field(
        "0/1",
        pattern="^[0-9]+/[0-9]+$",
        description="Which data loader of how many, such as 0/2: each sends "
        "its share of the batches.",
    )
    parts: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Parts of the data that loaders with the same --job "
        "share: each sends parts that no other one has, those of a loader "
        "that died among them. persia serve worker --loaders is their number "
        "then. Of kafka:// each partition is a part: give their number.",
    )
    follow: bool = Field(
        False,
        description="With kafka:// and --parts: send messages as they arrive, "
        "in one epoch that does not end. Each loader has the parts of its "
        "--loader, and those of loaders that died.",
    )
    job: str | None = Field(
        None,
        min_length=1,
        description="Name of the job: persia train --job NAME trains its "
        "batches. With the same name and options batches that the servers "
        "have are not sent again, so a loader that was killed continues; of "
        "kafka:// with --parts alone (default: PERSIA_RUN_ID, which persia "
        "launch sets).",
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
    grace: float = Field(
        30.0,
        ge=0,
        le=86400,
        description="Seconds from SIGTERM or Ctrl-C until it has ended, "
        "whatever it waits for.",
    )
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"

    @property
    def job_name(self) -> str | None:
        return self.job or variable("PERSIA_RUN_ID")

    def name(self, part: str | None = None) -> str | None:
        """What these batches are called, if they can be made again; those of
        a part, if it is one."""
        kafka = self.data.startswith("kafka://")
        if not self.job_name or (kafka and part is None):
            return None
        of = {*_DATA, "namespace"} - {"epochs"}
        if kafka:  # whose batches are cut by offsets alone
            of = {"batch_size", "namespace"}
        if part is None:
            of.add("loader")
        options = self.model_dump(mode="json", include=of)
        for field in of & {"data", "eval_data"}:
            # Of a URL all but the user and the password tells it from others.
            if given := getattr(self, field):
                options[field] = [str(given), given.partition("?")[2]]
        if part is not None:
            options["part"] = part
        return json.dumps([self.job_name, options], sort_keys=True)


@with_flags(FeedConfig)
def command(
    file: Annotated[
        str | None,
        typer.Argument(help="The same as --data.", metavar="data"),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
    **flags: Any,
) -> None:
    """Send the batches of a data set to embedding workers.

    They are those that persia train makes with the same options. What that
    holds out to score on is not sent. With --job a loader that was killed can
    be started again: it continues with what servers do not have. The exit
    status is 1 if a batch ended without an update.

    persia feed clicks.parquet --workers worker0:8889
    """
    given = dict(flags)
    given |= positional(file, given)
    config = validated(FeedConfig, given)
    begin(config.model_dump(by_alias=True))
    describe(role="loader")
    index, count = map(int, config.loader.split("/"))
    if index >= count:
        raise InvalidArgument(
            f"--loader {config.loader}: loaders are 0 to N - 1 of N"
        )
    if config.parts and not config.job_name:
        raise InvalidArgument(
            "--parts: loaders share them by the name of the job: give --job"
        )
    if config.follow and not (
        config.parts and config.data.startswith("kafka://")
    ):
        raise InvalidArgument("--follow is for kafka:// with --parts")
    if dry_run:
        _try(config, index, count, json)
        return
    with Ending(config.grace) as ending:
        ending.what = "what was sent and is not trained is not waited for"
        _run(config, index, count, json)


def _try(config: FeedConfig, index: int, count: int, json: bool) -> None:
    """Reads the first batch."""
    from persia.train.sources import no_sample, open_data

    source, _ = open_data(train_options(config), index, count)
    if next(iter(source), None) is None:
        raise MalformedData(f"nothing to send: {no_sample(source)}")
    workers = config.workers or variable("PERSIA_WORKERS")
    would(
        f"send {config.data} to embedding workers {workers or '(none)'}", json
    )


def _run(config: FeedConfig, index: int, count: int, json: bool) -> None:
    keep_memory()
    began = time.monotonic()
    from persia.data.feeding import Loader

    loader = Loader(config.epochs)
    _show(loader, config)
    send = _send_parts if config.parts else send_share

    def sent_now() -> tuple[float, str]:
        counts = loader.counts()
        return counts["samples"], _sizes(counts)

    with watched("sent", sent_now):
        source = send(loader, config, index, count)
    sent = loader.counts()
    say(
        f"sent {_sizes(sent)}, {counted(config.epochs, 'epoch')}, in "
        f"{time.monotonic() - began:.1f} s"
    )
    if sent["passed"]:
        say(
            f"{sent['passed']:,} of them servers had already: they were not "
            "sent"
        )
    if not sent["streams"]:
        say(
            "all parts have ended: --epochs is of all runs of the job, so one "
            "more of it sends what has arrived since, or files again"
        )
    if sent["lost"]:
        say(
            f"lost: {sent['lost']:,} batches that were trained are not in the "
            "rows of the servers any more: a server was started again without "
            "them"
            + ("" if config.job_name else ", or a checkpoint was loaded")
            + ". Resume the trainer from an earlier checkpoint, then run the "
            "same command again" + ("" if config.job_name else ", with --job")
        )
    if sent["failed"]:
        failed = counted(sent["failed"], "batch")
        say(f"failed: {failed} ended without an update")
    if json:
        print_json(sent)
    if loader.failure is not None:
        raise type(loader.failure)(
            f"{sent['failed']:,} of {counted(sent['sent'], 'batch')} ended "
            f"without an update: {loader.failure}"
        )
    if sent["streams"] and not sent["samples"]:
        _check_some(config, source)


def _sizes(counts: Mapping[str, int]) -> str:
    batches = counted(counts["sent"], "batch")
    return f"{batches}, {counted(counts['samples'], 'sample')}"


def _check_some(config: FeedConfig, source: Dataset | None) -> None:
    """Nothing was sent: an error if there is nothing in the files, not if
    this is one loader of more than there are batches.

    Args:
        config: of the command.
        source: what was read; None: a share, or parts.
    """
    from persia.data import Files
    from persia.train.sources import no_sample, open_data

    some = None
    if source is None:
        source, _ = open_data(train_options(config))
        some = next(iter(source), None)
    if isinstance(source, Files) and some is None:
        raise MalformedData(f"nothing to send: {no_sample(source)}")


def _show(loader: Loader, config: FeedConfig) -> None:
    """Answers Prometheus and probes."""
    health = Health()
    health.serves()  # it serves no one: it is ready as soon as it runs
    page = page_of(config, health)
    if page is not None:
        from persia.prometheus import FeedCollector

        page.add(FeedCollector(loader.counts, loader.lag))


def train_options(config: FeedConfig) -> TrainConfig:
    """What persia train would read."""
    given = config.model_dump(
        by_alias=True,
        exclude_none=True,
        include={*_DATA, "malformed_limit"},
    )
    return resolve(given)


def _sender(config: FeedConfig, part: str | None = None) -> Sender:
    from persia.data import Sender

    return Sender(
        config.workers,
        namespace=config.namespace,
        name=config.name(part),
        job=config.job_name,
        timeout=config.timeout,
        move_after=config.move_after,
    )


def send_share(
    loader: Loader, config: FeedConfig, index: int, count: int
) -> Dataset | None:
    """Sends one share of the batches; what was read, if it is all."""
    from persia.train.sources import open_data

    source, _ = open_data(train_options(config), index, count)
    say(f"sending {config.data} to embedding workers")
    loader.send(source, partial(_sender, config))
    return source if count == 1 else None


def _send_parts(
    loader: Loader, config: FeedConfig, index: int, count: int
) -> None:
    """Sends parts, beginning with its own share of them."""
    from persia.data.feeding import parts_of
    from persia.train.sources import open_data

    source, _ = open_data(train_options(config))
    parts = list(parts_of(source, config.parts or 1).items())
    first, end = (len(parts) * i // count for i in (index, index + 1))
    number = counted(len(parts), "part")
    say(f"sending {config.data} in {number} to embedding workers")
    make = partial(_sender, config)
    if config.follow:
        others = parts[end:] + parts[:first]
        loader.follow(dict(parts[first:end]), dict(others), make)
    else:
        loader.send_parts(dict(parts[first:] + parts[:first]), make)
