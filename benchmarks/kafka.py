"""From a topic of Kafka to ready batches: ``python -m benchmarks.kafka``.

The cluster is the one that librdkafka tests itself with, in this process. It
keeps 5 MB of a partition, and makes four partitions of a topic: a round reads
four topics. ``consume()`` of confluent-kafka throws the same messages away.

JSON and Avro messages have Criteo's columns: 13 counts and 26 texts. Arrow
messages have 1,024 rows of them.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import confluent_kafka as kafka
import fastavro
import pyarrow as pa

from benchmarks.common import (
    BATCH,
    alternate,
    arguments,
    print_machine,
    report,
    timed,
)
from benchmarks.ingest import DENSE, KEYS, SAME_RUN
from persia.data import Kafka, Schema
from persia.datasets import SyntheticCTR

BENCH = "kafka"
PARTITIONS = 4  # that the cluster makes of a topic
TOPICS = 4
ROWS = 1024  # of an Arrow message
TARGETS = {"json": 0.4, "avro": 0.3, "arrow": 0.7}
SCHEMA = Schema.model_validate(
    {
        "label": "label",
        "dense": [{"column": n, "log": True} for n in DENSE],
        "categorical": KEYS,
    }
)


def made(rows: int, seed: int) -> pa.Table:
    """Rows as a click log has them."""
    (batch,) = SyntheticCTR(rows, rows, multis=0, seed=seed)
    assert batch.dense is not None
    assert batch.label is not None
    counts = (batch.dense.clamp(-0.5, 3).exp() * 5 - 3).long().numpy()
    ids = (batch.ids.values().view(26, -1) & 0xFFFFFFFF).tolist()
    columns: dict[str, Any] = {"label": batch.label.long().numpy()}
    columns |= {name: counts[:, j] for j, name in enumerate(DENSE)}
    columns |= {n: [f"{i:08x}" for i in ids[j]] for j, n in enumerate(KEYS)}
    return pa.table(columns)


def in_arrow(table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return bytes(out.getvalue())


AVRO = {
    "type": "record",
    "name": "Click",
    "fields": [
        *({"name": name, "type": "long"} for name in ("label", *DENSE)),
        *({"name": name, "type": "string"} for name in KEYS),
    ],
}


def in_avro(row: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, AVRO, row)
    return out.getvalue()


def filled(topics: dict[str, list[bytes]]) -> tuple[Any, str]:
    """A cluster with these messages of each topic, and where it is."""
    producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 3})
    (broker,) = producer.list_topics(timeout=30).brokers.values()
    for topic, values in topics.items():
        for i, value in enumerate(values):
            producer.produce(topic, value, partition=i % PARTITIONS)
            producer.poll(0)
        assert producer.flush(60) == 0
    return producer, f"{broker.host}:{broker.port}"


def thrown_away(servers: str, topics: list[str], messages: int) -> int:
    """Reads all messages as fast as the library can."""
    consumer = kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "enable.auto.commit": False,
        }
    )
    consumer.assign(
        [
            kafka.TopicPartition(topic, p, 0)
            for topic in topics
            for p in range(PARTITIONS)
        ]
    )
    seen = size = 0
    while seen < messages:
        for message in consumer.consume(10_000, 0.05):
            size += len(message.value())
            seen += 1
    consumer.close()
    return size


def batches(
    servers: str, topics: list[str], value: str, size: int, path: Path | None
) -> int:
    data = Kafka(
        *(servers, topics, "bench", SCHEMA, size),
        value=value,
        value_schema=path,
        until="latest",
    )
    return sum(len(batch) for batch in data)


def reading(
    value: str,
    messages: list[bytes],
    size: int,
    rounds: int,
    path: Path | None = None,
) -> None:
    """Messages of one kind to batches."""
    topics = [f"{value}{i}" for i in range(TOPICS)]
    cluster, servers = filled(dict.fromkeys(topics, messages))
    count = TOPICS * len(messages)
    rows = batches(servers, topics, value, size, path)
    read = thrown_away(servers, topics, count)
    times = alternate(
        {
            "persia": timed(
                lambda _: batches(servers, topics, value, size, path)
            ),
            "consume": timed(lambda _: thrown_away(servers, topics, count)),
        },
        rounds,
    )
    del cluster
    report(
        BENCH,
        value,
        times.rate("persia", rows),
        "M rows/s",
        baseline="confluent-kafka's consume(), values thrown away",
        baseline_value=times.rate("consume", rows),
        baseline_source=SAME_RUN,
        ratio=times.ratio("persia", "consume"),
        target=TARGETS[value],
        rows=rows,
        messages=count,
        megabytes=round(read / 1e6, 1),
    )


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(argv)
    rounds = 2 if options.quick else 9
    print_machine(BENCH, library=kafka.version())
    table = made(8_000 if options.quick else 24_000, options.seed)
    if "json".startswith(options.only):
        lines = [json.dumps(row).encode() for row in table.to_pylist()]
        reading("json", lines, BATCH, rounds)
    if "avro".startswith(options.only):
        lines = [in_avro(row) for row in table.to_pylist()]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "click.avsc"
            path.write_text(json.dumps(AVRO))
            reading("avro", lines, BATCH, rounds, path)
    if "arrow".startswith(options.only):
        blocks = [
            in_arrow(table.slice(first, ROWS))
            for first in range(0, table.num_rows, ROWS)
        ]
        reading("arrow", blocks, BATCH // ROWS, rounds)


if __name__ == "__main__":
    main()
