"""Topics of brokers of other makes: what happens to them is an event with a
name, within the timeout."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import typer.testing
import yaml

import persia
from persia import errors
from persia.cli.app import app
from persia.data import Kafka, Schema
from persia.data.kafka.brokers import Brokers
from persia.data.kafka.consumer import Partition, Reader
from persia.data.kafka.source import grown_parts
from persia.data.kafka.states import TABLE, Event, State
from persia.distributed.certs import one_job
from persia.train.topics import infer_topics
from tests.kafka_others import Broker, noida, tansu

__all__ = ["noida", "tansu"]

kafka = pytest.importorskip(
    "confluent_kafka", reason="pip install 'persia[kafka]'"
)

pytestmark = pytest.mark.slow

SCHEMA = Schema(label="y", dense=["x"], categorical=["c"])
_names = count()


@pytest.fixture
def topic() -> str:
    return f"topic-{next(_names)}"


def rows(first: int, end: int) -> list[dict[str, Any]]:
    return [{"y": i % 2, "x": i, "c": f"c{i % 7}"} for i in range(first, end)]


def open_(broker: Broker, topic: str, size: int = 50, **more: Any) -> Kafka:
    more = {"until": "latest", "timeout": 20.0} | more
    group = more.pop("group", f"group-{topic}")
    return Kafka(broker.servers, topic, group, SCHEMA, size, **more)


def numbers(batches: Any) -> list[int]:
    found: list[int] = []
    for batch in batches:
        assert batch.dense is not None
        found += batch.dense[:, 0].int().tolist()
    return found


def test_each_state_is_reached_and_left() -> None:
    """DONE and FAILED are ends: only what was fetched before follows."""
    assert set(TABLE) == set(State)
    reached = {to for ways in TABLE.values() for to in ways.values()}
    assert reached | {State.PLACING} == set(State)
    assert {event for ways in TABLE.values() for event in ways} == set(Event)
    ends = {s for s, ways in TABLE.items() if set(ways.values()) <= {s}}
    assert ends == {State.DONE, State.FAILED}


@dataclass
class Message:
    """Of a poll. error: the name of what it says in place of a value."""

    number: int
    at: int
    error_name: str | None = None

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.at

    def error(self) -> Any:
        return self.error_name and kafka.KafkaError(
            getattr(kafka.KafkaError, self.error_name)
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_poll_is_sorted_as_its_messages_are(seed: int) -> None:
    """Runs of partitions, gaps, messages a second time, ends in between."""
    draw = random.Random(seed)
    reader = Reader(
        Brokers("none:1", "g", {}, 1.0),
        ["t"],
        10,
        since=None,
        ends=False,
        whole=False,
        strict=False,
        stop=threading.Event(),
    )
    for number in range(3):
        part = Partition(("t", number), 0, 0, None)
        part.on(Event.PLACED)
        reader.parts[part.key] = part
        reader.high[part.key] = 0
    want: dict[int, list[int]] = {0: [], 1: [], 2: []}
    seen = [0, 0, 0]
    for _ in range(30):
        poll = []
        for _ in range(draw.randrange(6)):
            number = draw.randrange(4)  # 3: of another share
            at = seen[number] - draw.randrange(3) if number < 3 else 0
            for _ in range(draw.randrange(1, 8)):
                poll.append(Message(number, max(at, 0)))
                at = max(at, 0) + draw.choice([1, 1, 1, 2, 0])
            if draw.random() < 0.3:
                poll.append(Message(number, at, "_PARTITION_EOF"))
            for one in poll if number < 3 else ():
                if one.number != number:
                    continue
                if one.error_name is None and one.at >= seen[number]:
                    want[number].append(one.at)
                    seen[number] = one.at + 1
                elif one.error_name:
                    seen[number] = max(seen[number], one.at)
        reader.note(poll)
    for number, offsets in want.items():
        part = reader.parts["t", number]
        assert part.seen == reader.high[part.key] == seen[number]
        middle = draw.randrange(part.seen + 1)
        first, rest = part.take(middle), part.take(part.seen)
        assert [m.offset() for m in first + rest] == offsets
        assert all(m.offset() < middle for m in first)


def test_every_message_once(noida: Broker, topic: str) -> None:
    noida.create(topic, 2)
    for part in (0, 1):
        noida.produce(topic, rows(1000 * part, 1000 * part + 330), part)
    data = open_(noida, topic)
    read = numbers(data)
    assert sorted(read) == [*range(330), *range(1000, 1330)]
    data.commit(data.state_dict())
    assert noida.committed(topic, f"group-{topic}", 1) == 330


# ---- values


def test_no_json_at_all(noida: Broker, topic: str) -> None:
    noida.create(topic)
    noida.produce(topic, [b"\x93\x01\x02\x03"] * 150)
    with pytest.raises(errors.SchemaMismatch):
        list(open_(noida, topic))


def test_some_junk_is_counted(noida: Broker, topic: str) -> None:
    noida.create(topic)
    noida.produce(topic, [*rows(0, 3), *[b"\x93\x01"] * 150, *rows(3, 6)])
    data = open_(noida, topic, 500, malformed_limit=1)
    assert numbers(data) == [*range(6)]
    assert data.malformed == 150


def test_the_prefix_of_a_schema(noida: Broker, topic: str) -> None:
    """Confluent's JSON: a zero, the id of a schema, the object."""
    import json

    noida.create(topic)
    noida.produce(
        topic,
        [
            b"\0" + struct.pack(">I", 7) + json.dumps(row).encode()
            for row in rows(0, 120)
        ],
    )
    assert numbers(open_(noida, topic)) == [*range(120)]


