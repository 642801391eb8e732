"""Kafka topics as batches."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from persia import errors
from persia.base.check import kind, real
from persia.data.base import Dataset, read_ahead
from persia.data.batches.batch import Batch
from persia.data.faults import MALFORMED_LIMIT, Faults, check_limit
from persia.data.kafka.brokers import (
    Brokers,
    DeadLetters,
    Key,
    key_text,
    settings,
)
from persia.data.kafka.consumer import Reader
from persia.data.kafka.registry import Place
from persia.data.kafka.values import Values, Written
from persia.data.schema.encode import asks
from persia.data.schema.schema import Schema
from persia.data.table import as_schema


class Kafka(Dataset):
    """Kafka topics as batches, whose boundaries are the same after a restart.

    A batch has the messages of one partition with offsets n * batch_size to
    (n + 1) * batch_size. It has fewer samples where offsets have gaps or
    messages are malformed, and where ``until`` ends it. The partitions take
    turns in a fixed order, so the slowest one sets the pace.

    The position is in ``state_dict()``, and so in the checkpoints of
    ``store.save(loader=...)``: no group decides it, and there are no
    rebalances. Without a loaded position, reading begins at the oldest
    message, or at ``since``. The next iteration continues where the latest
    one ended.

    Args:
        brokers: "host:port" of some brokers: with commas, or a list.
        topics: a topic, or a list of them.
        group: the group that :meth:`commit` commits offsets for.
        schema: a :class:`Schema`, the path of a YAML file, or the name of a
            preset. It has all moments and quantiles.
        batch_size: offsets of a batch. An Arrow message may have any number
            of rows, so a batch of those may have more samples.
        value: how messages are written: "json", one object each; "arrow",
            one stream of Arrow's IPC format each; "avro" or "protobuf", one
            record each.
        value_schema: the file of the record's schema: ``.avsc`` of Avro, or
            a descriptor set of Protocol Buffers (``protoc --include_imports
            --descriptor_set_out``).
        value_message: with "protobuf", the full name of the message, such as
            "shop.Click". None: the only one of the file.
        value_registry: with "avro", where the schemas are that messages are
            written with; each begins with its id, in the wire format of
            Confluent. A folder of files ``ID.avsc``, the URL of a registry,
            or a dict of settings for confluent-kafka's
            ``SchemaRegistryClient``. Rows have the fields of
            ``value_schema``. None: messages are written with
            ``value_schema``, without an id.
        since: without a position, begin in each partition at the first
            message of this time or a later one. A datetime, or its text in
            ISO 8601, such as "2026-11-25T08:00Z"; UTC where it names no
            zone. None: the oldest message.
        until: "latest": stop where the partitions end at the start of the
            iteration. None: wait for more messages, without end.
        strict: raise at a malformed message, and where messages are gone
            that were not read, instead of counting both.
        malformed_limit: the share of the messages that one rule may leave
            out. Beyond it the iteration ends with LimitReached: after 10,000
            messages, or at the end of 100 or more. Messages that go to
            ``dead_letter`` do not count.
        dead_letter: a topic that malformed messages are sent to, with their
            place and what is wrong in their headers. None: no topic.
        timeout: seconds that brokers may be away.
        config: further settings of librdkafka, such as
            ``{"security.protocol": "SASL_SSL"}``; or the path of a file with
            a line ``NAME=VALUE`` for each.
        rank, world_size: take every world_size-th partition.

    Raises:
        InvalidArgument: an argument of the wrong kind, or confluent-kafka is
            not installed; (iterating) more ranks than partitions, or the
            position of other partitions.
        SchemaMismatch: ``value_schema`` is no such file, or its records do
            not fit the schema; (iterating) no message fits the schema.
        MalformedData: (iterating) ``strict``, and a message is malformed.
        StorageError: (iterating) there is no such topic, or messages at the
            position are gone.
        Unavailable: (iterating) brokers are away for longer than
            ``timeout``, or the registry of schemas is.
        AccessDenied: (iterating) brokers or the registry refuse access.
    """

    continues = True

    def __init__(
        self,
        brokers: str | Sequence[str],
        topics: str | Sequence[str],
        group: str,
        schema: Schema | str | os.PathLike[str],
        batch_size: int = 1024,
        *,
        value: str = "json",
        value_schema: str | os.PathLike[str] | None = None,
        value_message: str | None = None,
        value_registry: Place | None = None,
        since: datetime.datetime | str | None = None,
        until: str | None = None,
        strict: bool = False,
        malformed_limit: float = MALFORMED_LIMIT,
        dead_letter: str | None = None,
        timeout: float = 60.0,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(
            batch_size,
            seed=0,
            drop_last=False,
            rank=rank,
            world_size=world_size,
        )
        self._written = Written.checked(
            value, value_schema, value_message, value_registry
        )
        if until not in (None, "latest"):
            raise errors.InvalidArgument(
                f"until is {until!r}, need 'latest' or None"
            )
        if not 0 < real(timeout) < float("inf"):
            raise errors.InvalidArgument(
                f"timeout is {timeout!r}, need a number of seconds above 0"
            )
        kind("group", group, (str,), "the name of a group")
        self.schema = as_schema(schema)
        if asks(self.schema):
            raise errors.InvalidArgument(
                "the schema asks for moments, quantiles or dtypes, which "
                "differ as messages arrive; give the numbers, and the dtype "
                "of each carried or aligned column"
            )
        self._written.reader(sorted(self.schema.used_columns))
        self._topics = _names("topics", topics)
        self._brokers = Brokers(
            ",".join(_names("brokers", brokers)),
            group,
            settings(config),
            float(timeout),
        )
        self.keys = [c.feature for c in self.schema.features]
        self.dense_names = [c.column for c in self.schema.dense]
        self.value = value
        self.since = _time(since)
        self.until = until
        self.dead_letter = dead_letter
        self._faults = Faults(strict, check_limit(malformed_limit))
        self._sent = 0
        self._lost: Mapping[Key, int] = {}
        self._high: Mapping[Key, int] = {}
        self.whole = False  # the last batch, too: see partitions()
        self._stop: threading.Event | None = None  # of the latest iteration
        self._kept: list[Any] | None = None  # consumers of a partition alone

    def __getstate__(self) -> dict[str, Any]:
        kept: list[Any] | None = None if self._kept is None else []
        return self.__dict__ | {"_stop": None, "_kept": kept}

    def __repr__(self) -> str:
        return (
            f"Kafka({self._brokers.servers!r}, {self._topics}, features="
            f"{self.keys}, dense={self.dense_names}, "
            f"batch_size={self.batch_size})"
        )

    @property
    def malformed(self) -> int:
        """Malformed messages seen so far in this process."""
        return self._faults.count

    @property
    def malformed_lines(self) -> list[str]:
        """What was wrong with the first 100 of them, with their place."""
        return self._faults.lines

    @property
    def malformed_limit(self) -> float:
        """The share of the messages that one rule may leave out."""
        return self._faults.limit

    @malformed_limit.setter
    def malformed_limit(self, limit: float) -> None:
        self._faults.limit = check_limit(limit)

    def stats(self) -> dict[str, Any]:
        """Where the latest iteration in this process is.

        Returns:
            ``lag``: by "topic/partition", messages behind the last batch
            given out, as far as brokers have said; ``malformed``,
            ``dead_letters``: messages; ``lost``: offsets that were gone
            before they were read.
        """
        at = self.state_dict()["at"]
        given = {} if at is None else at["offsets"]
        return {
            "lag": {
                key_text(key): end - given[key_text(key)]
                for key, end in dict(self._high).items()
                if key_text(key) in given
            },
            "malformed": self.malformed,
            "dead_letters": self._sent,
            "lost": sum(dict(self._lost).values()),
        }

    def commit(self, state: Mapping[str, Any]) -> None:
        """Commits the offsets of a position to the group.

        Call it after the checkpoint with that position is saved. Other tools
        see the progress then; this class never reads it.

        Args:
            state: a ``state_dict()`` of this source, or of the
                :class:`persia.DataLoader` over it.

        Raises:
            InvalidArgument: it is no such state.
            Unavailable: brokers are away for longer than ``timeout``.
            StorageError: a partition refuses it.
        """
        at = state.get("source", state).get("at", state)
        if at is None:  # nothing was given out
            return
        offsets = {}
        for name, offset in _offsets(at).items():
            topic, _, partition = name.rpartition("/")
            offsets[topic, int(partition)] = offset
        self._brokers.commit(offsets)

    # ---- a partition alone, for persia feed

    def partitions(self) -> dict[str, Kafka]:
        """By "topic/partition", a source of its whole batches alone.

        Its batches have numbers that depend on nothing but the offsets:
        see :meth:`numbered`. With ``until="latest"`` the messages of the
        last batch wait until it is whole.

        Raises:
            StorageError: there is no such topic.
            Unavailable: brokers are away for longer than ``timeout``.
        """
        found, lasting = {}, replace(self._brokers, lasting=True)
        for topic, count in self._reader(threading.Event()).counts().items():
            for number in range(count):
                part = self._copy()
                part._topics = [topic]
                part.rank, part.world_size = number, count
                part.whole = True
                part._kept, part._brokers = [], lasting
                found[key_text((topic, number))] = part
        return found

    def numbered(self, begin: int) -> Iterator[tuple[int, Batch]]:
        """(n, batch n) of a partition alone, from 1: that of offsets
        (n - 1) * batch_size to n * batch_size. Batches without samples are
        left out.

        Args:
            begin: the number of the last batch that is not wanted.
        """
        self.forget_position()
        if begin:
            version = {"hash_version": self.schema.hash_version}
            self.load_state_dict({"epoch": 0} | version | self._after(begin))
        for batch in self:
            (end,) = self.state_dict()["at"]["offsets"].values()
            yield -(-end // self.batch_size), batch

    @property
    def key(self) -> Key:
        """(topic, partition) of a partition alone."""
        return self._topics[0], self.rank

    def ends_of(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Where partitions end now, as far as brokers answer."""
        return self._brokers.ends(keys)

    def commit_batches(self, batches: int) -> None:
        """Commits the offsets of so many batches of a partition alone."""
        self.commit(self._after(batches))

    def _after(self, batches: int) -> dict[str, Any]:
        """The position after so many batches of a partition alone."""
        count, key = self.world_size, key_text(self.key)
        at = {
            "offsets": {key: batches * self.batch_size},
            "turn": key,
            "partitions": {self._topics[0]: count},
        }
        return {"batches": batches, "at": at}

    # ---- reading

    def __iter__(self) -> Iterator[Batch]:
        self.rewind(self._given)
        return self._until_closed()

    def rewind(self, batches: int) -> int:
        """The next iteration begins after so many batches, or where a state
        was loaded since the latest one.

        Returns:
            the number of batches before it.
        """
        if self._begin is None:
            self.load_state_dict(self.state_dict(batches))
        return self._given

    def _until_closed(self) -> Generator[Batch, None, None]:
        self._stop = stop = threading.Event()
        batches = super().__iter__()  # closed after its reader was stopped
        try:
            for batch in batches:  # noqa: UP028
                yield batch
        finally:
            stop.set()

    def _batches(self, shard: int, shards: int) -> Iterator[Batch]:
        for batch, _ in self._batches_from(shard, shards, 0, None):
            yield batch

    def _batches_from(
        self, shard: int, shards: int, begin: int, at: Any
    ) -> Generator[tuple[Batch, Any], None, None]:
        if at is not None:
            _offsets(at)
        elif begin:
            raise errors.InvalidArgument(
                f"where batch {begin} ends is not known any more: take a "
                "state_dict() within 256 batches"
            )
        stop = self._stop or threading.Event()
        reader = self._reader(stop)
        self._high, self._lost = reader.high, reader.lost
        letters = None
        if self.dead_letter is not None:
            letters = DeadLetters(self._brokers, self.dead_letter)
        values = Values(self.schema, self._written, letters is not None)
        blocks = read_ahead(lambda: reader.blocks(shard, shards, at))
        with closing(blocks):
            try:
                for messages, place in blocks:
                    rows, wrong = values.rows([m.value() for m in messages])
                    self._leave_out(
                        [(messages[i], *odd) for i, odd in wrong.items()],
                        letters,
                    )
                    if letters is None:
                        self._faults.passed(len(messages))
                    if rows is not None:
                        yield rows.batch(self.keys), place
                if letters is None:
                    self._faults.check()
            finally:
                stop.set()

    def _reader(self, stop: threading.Event) -> Reader:
        return Reader(
            self._brokers,
            self._topics,
            self.batch_size,
            since=self.since,
            ends=self.until is not None,
            whole=self.whole,
            strict=self._faults.strict,
            stop=stop,
            kept=self._kept,
        )

    def _leave_out(
        self,
        wrong: Sequence[tuple[Any, str, str]],
        letters: DeadLetters | None,
    ) -> None:
        if letters is not None and wrong:
            letters.send([(message, text) for message, text, _ in wrong])
            self._sent += len(wrong)
        for message, text, rule in wrong:
            key = key_text((message.topic(), message.partition()))
            where = f"{key}:{message.offset()}"
            self._faults.add(where, text, rule)


