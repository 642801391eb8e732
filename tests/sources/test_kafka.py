from __future__ import annotations

import datetime
import json
import logging
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import persia
from persia import errors
from persia.data import Kafka, Schema, Table
from persia.data.kafka import consumer as reading
from persia.data.kafka.brokers import Brokers
from persia.train.config import resolve
from persia.train.run import Run
from persia.train.sources import open_data
from tests.kafka import PARTITIONS, Cluster, cluster
from tests.sources.test_table import same

kafka = pytest.importorskip(
    "confluent_kafka", reason="pip install 'persia[kafka]'"
)

__all__ = ["cluster"]

SCHEMA = Schema(label="y", dense=["x"], categorical=["c"])


def rows(n: int, salt: int = 0) -> list[dict[str, Any]]:
    return [
        {"y": i % 2, "x": i + 1000 * salt, "c": f"c{i * 7 % 13}"}
        for i in range(n)
    ]


def texts(table: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(row).encode() for row in table]


def arrow(table: list[dict[str, Any]]) -> bytes:
    out = pa.BufferOutputStream()
    made = pa.Table.from_pylist(table)
    with pa.ipc.new_stream(out, made.schema) as writer:
        writer.write_table(made)
    return out.getvalue().to_pybytes()


def open_(cluster: Cluster, size: int = 8, **more: Any) -> Kafka:
    more = {"until": "latest", "timeout": 30.0} | more
    return Kafka(cluster.servers, "t", "g", SCHEMA, size, **more)


def numbers(batch: persia.Batch) -> list[int]:
    """Which rows a batch has."""
    assert batch.dense is not None
    return batch.dense[:, 0].int().tolist()


