"""Topics by a URL: kafka://BROKER:PORT/TOPIC?group=NAME."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from persia import errors
from persia.base.urls import Url
from persia.data import Kafka, Schema
from persia.train.config import TrainConfig

_BOOLS = {"true": True, "false": False}
_TYPES: dict[str, Callable[[str], Any]] = {
    "timeout": float,
    "strict": _BOOLS.__getitem__,
}
_VALUES = {"value", "value_schema", "value_message", "value_registry"}
_KNOWN = _VALUES | {"since", "config", "timeout", "strict", "dead_letter"}


def open_topics(config: TrainConfig, rank: int, world_size: int) -> Kafka:
    """Topics by "kafka://broker:9092/topic?group=name"; several brokers or
    topics have commas between them."""
    url, options = _options(config.data, _KNOWN | {"group"}, {"group"})
    if config.table_schema is None:
        raise errors.InvalidArgument(
            "`data=kafka://`: need `schema`, as messages to infer one from "
            "differ with time"
        )
    if config.shuffle or config.eval_split:
        raise errors.InvalidArgument(
            "`shuffle` and `eval_split` go with files, not with "
            "`data=kafka://`; `eval_data` names files to score on"
        )
    schema = Schema.load(config.table_schema)
    return Kafka(
        _brokers(url),
        _topics(url),
        schema=schema.chosen(config.labels, config.group),
        batch_size=config.batch_size,
        until="latest",
        malformed_limit=config.malformed_limit,
        rank=rank,
        world_size=world_size,
        **options,
    )


def infer_topics(
    url: str, label: Sequence[str] = (), group: str | None = None
) -> Schema:
    """The schema of the oldest messages of topics; ``label`` and ``group``
    are columns.

    Raises:
        InvalidArgument: it is no URL of topics.
        SchemaMismatch: no message is written as the URL says.
    """
    from persia.data.kafka.sample import sample_topics
    from persia.data.schema.inference import infer

    place, options = _options(url, _KNOWN | {"group"}, set())
    for name in ("group", "since", "strict", "dead_letter"):
        options.pop(name, None)
    first = sample_topics(_brokers(place), _topics(place), **options)
    return infer(first, label, group)


def _brokers(url: Url) -> str:
    return f"{url.user}@{url.host}" if url.user else url.host


def _topics(url: Url) -> list[str]:
    return url.path.removeprefix("/").split(",")


def _options(
    text: str, known: set[str], needed: set[str]
) -> tuple[Url, dict[str, Any]]:
    """A URL of topics, and its options by their types."""
    url = Url.to_open(text)
    options: dict[str, Any] = url.options
    if not needed <= set(options) <= known or not url.host:
        raise errors.InvalidArgument(
            f"`data={url}`: need kafka://BROKER:PORT/TOPIC?group=NAME,"
            " and after it &value=arrow, &value=avro&value_schema=FILE, "
            "&since=2026-11-25T08:00Z, &config=FILE, &timeout=SECONDS, "
            "&strict=true or &dead_letter=TOPIC as wanted"
        )
    for name, read in _TYPES.items():
        try:
            if name in options:
                options[name] = read(options[name])
        except (KeyError, ValueError):
            raise errors.InvalidArgument(
                f"`data={url}`: {name} is {options[name]!r}, need "
                + ("seconds" if name == "timeout" else "true or false")
            ) from None
    return url, options