def grown_parts(parts: Mapping[str, tuple[Kafka, int]]) -> set[str]:
    """Of partitions alone that have given out so many batches, those that may
    have another whole one: one question for all.

    Args:
        parts: by name, the partition and the batches.
    """
    if not parts:
        return set()
    first, _ = next(iter(parts.values()))
    ends = first.ends_of([source.key for source, _ in parts.values()])
    for source, _ in parts.values():
        if source.key in ends:
            source._high = {source.key: ends[source.key]}
    # Whose end is not known says why when it is read.
    return {
        name
        for name, (source, batches) in parts.items()
        if source.key not in ends
        or ends[source.key] >= (batches + 1) * source.batch_size
    }


def _names(what: str, value: str | Sequence[str]) -> list[str]:
    names = value.split(",") if isinstance(value, str) else list(value)
    if not names or not all(isinstance(n, str) and n for n in names):
        kind(what, value, (), "a text, or a list of them")
    return names


def _time(since: Any) -> datetime.datetime | None:
    """With a zone."""
    if isinstance(since, str):
        try:
            since = datetime.datetime.fromisoformat(since)
        except ValueError as error:
            raise errors.InvalidArgument(f"since: {error}") from None
    if since is None:
        return None
    kind("since", since, (datetime.datetime,), "a datetime, or its text")
    time: datetime.datetime = since
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _offsets(at: Any) -> dict[str, int]:
    """The offsets of a position.

    Raises:
        InvalidArgument: it is no position in Kafka topics.
    """
    try:
        offsets = {str(k): int(v) for k, v in at["offsets"].items()}
        if at["turn"] in offsets and isinstance(at["partitions"], Mapping):
            return offsets
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    raise errors.InvalidArgument(f"no position in Kafka topics: {at!r}")