def test_a_tombstone_has_a_name(noida: Broker, topic: str) -> None:
    noida.create(topic)
    noida.produce(topic, [None, *rows(0, 2)])
    data = open_(noida, topic)
    assert numbers(data) == [0, 1]
    assert "tombstone" in data.malformed_lines[0]


# ---- retention, topics that are made again


@pytest.mark.parametrize("strict", [False, True])
def test_retention_overtakes_a_reader(
    noida: Broker, topic: str, strict: bool
) -> None:
    """What is gone is counted, and the rest is read."""
    noida.create(topic)
    noida.produce(topic, rows(0, 100))
    small = {"fetch.message.max.bytes": 512, "queued.max.messages.kbytes": 1}
    config = small | {"queued.min.messages": 1}
    data = open_(noida, topic, until=None, strict=strict, config=config)
    batches = iter(data)
    read = numbers([next(batches)])
    noida.produce(topic, rows(100, 3000))
    noida.cut(topic, 0, 2900)

    def rest() -> None:
        while not read or read[-1] < 2999:
            read.extend(numbers([next(batches)]))

    if strict:
        with pytest.raises(errors.StorageError):
            rest()
        return
    rest()
    assert read[-100:] == [*range(2900, 3000)]
    assert len(read) == len(set(read)) == 3000 - data.stats()["lost"]
    assert data.stats()["lost"] > 0


def test_a_topic_that_was_made_again(noida: Broker, topic: str) -> None:
    noida.create(topic)
    noida.produce(topic, rows(0, 200))
    data = open_(noida, topic)
    assert len(numbers(data)) == 200
    noida.remove(topic)
    noida.create(topic)
    noida.produce(topic, rows(0, 100))
    again = open_(noida, topic)
    again.load_state_dict(data.state_dict())
    with pytest.raises(errors.StorageError):
        next(iter(again))


