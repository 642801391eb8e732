"""The partitions of Kafka topics, cut into blocks of offsets."""

from __future__ import annotations

import datetime
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from operator import lt
from typing import Any, TypeVar

from persia import errors
from persia.data.kafka.brokers import (
    Brokers,
    Key,
    key_text,
    library,
    log,
)
from persia.data.kafka.states import TABLE, Event, State

T = TypeVar("T")

_AT_ONCE = 10_000  # messages of one call
_WAIT = 0.05  # seconds that one call waits for messages
_GONE = {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"}
_QUIET = 2.0  # seconds without a message until the leader is asked


@dataclass
class Partition:
    """One partition on its way.

    Attributes:
        next: the first offset that no block has had.
        seen: below it each message is in ``held`` or does not exist.
        end: where to stop; None: nowhere.
        held: messages that no block has had.
        offsets: of each, ascending.
        state: where it is; events alone change it.
    """

    key: Key
    next: int
    seen: int
    end: int | None
    held: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    state: State = State.PLACING

    def on(self, event: Event) -> None:
        self.state = TABLE[self.state][event]

    @property
    def over(self) -> bool:
        return self.state is State.DONE

    def check_end(self) -> None:
        if self.end is not None and self.next >= self.end and not self.over:
            self.on(Event.END)

    def hold(self, messages: list[Any], offsets: list[int]) -> None:
        """Holds those that did not arrive before; offsets ascend."""
        new = bisect_left(offsets, self.seen)
        if new == len(offsets) or self.state is State.OVERTAKEN:
            return
        self.held += messages[new:]
        self.offsets += offsets[new:]
        self.seen = offsets[-1] + 1
        self.on(Event.MESSAGE)

    def take(self, below: int) -> list[Any]:
        n = bisect_left(self.offsets, below)
        out = self.held[:n]
        del self.held[:n], self.offsets[:n]
        self.next = below
        return out


class Reader:
    """Cuts partitions into blocks: block n of a partition is its messages
    with offsets n * size to (n + 1) * size. The partitions take turns.

    Args:
        brokers: where they are.
        topics: all of them.
        size: offsets of a block.
        since: where to begin; None: at the oldest messages.
        ends: stop at the offsets that partitions end with at the start.
        whole: ... or before a block that is not whole.
        strict: raise where messages are gone that were not read.
        stop: ends the waiting for messages.
        kept: consumers without partitions, to take one from and to put it
            back; None: make one, and close it.
    """

    def __init__(
        self,
        brokers: Brokers,
        topics: Sequence[str],
        size: int,
        *,
        since: datetime.datetime | None,
        ends: bool,
        whole: bool,
        strict: bool,
        stop: threading.Event,
        kept: list[Any] | None = None,
    ) -> None:
        self._brokers = brokers
        self._topics = topics
        self._size = size
        self._since = since
        self._ends = ends
        self._whole = whole
        self._strict = strict
        self._stop = stop
        self._kept = kept
        self._most = 4 * size + _AT_ONCE  # messages held of a partition
        self._counts: dict[str, int] = {}  # partitions of each topic
        self.parts: dict[Key, Partition] = {}
        self.high: dict[Key, int] = {}  # where each partition ends
        self.lost: Counter[Key] = Counter()  # offsets that were gone

    def blocks(
        self, shard: int, shards: int, at: Mapping[str, Any] | None
    ) -> Generator[tuple[list[Any], dict[str, Any]], None, None]:
        """The messages of each block, with the position after it.

        Raises:
            InvalidArgument: there are more ranks than partitions, or ``at``
                is the position of another share.
            StorageError: a topic does not exist, or messages are gone.
            Unavailable: brokers are away for too long.
        """
        kept = self._kept
        consumer = kept.pop() if kept else self._brokers.consumer()
        whole = False
        try:
            turn = self._open(consumer, shard, shards, at)
            parts = list(self.parts.values())
            for i in count(turn):
                if all(part.over for part in parts) or self._stop.is_set():
                    whole = True
                    return
                part = parts[i % len(parts)]
                if part.over:
                    continue
                cut = (part.next // self._size + 1) * self._size
                cut = cut if part.end is None else min(cut, part.end)
                if not self._fill(consumer, part, cut):
                    return
                messages = part.take(cut)
                self._resume(consumer, part)
                yield messages, self._position(parts[(i + 1) % len(parts)])
        finally:
            if kept is not None and whole:
                consumer.unassign()
                kept.append(consumer)
            else:
                consumer.close()

    def counts(self) -> dict[str, int]:
        """The number of partitions of each topic.

        Raises:
            StorageError: there is no such topic.
            Unavailable: brokers are away for too long.
        """
        consumer = self._brokers.consumer()
        try:
            return {t: self._partitions(consumer, t) for t in self._topics}
        finally:
            consumer.close()

    def _position(self, turn: Partition) -> dict[str, Any]:
        return {
            "offsets": {key_text(k): p.next for k, p in self.parts.items()},
            "turn": key_text(turn.key),
            "partitions": dict(self._counts),
        }

    # ---- the beginning

    def _open(
        self,
        consumer: Any,
        shard: int,
        shards: int,
        at: Mapping[str, Any] | None,
    ) -> int:
        """Finds the partitions of a share; whose turn it is."""
        for topic in self._topics:
            self._counts[topic] = self._partitions(consumer, topic)
        keys = [
            (topic, number)
            for i, topic in enumerate(self._topics)
            for number in range(self._counts[topic])
            if (i + number) % shards == shard
        ]
        if not keys:
            raise errors.InvalidArgument(
                f"topics {list(self._topics)} have {self._counts} partitions,"
                f" none for share {shard} of {shards}; use fewer ranks or "
                "workers, or more partitions"
            )
        offsets = {} if at is None else self._offsets(keys, at)
        for key in keys:
            low, high = self._range(consumer, key)
            begin = offsets.get(key)
            if begin is None:
                begin = self._first(consumer, key, low, high)
            begin = self._check(key, begin, low, high)
            self.high[key] = high
            if self._whole:
                high -= high % self._size
            part = Partition(key, begin, begin, high if self._ends else None)
            part.on(Event.PLACED)
            part.check_end()
            self.parts[key] = part
        parts = [part for part in self.parts.values() if not part.over]
        if parts:
            consumer.assign([_place(part) for part in parts])
        names = [key_text(key) for key in keys]
        return 0 if at is None else names.index(at["turn"])

    def _partitions(self, consumer: Any, topic: str) -> int:
        kafka = library()

        def question(seconds: float) -> Any:
            found = consumer.list_topics(topic, timeout=seconds).topics[topic]
            error = found.error
            if (
                error is not None
                and error.code() == kafka.KafkaError.LEADER_NOT_AVAILABLE
            ):
                raise kafka.KafkaException(error)  # soon, of a new topic
            return found

        found = self._ask(question, consumer)
        if found.error is not None:
            self._brokers.check_access(found.error)
            raise errors.StorageError(
                f"Kafka at {self._brokers.servers}, topic {topic!r}: "
                f"{found.error.str()}; check topics="
            )
        return len(found.partitions)

    def _offsets(
        self, keys: Sequence[Key], at: Mapping[str, Any]
    ) -> dict[Key, int]:
        """The offsets of a position, which is of the same share."""
        given, before = at["offsets"], at["partitions"]
        old = [k for k in keys if k[1] < before.get(k[0], 0)]
        if {key_text(key) for key in old} != set(given):
            raise errors.InvalidArgument(
                f"the position has partitions {sorted(given)}, this share "
                f"has {sorted(map(key_text, old))}: continue with the same "
                "topics, ranks and workers"
            )
        return {key: given[key_text(key)] for key in old}

    def _check(self, key: Key, begin: int, low: int, high: int) -> int:
        """Where a place continues; offsets that are gone are counted."""
        if begin > high:
            raise errors.StorageError(
                f"Kafka at {self._brokers.servers}: {key_text(key)} ends at "
                f"offset {high}, before the position {begin}: the topic is "
                "another one; begin without the position"
            )
        if begin < low:
            text = (
                f"Kafka at {self._brokers.servers}: offsets {begin} to {low} "
                f"of {key_text(key)} are gone and were not read"
            )
            if self._strict:
                raise errors.StorageError(
                    f"{text}; strict=False continues behind them"
                )
            log.warning("%s (counted in stats())", text)
            self.lost[key] += low - begin
        return max(begin, low)

    # ---- messages

    def _ask(self, question: Callable[[float], T], consumer: Any) -> T:
        # One that has partitions is served by consume() alone.
        idle = None if self.parts else consumer
        return self._brokers.ask(question, self._stop, idle)

    def _range(self, consumer: Any, key: Key) -> tuple[int, int]:
        """The first offset of a partition, and the one behind its last."""
        place = library().TopicPartition(*key)

        def question(seconds: float) -> tuple[int, int]:
            found: tuple[int, int] = consumer.get_watermark_offsets(
                place, timeout=seconds
            )
            return found

        return self._ask(question, consumer)

    def _first(self, consumer: Any, key: Key, low: int, high: int) -> int:
        """Where a partition without a position begins."""
        if self._since is None:
            return low
        time = round(self._since.timestamp() * 1000)
        place = library().TopicPartition(*key, time)
        (found,) = self._ask(
            lambda seconds: consumer.offsets_for_times(
                [place], timeout=seconds
            ),
            consumer,
        )
        if found.error is not None:
            self._brokers.check_access(found.error)
            raise errors.StorageError(
                f"Kafka at {self._brokers.servers}, {key_text(key)} since "
                f"{self._since}: {found.error.str()}"
            )
        return found.offset if 0 <= found.offset < high else high

    def _fill(self, consumer: Any, part: Partition, cut: int) -> bool:
        """Waits for all messages below an offset; False: it was stopped."""
        heard = asked = time.monotonic()
        while part.seen < cut:
            if self._stop.is_set():
                return False
            seen = part.seen
            # All that is there, or the next one.
            arrived = consumer.consume(_AT_ONCE, 0)
            self.note(arrived or consumer.consume(1, _WAIT))
            self._brokers.check_refused()
            for one in self.parts.values():
                if one.state is State.OVERTAKEN:
                    self._place_again(consumer, one)
            now = time.monotonic()
            if part.seen > seen:
                heard = asked = now
                self._pause(consumer, part)
            elif now - asked > _QUIET:
                part.on(Event.SILENT)
                self._check_quiet(consumer, part, now - heard)
                asked = time.monotonic()
        return True

    def _check_quiet(
        self, consumer: Any, part: Partition, silent: float
    ) -> None:
        """Raises where what is waited for does not arrive any more."""
        _, high = self._range(consumer, part.key)
        self.high[part.key] = high
        if part.end is not None and high < part.end:
            part.on(Event.ERROR)
            raise errors.StorageError(
                f"Kafka at {self._brokers.servers}: {key_text(part.key)} ends "
                f"at offset {high}, and ended at {part.end} before: it was "
                "cut, or the topic was made again"
            )
        if part.seen < high and silent > self._brokers.timeout:
            part.on(Event.ERROR)
            raise errors.Unavailable(
                f"Kafka at {self._brokers.servers} gave no message of "
                f"{key_text(part.key)} at offset {part.seen} for "
                f"{self._brokers.timeout:g} s, though it ends at {high}"
            )

    def _place_again(self, consumer: Any, part: Partition) -> None:
        """Continues behind messages that were removed before they were
        read."""
        low, high = self._range(consumer, part.key)
        part.seen = self._check(part.key, part.seen, low, high)
        place = _place(part)
        consumer.incremental_unassign([place])
        consumer.incremental_assign([place])
        part.on(Event.PLACED)

    def note(self, messages: list[Any]) -> None:
        """Sorts what has arrived by its partition, a run of each at once."""
        kinds = [
            (m.topic(), m.partition(), m.error() is None) for m in messages
        ]
        first = 0
        for (topic, number, whole), same in groupby(kinds):
            run = messages[first : first + len(list(same))]
            first += len(run)
            part = self.parts.get((topic, number))
            if part is None:  # of a broker, whose errors have a call
                continue
            if not whole:
                for event in run:
                    self._note_event(part, event)
            else:
                offsets = [message.offset() for message in run]
                if all(map(lt, offsets, offsets[1:])):
                    part.hold(run, offsets)
                else:
                    for one, offset in zip(run, offsets):
                        part.hold([one], [offset])
            self.high[part.key] = max(self.high[part.key], part.seen)

    def _note_event(self, part: Partition, message: Any) -> None:
        error = message.error()
        if error.code() == library().KafkaError._PARTITION_EOF:
            part.seen = max(part.seen, message.offset())
            part.on(Event.MESSAGE)
        elif error.name() in _GONE:
            part.on(Event.GONE)
        else:
            part.on(Event.ERROR)
            self._brokers.check_access(error)
            raise errors.StorageError(
                f"Kafka at {self._brokers.servers}, {key_text(part.key)} at "
                f"offset {part.seen}: {error.str()}"
            )

    def _pause(self, consumer: Any, waiting: Partition) -> None:
        """Partitions that are far ahead wait for the others."""
        for part in self.parts.values():
            if (
                len(part.held) > self._most
                and part is not waiting
                and part.state is State.READING
            ):
                consumer.pause([library().TopicPartition(*part.key)])
                part.on(Event.FULL)

    def _resume(self, consumer: Any, part: Partition) -> None:
        _, high = consumer.get_watermark_offsets(
            library().TopicPartition(*part.key), cached=True
        )
        self.high[part.key] = max(self.high[part.key], high)
        ahead = part.state is State.AHEAD
        if ahead and len(part.held) <= self._most // 2:
            consumer.resume([library().TopicPartition(*part.key)])
            part.on(Event.TAKEN)
        part.check_end()


def _place(part: Partition) -> Any:
    """What a consumer is given to read it from where it is."""
    return library().TopicPartition(*part.key, part.seen)
