"""Brokers that vanish, and partitions that move between them."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from persia.data import Kafka, Schema

kafka = pytest.importorskip(
    "confluent_kafka", reason="pip install 'persia[kafka]'"
)

pytestmark = pytest.mark.slow

SCHEMA = Schema(label="y", dense=["x"], categorical=["c"])
BATCH, ROWS = 8, 4000


class Brokers:
    """Three, of librdkafka's cluster for tests; it has a partition's messages
    whichever broker leads it.

    Attributes:
        servers: where they are.
    """

    def __init__(self) -> None:
        folder = Path(kafka.__file__).parents[1] / "confluent_kafka.libs"
        found = sorted(folder.glob("librdkafka*"))
        if not found:
            pytest.skip("librdkafka is not in the wheel of confluent-kafka")
        self._lib = ctypes.CDLL(str(found[0]))
        new: Any = self._pointer("rd_kafka_new")
        conf = self._pointer("rd_kafka_conf_new")()
        self._handle = new(0, ctypes.c_void_p(conf), None, 0)
        self._cluster = ctypes.c_void_p(
            self._pointer("rd_kafka_mock_cluster_new")(
                ctypes.c_void_p(self._handle), 3
            )
        )
        bootstraps = self._lib.rd_kafka_mock_cluster_bootstraps
        bootstraps.restype = ctypes.c_char_p
        self.servers = bootstraps(self._cluster).decode()

    def _pointer(self, name: str) -> Callable[..., int]:
        function = getattr(self._lib, name)
        function.restype = ctypes.c_void_p
        return function

    def create(self, topic: str, leaders: list[int]) -> None:
        """A topic whose partitions these brokers lead."""
        create = self._lib.rd_kafka_mock_topic_create
        assert create(self._cluster, topic.encode(), len(leaders), 1) == 0
        for partition, broker in enumerate(leaders):
            self.lead(topic, partition, broker)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """The partition moves to this broker, from 1."""
        lead = self._lib.rd_kafka_mock_partition_set_leader
        assert lead(self._cluster, topic.encode(), partition, broker) == 0

    def down(self, broker: int) -> None:
        """It closes its connections, and takes none."""
        assert (
            self._lib.rd_kafka_mock_broker_set_down(self._cluster, broker) == 0
        )

    def up(self, broker: int) -> None:
        assert (
            self._lib.rd_kafka_mock_broker_set_up(self._cluster, broker) == 0
        )

    def close(self) -> None:
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(ctypes.c_void_p(self._handle))


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    """Partition 0 is led by broker 1, partition 1 by broker 2."""
    three = Brokers()
    three.create("t", [1, 2])
    producer = kafka.Producer(
        {"bootstrap.servers": three.servers, "linger.ms": 5}
    )
    for i in range(ROWS):
        value = json.dumps({"y": i % 2, "x": i, "c": f"c{i % 7}"})
        producer.produce("t", value, partition=i % 2)
        producer.poll(0)
    assert producer.flush(30) == 0
    yield three
    three.close()


def rows_of(brokers: Brokers, at: Callable[[int], None]) -> list[int]:
    """Those of all batches, in their order; at: called before each batch.

    The consumer fetches little at once, so that it depends on the brokers.
    """
    data = Kafka(
        brokers.servers,
        "t",
        "g",
        SCHEMA,
        BATCH,
        until="latest",
        timeout=30.0,
        config={
            "fetch.message.max.bytes": 4096,
            "queued.max.messages.kbytes": 4,
            "queued.min.messages": 1,
        },
    )
    found: list[int] = []
    for number, batch in enumerate(data):
        assert batch.dense is not None
        found += batch.dense[:, 0].int().tolist()
        at(number)
    return found


def expected() -> list[int]:
    """Partitions take turns, batch by batch."""
    return [
        2 * (BATCH * n + i) + partition
        for n in range(ROWS // 2 // BATCH)
        for partition in (0, 1)
        for i in range(BATCH)
    ]


def test_a_partition_moves(brokers: Brokers) -> None:
    """More than once, and the broker that led it is gone."""

    def at(batch: int) -> None:
        if batch == 100:
            brokers.lead("t", 0, 3)
            brokers.down(1)
        if batch == 250:
            brokers.up(1)
            brokers.lead("t", 0, 1)
            brokers.lead("t", 1, 3)

    assert rows_of(brokers, at) == expected()


def test_a_broker_vanishes_for_a_while(brokers: Brokers) -> None:
    """Its partition has no leader meanwhile."""
    back: list[threading.Timer] = []

    def at(batch: int) -> None:
        if batch == 100:
            brokers.down(2)
            back.append(threading.Timer(10.0, brokers.up, [2]))
            back[0].start()

    assert rows_of(brokers, at) == expected()
    back[0].join()