class Consumer:
    """A real one, of which a test answers some questions."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def left_out(monkeypatch: pytest.MonkeyPatch, gone: set[int]) -> None:
    """Offsets that partition 0 lacks, as after compaction."""
    real = Brokers.consumer

    class Gaps(Consumer):
        def consume(self, *args: Any) -> list[Any]:
            return [
                m
                for m in self._consumer.consume(*args)
                if m.error() or m.partition() or m.offset() not in gone
            ]

    monkeypatch.setattr(Brokers, "consumer", lambda self: Gaps(real(self)))


def answer_times(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    """What brokers say of times: the first message that is not before one.
    This cluster answers all such questions with -1, as of times to come."""
    real = Brokers.consumer

    class Times(Consumer):
        def offsets_for_times(self, places: Any, timeout: float) -> list[Any]:
            real_answer = self._consumer.offsets_for_times(places, timeout)
            assert [place.offset for place in real_answer] == [-1]
            (place,) = places
            data = open_(cluster)
            blocks = data._reader(threading.Event()).blocks(0, 1, None)
            later = [
                message.offset()
                for messages, _ in blocks
                for message in messages
                if message.partition() == place.partition
                and message.timestamp()[1] >= place.offset
            ]
            offset = min(later, default=-1)
            return [kafka.TopicPartition(place.topic, place.partition, offset)]

    monkeypatch.setattr(Brokers, "consumer", lambda self: Times(real(self)))


# ---- batches


def test_batches_are_those_of_the_table(cluster: Cluster) -> None:
    cluster.produce("t", texts(rows(50)))
    data = open_(cluster)
    expected = list(Table(rows(50), SCHEMA, 8))
    for a, b in zip(data, expected, strict=True):
        assert same(a, b)
    again = pickle.loads(pickle.dumps(open_(cluster)))
    for a, b in zip(again, expected, strict=True):
        assert same(a, b)
    assert data.stats() == {
        "lag": {f"t/{p}": 0 for p in range(PARTITIONS)},
        "malformed": 0,
        "dead_letters": 0,
        "lost": 0,
    }


def test_an_iteration_goes_on_where_the_latest_one_ended(
    cluster: Cluster,
) -> None:
    cluster.produce("t", texts(rows(20)))
    data = open_(cluster)
    assert [numbers(b) for b in data][2] == [16, 17, 18, 19]
    assert list(data) == []
    cluster.produce("t", texts(rows(30)[20:]))
    # A batch ends where it would have ended.
    assert [numbers(b) for b in data] == [
        [20, 21, 22, 23],
        [24, 25, 26, 27, 28, 29],
    ]


@pytest.mark.slow
def test_a_restart_cuts_the_same_batches(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for p, n in enumerate((50, 23, 0, 64)):
        cluster.produce("t", texts(rows(n, p)), p)
    gone = {*range(5), 7, 8, 15, *range(24, 32), 48, 49}
    left_out(monkeypatch, gone)
    every = [numbers(b) for b in open_(cluster)]
    assert sorted(n for batch in every for n in batch) == sorted(
        [i for i in range(50) if i not in gone]
        + [i + 1000 for i in range(23)]
        + [i + 3000 for i in range(64)]
    )
    for batch in every:  # of one block of one partition
        assert len({(n // 1000, n % 1000 // 8) for n in batch}) == 1
    assert [b[0] // 1000 for b in every[:4]] == [0, 1, 3, 0]
    for stop in range(len(every) + 1):
        data = open_(cluster)
        for _, batch in zip(range(stop), data, strict=False):
            assert len(batch)
        state = json.loads(json.dumps(data.state_dict()))
        assert state["batches"] == stop
        again = open_(cluster)
        again.load_state_dict(state)
        assert [numbers(b) for b in again] == every[stop:]


@pytest.mark.slow
def test_since_a_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no position is loaded, also of partitions with nothing since."""
    noon = datetime.datetime(2026, 11, 25, 12, tzinfo=datetime.UTC)
    for hour in range(3):
        at = int(noon.timestamp() * 1000) + 3_600_000 * hour
        cluster.produce("t", texts(rows(10, hour)), 0, timestamp=at)
    cluster.produce("t", texts(rows(4, 7)), 1, timestamp=at - 1)
    answer_times(monkeypatch, cluster)
    late = open_(cluster, since="2026-11-25T14:00+00:00")
    assert [numbers(b) for b in late] == [
        [2000, 2001, 2002, 2003],  # the batch that offset 20 is in
        [2004, 2005, 2006, 2007, 2008, 2009],
    ]
    state = late.state_dict()
    cluster.produce("t", texts(rows(2, 8)), 1)
    late.load_state_dict(state)
    assert [numbers(b) for b in late] == [[8000, 8001]]
    for since in (noon, noon.replace(tzinfo=None), "2026-11-25T12:00Z"):
        assert sum(map(len, open_(cluster, since=since))) == 36
    assert list(open_(cluster, since="2999-11-26")) == []
    (part, *_) = open_(cluster, since="2026-11-25T14:00Z").partitions().items()
    assert part[0] == "t/0"
    found = [(n, numbers(b)[0]) for n, b in part[1].numbered(0)]
    assert found == [(3, 2000)]  # of offsets 16 to 24