def test_an_end_that_was_cut(
    noida: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error, and no wait without end."""
    noida.create(topic)
    noida.produce(topic, rows(0, 120))
    real, asked = Brokers.consumer, count()

    class Cut:
        def __init__(self, consumer: Any) -> None:
            self._consumer = consumer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._consumer, name)

        def get_watermark_offsets(self, *args: Any, **more: Any) -> Any:
            low, high = self._consumer.get_watermark_offsets(*args, **more)
            return low, high + 50 if next(asked) == 0 else high

    monkeypatch.setattr(Brokers, "consumer", lambda self: Cut(real(self)))
    with pytest.raises(errors.StorageError, match="170"):
        list(open_(noida, topic))


def test_messages_that_never_arrive(
    noida: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noida.create(topic)
    noida.produce(topic, rows(0, 120))
    real = Brokers.consumer

    class Silent:
        def __init__(self, consumer: Any) -> None:
            self._consumer = consumer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._consumer, name)

        def consume(self, *args: Any) -> list[Any]:
            found = self._consumer.consume(*args)
            return [m for m in found if not m.error() and m.offset() < 60]

    monkeypatch.setattr(Brokers, "consumer", lambda self: Silent(real(self)))
    with pytest.raises(errors.Unavailable, match="offset 60"):
        list(open_(noida, topic, timeout=3.0))


# ---- access, settings, groups


def test_a_user_that_is_refused(tansu: Broker) -> None:
    """At once, not after the timeout."""
    config = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "nobody",
        "sasl.password": "hidden",
    }
    data = open_(tansu, "t", timeout=100.0, config=config)
    began = time.monotonic()
    with pytest.raises(errors.AccessDenied) as info:
        next(iter(data))
    assert time.monotonic() - began < 60
    assert "hidden" not in str(info.value)
    with pytest.raises(errors.AccessDenied):
        data.commit(
            {"offsets": {"t/0": 1}, "turn": "t/0", "partitions": {"t": 1}}
        )


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[str]:
    """The address of a server whose certificate no one knows."""
    job = one_job()
    assert job.cert and job.key
    (tmp_path / "cert").write_text(job.cert)
    (tmp_path / "key").write_text(job.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    one, _ = server.accept()
                    context.wrap_socket(one, server_side=True).close()
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        yield f"127.0.0.1:{port}"
        ended.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()


def test_a_certificate_that_is_not_trusted(secure: str) -> None:
    config = {"security.protocol": "SSL"}
    data = Kafka(secure, "t", "g", SCHEMA, timeout=100.0, config=config)
    with pytest.raises(errors.AccessDenied, match="certificate"):
        next(iter(data))


@pytest.mark.parametrize(
    "config",
    [
        {"no.such.setting": 1},
        {"fetch.max.bytes": "many"},
        {"security.protocol": "SSL", "ssl.ca.location": "/no/such/file"},
        {"fetch.max.bytes": 1000, "message.max.bytes": 100_000_000},
    ],
)
def test_settings_that_are_refused(
    noida: Broker, config: dict[str, Any]
) -> None:
    with pytest.raises(errors.InvalidArgument, match="config"):
        next(iter(open_(noida, "t", config=config)))


def test_a_group_with_members(noida: Broker, topic: str) -> None:
    noida.create(topic)
    noida.produce(topic, rows(0, 60))
    member = kafka.Consumer(
        {"bootstrap.servers": noida.servers, "group.id": f"group-{topic}"}
    )
    member.subscribe([topic])
    while not member.assignment():
        member.poll(0.1)
    data = open_(noida, topic, timeout=100.0)
    assert len(numbers(data)) == 60
    with pytest.raises(errors.StorageError, match="group="):
        data.commit(data.state_dict())
    member.close()


def test_no_broker_is_there(topic: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        data = Kafka(address, topic, "g", SCHEMA, timeout=2.0)
        with pytest.raises(errors.Unavailable):
            next(iter(data))


# ---- a partition alone


def test_a_partition_alone_keeps_its_consumer(
    noida: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noida.create(topic, 2)
    made, real = count(), Brokers.consumer

    def counted(self: Brokers) -> Any:
        next(made)
        return real(self)

    monkeypatch.setattr(Brokers, "consumer", counted)
    parts = open_(noida, topic, 10).partitions()
    one, other = (parts[f"{topic}/{i}"] for i in (0, 1))
    read: list[persia.Batch] = []
    for turn in range(4):
        noida.produce(topic, rows(10 * turn, 10 * turn + 10))
        state = {"one": (one, turn), "other": (other, 0)}
        assert grown_parts(state) == {"one"}
        read += [batch for _, batch in one.numbered(turn)]
        one.commit_batches(turn + 1)
    assert numbers(read) == [*range(40)]
    assert noida.committed(topic, f"group-{topic}") == 40
    # Of the number of partitions, of the partition, and of commits.
    assert next(made) == 3


def test_a_schema_of_a_topic(noida: Broker, topic: str) -> None:
    noida.create(topic)
    noida.produce(topic, [None, b"junk", *rows(0, 200)])
    url = f"kafka://{noida.servers}/{topic}"
    done = typer.testing.CliRunner().invoke(app, ["schema", url])
    assert done.exit_code == 0, done.output
    assert Schema(**yaml.safe_load(done.stdout)).used_columns == {
        *("y", "x", "c")
    }
    noida.create(f"{topic}-junk")
    noida.produce(f"{topic}-junk", [b"junk"] * 3)
    with pytest.raises(errors.SchemaMismatch):
        infer_topics(f"{url}-junk")
