"""A Kafka cluster in this process: librdkafka has one for its own tests."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

__all__ = ["Cluster", "cluster"]

PARTITIONS = 4  # that it makes of each topic


class Cluster:
    """Brokers without anything on them.

    Attributes:
        servers: where they are.
    """

    def __init__(self) -> None:
        kafka = pytest.importorskip(
            "confluent_kafka", reason="pip install 'persia[kafka]'"
        )
        self._producer: Any = kafka.Producer(
            {"test.mock.num.brokers": 1, "linger.ms": 0},
            logger=logging.getLogger("tests.kafka"),
        )
        (broker,) = self._producer.list_topics(timeout=30).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def produce(
        self,
        topic: str,
        values: Iterable[Any],
        partition: int = 0,
        **more: Any,
    ) -> None:
        for value in values:
            self._producer.produce(topic, value, partition=partition, **more)
        assert self._producer.flush(30) == 0

    def committed(self, topic: str, group: str = "g") -> list[int]:
        """What a group has committed, by partition."""
        import confluent_kafka as kafka

        consumer = kafka.Consumer(
            {"bootstrap.servers": self.servers, "group.id": group}
        )
        places = consumer.committed(
            [kafka.TopicPartition(topic, p) for p in range(PARTITIONS)],
            timeout=30,
        )
        consumer.close()
        return [place.offset for place in places]

    def end(self) -> None:
        self._producer = None


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    one = Cluster()
    yield one
    one.end()