@pytest.mark.slow
def test_ranks_and_workers_share_the_partitions(cluster: Cluster) -> None:
    for p in range(PARTITIONS):
        cluster.produce("t", texts(rows(20, p)), p)
    seen = []
    for rank in range(3):
        mine = open_(cluster, rank=rank, world_size=3)
        got = [n for batch in mine for n in numbers(batch)]
        assert {n // 1000 % 3 for n in got} == {rank}
        seen += got
    assert sorted(seen) == [i + 1000 * p for p in range(4) for i in range(20)]
    workers = torch.utils.data.DataLoader(
        open_(cluster), batch_size=None, num_workers=2
    )
    assert sorted(n for batch in workers for n in numbers(batch)) == sorted(
        seen
    )
    with pytest.raises(errors.InvalidArgument):
        list(open_(cluster, rank=4, world_size=5))
    state = mine.state_dict()
    other = open_(cluster)
    other.load_state_dict(state)
    with pytest.raises(errors.InvalidArgument):
        list(other)


@pytest.mark.slow
def test_a_partition_far_ahead_waits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_AT_ONCE", 10)
    for p in range(PARTITIONS):
        cluster.produce("t", texts(rows(400, p)), p)
    every = [n for batch in open_(cluster) for n in numbers(batch)]
    assert sorted(every) == [
        i + 1000 * p for p in range(4) for i in range(400)
    ]


def test_without_an_end_it_waits_for_messages(cluster: Cluster) -> None:
    for p in range(PARTITIONS):
        cluster.produce("t", texts(rows(12, p)), p)
    data = open_(cluster, until=None)
    found = iter(data)
    first = [numbers(next(found)) for _ in range(4)]
    assert first == [[i + 1000 * p for i in range(8)] for p in range(4)]
    later = threading.Timer(0.2, cluster.produce, ("t", texts(rows(16)[12:])))
    later.start()
    assert numbers(next(found)) == list(range(8, 16))
    later.join()
    found.close()  # although it waits for more


# ---- malformed messages


POISON = [
    b"no json",
    b"",
    None,
    b"[1]",
    b'{"y": 1, "x": 2, "c": "a"} {"y": 1, "x": 2, "c": "a"}',
    b'{"y": 7, "x": 2, "c": "a"}',
    b'{"y": 1, "x": {"z": 3}, "c": "a"}',
    b'{"y": 1, "x": "many", "c": "a"}',
    b'{"x": 1, "c": "a"}',
]


def test_malformed_messages(cluster: Cluster) -> None:
    good = texts(rows(40))
    mixed = list(good)
    for i, value in enumerate(POISON):
        mixed[4 * i] = value
    cluster.produce("t", mixed, key=b"k")
    expected = [i for i in range(40) if i % 4 or i // 4 >= len(POISON)]
    data = open_(cluster)
    assert [n for batch in data for n in numbers(batch)] == expected
    assert data.malformed == data.stats()["malformed"] == len(POISON)
    assert data.malformed_lines[0].startswith("t/0:0: ")
    data = open_(cluster, dead_letter="dead")
    assert [n for batch in data for n in numbers(batch)] == expected
    assert data.stats()["dead_letters"] == len(POISON)
    letters = []
    consumer = kafka.Consumer(
        {"bootstrap.servers": cluster.servers, "group.id": "other"}
    )
    consumer.assign(
        [kafka.TopicPartition("dead", p, 0) for p in range(PARTITIONS)]
    )
    while len(letters) < len(POISON):
        letters += consumer.consume(1, 1.0)
    consumer.close()
    places = {dict(m.headers())["persia.offset"]: m for m in letters}
    for i, value in enumerate(POISON):
        letter = places[str(4 * i).encode()]
        assert letter.value() == value
        assert letter.key() == b"k"
        assert dict(letter.headers())["persia.partition"] == b"0"
    with pytest.raises(errors.MalformedData):
        list(open_(cluster, strict=True))


def test_a_schema_of_other_messages(cluster: Cluster) -> None:
    cluster.produce("t", [b'{"y": 5, "x": 1, "c": "a"}'] * 300)
    with pytest.raises(errors.SchemaMismatch):
        list(open_(cluster))
    data = open_(cluster, dead_letter="dead")
    assert list(data) == []
    assert data.stats()["dead_letters"] == 300


def test_arrow(cluster: Cluster) -> None:
    table = rows(60)
    values = [arrow(table[i : i + 6]) for i in range(0, 60, 6)]
    values[3] = b"no arrow"
    values[4] = arrow([{"y": 1, "x": 1.0}])
    cluster.produce("t", values)
    data = open_(cluster, 4, value="arrow")
    rest = table[:18] + table[30:]
    got = list(data)
    assert [len(batch) for batch in got] == [18, 18, 12]
    (expected,) = Table(rest, SCHEMA, 60)
    assert torch.cat([b.ids.values() for b in got]).equal(
        expected.ids.values()
    )
    assert [n for batch in got for n in numbers(batch)] == [
        row["x"] for row in rest
    ]
    assert data.malformed == 2


# ---- positions, with a model


class Model(torch.nn.Module):
    def __init__(self, store: persia.Store) -> None:
        super().__init__()
        self.bags = persia.EmbeddingBagCollection(
            [
                persia.EmbeddingBagConfig(
                    "c", embedding_dim=4, feature_names=["c"]
                )
            ],
            store=store,
        )

    def forward(self, ids: Any) -> Any:
        return self.bags(ids).values()


@pytest.fixture
def model() -> tuple[persia.Store, Model]:
    store = persia.Store(persia.optim.SGD(lr=0.1))
    return store, Model(store)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_checkpoint_has_the_position(
    cluster: Cluster,
    model: tuple[persia.Store, Model],
    tmp_path: Path,
    prefetch: bool,
) -> None:
    for p in range(PARTITIONS):
        cluster.produce("t", texts(rows(40, p)), p)
    every = [numbers(b) for b in open_(cluster)]
    store, net = model
    data = open_(cluster)
    loader = persia.DataLoader(data, net, 4, prefetch=prefetch)
    trained = []
    for batch in loader:
        net(batch.ids).sum().backward()
        trained.append(numbers(batch))
        if len(trained) == 7:
            store.save(tmp_path, model=net, loader=loader)
            data.commit(loader.state_dict())
        if len(trained) == 9:
            break
    assert trained == every[:9]
    assert cluster.committed("t") == [16, 16, 16, 8]
    # What was taken ahead of the break is not lost.
    assert [numbers(b) for b in loader] == every[9:]
    again = open_(cluster)
    loader = persia.DataLoader(again, net, 4, prefetch=prefetch)
    store.load(tmp_path, model=net, loader=loader)
    assert [numbers(b) for b in loader] == every[7:]
    # The end is a position, too.
    store.save(tmp_path, model=net, loader=loader)
    again.commit(again.state_dict())
    assert cluster.committed("t") == [40] * PARTITIONS
    cluster.produce("t", texts(rows(41)[40:]))
    loader = persia.DataLoader(open_(cluster), net, 4, prefetch=prefetch)
    store.load(tmp_path, model=net, loader=loader)
    assert [numbers(b) for b in loader] == [[40]]


def test_a_position_that_is_gone(cluster: Cluster) -> None:
    value = json.dumps(rows(1)[0] | {"pad": "p" * 9000}).encode()
    cluster.produce("t", [value] * 8)
    data = open_(cluster)
    assert len(list(data)) == 1
    state = data.state_dict()
    cluster.produce("t", [value] * 1400)  # it keeps 5 MB
    data = open_(cluster)
    data.load_state_dict(state)
    assert list(data)
    assert data.stats()["lost"] > 0
    data = open_(cluster, strict=True)
    data.load_state_dict(state)
    with pytest.raises(errors.StorageError):
        list(data)
    other = Cluster()
    data = open_(other)
    data.load_state_dict(state)
    with pytest.raises(errors.StorageError):
        list(data)
    other.end()


@pytest.mark.slow
def test_persia_train(cluster: Cluster, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    (tmp_path / "t.yaml").write_text(SCHEMA.to_yaml())
    options = {
        "data": f"kafka://{cluster.servers}/t?group=g&dead_letter=dead",
        "schema": str(tmp_path / "t.yaml"),
        "batch_size": 8,
        "save": str(saved),
    }

    def train(resume: Path | None = None, **more: Any) -> int:
        one = Run(resolve(options | more), resume)
        one.fit(lambda _: None)
        one.save()
        one.close()
        return one.trainer.samples

    with pytest.raises(errors.StorageError):  # there is no topic
        train()
    cluster.produce("t", [b"{"])
    with pytest.raises(errors.MalformedData):  # and no usable message
        train()
    for p in range(PARTITIONS):
        cluster.produce("t", [b"{", *texts(rows(19, p))], p)
    batches = [len(batch) for batch in open_(cluster)]
    assert sum(batches) == train(save_every=4, keep=9) == 76
    assert cluster.committed("t") == [21, 20, 20, 20]
    assert train(saved) == 0
    cluster.produce("t", texts(rows(10)), 1)
    assert train(saved) == 10
    assert cluster.committed("t") == [21, 30, 20, 20]
    # Behind the batches that were trained, not those taken ahead.
    other = str(tmp_path / "other")
    assert train(saved / "step-4", save=other) == sum(batches[4:]) + 10
    (tmp_path / "client.properties").write_text("# ours\n\nclient.id = us\n")
    config = f"&config={tmp_path / 'client.properties'}"
    url = options["data"] + config + "&timeout=7.5&strict=true"
    data, _ = open_data(resolve(options | {"data": url + "&since=2026-11-25"}))
    assert isinstance(data, Kafka)
    assert data.since == datetime.datetime(2026, 11, 25, tzinfo=datetime.UTC)
    assert data._brokers.config == {"client.id": "us"}
    assert data._brokers.timeout == 7.5
    with pytest.raises(errors.MalformedData):  # it is strict
        list(open_data(resolve(options | {"data": url}))[0])
    for wrong in (
        {"data": f"kafka://{cluster.servers}/t"},
        {"data": f"kafka://{cluster.servers}/t?group=g&until=noon"},
        {"data": options["data"] + "&since=noon"},
        {"data": options["data"] + "&timeout=soon"},
        {"data": options["data"] + "&strict=1"},
        {"data": options["data"] + f"&config={tmp_path / 'none'}"},
        {"data": options["data"] + f"&config={tmp_path / 't.yaml'}"},
        {"schema": None},
        {"shuffle": 100},
        {"eval_split": 0.5},
    ):
        with pytest.raises(errors.InvalidArgument):
            train(save=other + "-wrong", **wrong)


# ---- brokers


def test_brokers_that_are_away(cluster: Cluster) -> None:
    with pytest.raises(errors.Unavailable, match=r"127[.]0[.]0[.]1:1"):
        list(Kafka("127.0.0.1:1", "t", "g", SCHEMA, timeout=0.5))
    for p in range(PARTITIONS):
        cluster.produce("t", texts(rows(8, p)), p)
    data = open_(cluster, until=None, timeout=0.5)
    found = iter(data)
    for _ in range(4):
        next(found)
    cluster.end()
    with pytest.raises(errors.Unavailable, match=re.escape(cluster.servers)):
        next(found)
    assert data.state_dict()["batches"] == 4


def test_brokers_are_waited_for() -> None:
    brokers = Brokers("b:1", "g", {}, 60.0)
    answers = iter([False, False, True])

    def question(seconds: float) -> str:
        if not next(answers):
            raise kafka.KafkaException(
                kafka.KafkaError(kafka.KafkaError._TRANSPORT)
            )
        return "answer"

    assert brokers.ask(question) == "answer"


def test_refused_access() -> None:
    brokers = Brokers("b:1", "g", {}, 60.0)

    def question(seconds: float) -> None:
        code = kafka.KafkaError.GROUP_AUTHORIZATION_FAILED
        raise kafka.KafkaException(kafka.KafkaError(code))

    with pytest.raises(errors.AccessDenied):
        brokers.ask(question)


def test_bad_arguments() -> None:
    for wrong in (
        {"value": "xml"},
        {"until": "noon"},
        {"timeout": 0},
        {"topics": []},
        {"brokers": ""},
        {"group": 3},
        {"since": 3},
        {"since": "noon"},
        {"config": 3},
        {
            "schema": Schema(
                label="y",
                dense=[{"column": "x", "standardise": True}],
                categorical=["c"],
            )
        },
    ):
        given = {"brokers": "b:1", "topics": "t", "group": "g"}
        with pytest.raises(errors.InvalidArgument):
            Kafka(**({"schema": SCHEMA} | given | wrong))
    data = Kafka("b:1", "t", "g", SCHEMA)
    for at in (3, {}, {"offsets": {"t/0": 1}, "turn": "t/1"}):
        data.load_state_dict({"epoch": 0, "batches": 1, "at": at})
        with pytest.raises(errors.InvalidArgument):
            list(data)
    data.load_state_dict({"epoch": 0, "batches": 1, "at": None})
    with pytest.raises(errors.InvalidArgument):
        list(data)


def test_the_library_says_the_same_once() -> None:
    from persia.data.kafka.brokers import Repeats

    def record(text: str, at: float) -> logging.LogRecord:
        made = logging.makeLogRecord({"msg": text})
        made.created = at
        return made

    repeats = Repeats()
    text = "FAIL [rdkafka#consumer-%d] a:1 refused (after %dms in state UP)"
    kept = [
        repeats.filter(record(text % (i, i), at))
        for i, at in enumerate([0.0, 0.1, 30.0, 61.0, 62.0])
    ]
    assert kept == [True, False, False, True, False]
    assert repeats.filter(record("FAIL b:1 refused", 1.0))
