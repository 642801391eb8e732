"""The brokers of Kafka: how they are reached, and waited for."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from persia import errors
from persia.base import requirements
from persia.base.check import kind

log = logging.getLogger("persia.data.kafka.source")

_SAME_S = 60  # between lines of the library that say the same
_OF_CLIENT = re.compile(r"\[rdkafka#[^]]*\] |\(after [^)]*\)")


class Repeats(logging.Filter):
    """Leaves out what the library says again and again, such as each of many
    refused connections a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = _OF_CLIENT.sub("", record.getMessage())
        before = self._said.get(text)
        if before is not None and 0 <= record.created - before < _SAME_S:
            return False
        if len(self._said) >= 1000:
            self._said.clear()
        self._said[text] = record.created
        return True


_library_log = logging.getLogger("persia.data.kafka.library")
_library_log.addFilter(Repeats())

T = TypeVar("T")
Key = tuple[str, int]  # (topic, partition)

_BACK_OFF = (0.1, 5.0)  # seconds: the first one, and the longest
_LETTERS = 10_000  # sent at once
_ANSWER = (1.0, 10.0)  # seconds that a question waits: at first, and at most
_ENDS_S = 5.0  # seconds that the question for all ends waits
_REFUSED = {"_AUTHENTICATION", "_SSL", "SASL_AUTHENTICATION_FAILED"}
_MEMBERS = {
    "UNKNOWN_MEMBER_ID",
    "ILLEGAL_GENERATION",
    "REBALANCE_IN_PROGRESS",
    "FENCED_INSTANCE_ID",
}


@cache
def library(name: str = "confluent_kafka") -> Any:
    """A library that only those need who read Kafka."""
    return requirements.library(name, "kafka", "these messages of Kafka")


def key_text(key: Key) -> str:
    """A partition as the keys of a state and of stats() have it."""
    return f"{key[0]}/{key[1]}"


def settings(config: Any) -> dict[str, Any]:
    """Settings of librdkafka, or those of a file with NAME=VALUE lines.

    Raises:
        InvalidArgument: they are another thing, or no such file.
    """
    if not isinstance(config, str | os.PathLike):
        need = "settings of librdkafka, or the path of a file of them"
        kind("config", config or {}, (Mapping,), need)
        return dict(config or {})
    path = os.fspath(config)
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidArgument(f"config is {path!r}: {error}") from None
    found = {}
    for i, line in enumerate(lines, 1):
        if not line or line[0] in "#!":
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise errors.InvalidArgument(
                f"config: line {i} of {path!r} is not NAME=VALUE"
            )
        found[name.strip()] = value.strip()
    return found


@dataclass(frozen=True)
class Brokers:
    """How a cluster is reached.

    Attributes:
        servers: "host:port" of some brokers, with commas between them.
        group: whose offsets are committed.
        config: further settings of librdkafka.
        timeout: seconds that brokers may be away.
        lasting: whether clients that ask and commit are kept. A process that
            has some must not be forked.
    """

    servers: str
    group: str
    config: Mapping[str, Any] = field(repr=False)  # passwords, too
    timeout: float
    lasting: bool = False
    # Why a broker refused the user or its certificate was refused; and
    # clients that last.
    _refused: list[str] = field(default_factory=list, repr=False)
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if "@" in self.servers:
            raise errors.InvalidArgument(
                f"brokers: ...@{self.servers.rpartition('@')[2]} has a user "
                "in it; give sasl.username and sasl.password in config="
            )
        library()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_refused": [], "_made": {}}

    def consumer(self) -> Any:
        return self._client(
            library().Consumer,
            {
                "group.id": self.group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
            },
        )

    def producer(self) -> Any:
        return self._client(library().Producer, {})

    def _client(self, kind: Any, more: Mapping[str, Any]) -> Any:
        """One of the library.

        Raises:
            InvalidArgument: it refuses a setting.
        """
        given = {**self.config, "bootstrap.servers": self.servers, **more}
        given["error_cb"] = self._heard
        kafka = library()
        try:
            return kind(given, logger=_library_log)
        except (kafka.KafkaException, TypeError, ValueError) as error:
            reason = error.args[0] if error.args else error
            text = reason.str() if hasattr(reason, "str") else str(reason)
        raise errors.InvalidArgument(
            f"config=: librdkafka refuses its settings: {text}"
        )

    def _heard(self, error: Any) -> None:
        """An error of a client as a whole; a library calls it."""
        if error.name() in _REFUSED:
            self._refused.append(error.str())

    def check_refused(self) -> None:
        """Raises AccessDenied if a broker refused the user, or its
        certificate is refused here."""
        if self._refused:
            text = self._refused[-1]
            self._refused.clear()
            raise errors.AccessDenied(
                f"Kafka at {self.servers} refused access: {text}; check the "
                "user, password and certificates in config="
            )

    @contextlib.contextmanager
    def _lent(self, name: str, make: Callable[[], Any]) -> Iterator[Any]:
        """A client: one for all time where that is wanted."""
        if self.lasting:
            if name not in self._made:
                self._made[name] = make()
            yield self._made[name]
            return
        client = make()
        try:
            yield client
        finally:
            if hasattr(client, "close"):
                client.close()

    def admin(self) -> contextlib.AbstractContextManager[Any]:
        """What asks about topics."""
        kind = library("confluent_kafka.admin").AdminClient
        return self._lent("admin", lambda: self._client(kind, {}))

    def ends(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Where partitions end now, by one question for all; those that no
        broker answers for are left out."""
        kafka = library()
        latest = library("confluent_kafka.admin").OffsetSpec.latest()
        found = {}
        with self.admin() as admin:
            asked = admin.list_offsets(
                {kafka.TopicPartition(*key): latest for key in keys},
                isolation_level=kafka.IsolationLevel.READ_COMMITTED,
                request_timeout=min(self.timeout, _ENDS_S),
            )
            for place, answer in asked.items():
                with contextlib.suppress(kafka.KafkaException, TimeoutError):
                    end = answer.result(_ENDS_S).offset
                    found[place.topic, place.partition] = end
        return found

    def ask(
        self,
        question: Callable[[float], T],
        stop: threading.Event | None = None,
        idle: Any = None,
    ) -> T:
        """The answer of a broker, for which it waits with back-off.

        Args:
            question: asks once, within a number of seconds.
            stop: ends the waiting.
            idle: the consumer that asks, if it has no partitions.

        Raises:
            AccessDenied: brokers refuse it.
            Unavailable: no answer for ``timeout`` seconds.
        """
        stop = stop or threading.Event()
        end = time.monotonic() + self.timeout
        pause, longest = _BACK_OFF
        wait, most = _ANSWER
        while True:
            left = max(end - time.monotonic(), 0.1)
            try:
                return question(min(left, wait))
            except library().KafkaException as error:
                reason = error.args[0]
            self.check_access(reason)
            if idle is not None:
                idle.poll(0)  # calls back with refusals
            self.check_refused()
            wait = min(2 * wait, most)
            if time.monotonic() + pause >= end or stop.is_set():
                raise errors.Unavailable(
                    f"Kafka at {self.servers} gave no answer for "
                    f"{self.timeout:g} s: {reason.str()}; check brokers= and "
                    "the network, or allow a longer timeout="
                )
            stop.wait(pause)
            pause = min(2 * pause, longest)

    def check_access(self, error: Any) -> None:
        """Raises AccessDenied if that is what an error of brokers says."""
        if "AUTHORIZATION" in error.name() or "AUTHENT" in error.name():
            raise errors.AccessDenied(
                f"Kafka at {self.servers} refused access: {error.str()}; "
                "check config= and the rights of its user"
            )

    def commit(self, offsets: Mapping[Key, int]) -> None:
        """Commits the offset of the next message of each partition."""
        places = [library().TopicPartition(*k, n) for k, n in offsets.items()]
        with self._lent("committer", self.consumer) as consumer:

            def question(_: float) -> Any:
                try:
                    return consumer.commit(offsets=places, asynchronous=False)
                except library().KafkaException as error:
                    self._check_members(error.args[0])
                    raise

            def greeting(wait: float) -> Any:
                return consumer.list_topics(timeout=wait)

            # A commit waits long for brokers that refuse; this does not.
            self.ask(greeting, idle=consumer)
            done = self.ask(question, idle=consumer)
        for place in done or ():
            if place.error is not None:
                self._check_members(place.error)
                raise errors.StorageError(
                    f"Kafka at {self.servers} committed no offset of "
                    f"{key_text((place.topic, place.partition))} for group "
                    f"{self.group!r}: {place.error.str()}"
                )

    def _check_members(self, error: Any) -> None:
        if error.name() in _MEMBERS:
            raise errors.StorageError(
                f"Kafka at {self.servers}: group {self.group!r} has members "
                f"of another program, so it takes no offsets of this one "
                f"({error.str()}); give another group="
            )


class DeadLetters:
    """A topic for messages that cannot be trained on."""

    def __init__(self, brokers: Brokers, topic: str) -> None:
        self._brokers = brokers
        self._topic = topic
        self._producer: Any = None

    def send(self, letters: Sequence[tuple[Any, str]]) -> None:
        """Messages with what is wrong; returns when brokers have them.

        Raises:
            Unavailable: they do not within the timeout.
        """
        if self._producer is None:
            self._producer = self._brokers.producer()
        failed: list[str] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error.str())

        for i, (message, text) in enumerate(letters):
            if i % _LETTERS == _LETTERS - 1:  # its queue has a limit
                self._producer.flush(self._brokers.timeout)
            headers = [
                *(message.headers() or ()),
                ("persia.topic", message.topic()),
                ("persia.partition", str(message.partition())),
                ("persia.offset", str(message.offset())),
                ("persia.error", text),
            ]
            self._producer.produce(
                self._topic,
                message.value(),
                message.key(),
                headers=headers,
                on_delivery=delivered,
            )
        left = self._producer.flush(self._brokers.timeout)
        if left or failed:
            raise errors.Unavailable(
                f"Kafka at {self._brokers.servers} took {left + len(failed)} "
                f"messages for {self._topic!r} not: "
                f"{failed[0] if failed else 'no answer'}"
            )
