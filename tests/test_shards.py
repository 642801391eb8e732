"""Servers that have several shards each: the shards of a job may be divided
among another number of servers at its next start."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import JaggedBatch, _core, errors
from persia.base.health import Health
from persia.distributed.server import ServeConfig, find_join, find_shards
from persia.distributed.serving import page_of
from persia.distributed.shards import Shards
from persia.distributed.status import ask
from tests.checkpoints import assert_same_rows, fill, make_store
from tests.test_checkpoint_shards import TABLES

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

SHARDS = 5


def places(servers: int, shards: int) -> list[range]:
    """The shards that each of so many servers has."""
    return [
        find_shards(
            ServeConfig(
                shard=f"{i}/{servers}", server_count=servers, shards=shards
            )
        )[0]
        for i in range(servers)
    ]


@contextlib.contextmanager
def serving(
    servers: int, count: int = SHARDS, **more: Any
) -> Iterator[list[str]]:
    """Addresses of so many servers, which have all shards."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for place in places(servers, count):
            config = ServeConfig(
                port=0,
                threads=1,
                shard=f"{place[0]}-{place[-1]}/{count}",
                **more,
            )
            shards = stack.enter_context(contextlib.closing(Shards(config)))
            if page := page_of(config, Health()):
                page.add(shards.collector())
            if config.save_on_exit is not None:
                stack.callback(shards.save, config.save_on_exit)
            stack.callback(shards.stop, 1.0)
            addresses.append(shards.prepare())
            shards.ready()
        yield addresses


class Counter:
    """Rows 0 to 99 count updates."""

    IDS = torch.arange(100)

    def __init__(self, addresses: list[str], **more: Any) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=addresses,
            job="counted",
            timeout=20.0,
            **more,
        )
        self.bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig(
                    "t", embedding_dim=2, feature_names=["f"], init=0.0
                )
            ],
        )

    def add(self, times: int) -> None:
        for _ in range(times):
            batch = JaggedBatch(["f"], self.IDS)
            (-self.bags(batch).values().sum()).backward()
        self.store.flush()

    def check(self, times: int) -> None:
        rows = self.store.rows("t", self.IDS.tolist())
        assert torch.as_tensor(rows[:, 0]).tolist() == [times] * 100


@pytest.mark.parametrize("shards", [7, 8, 64, 4096])
def test_each_shard_is_of_one_server(shards: int) -> None:
    for servers in range(1, 8):
        check_places(servers, shards)


def check_places(servers: int, shards: int) -> None:
    found = places(servers, shards)
    assert [k for place in found for k in place] == list(range(shards))
    sizes = [len(place) for place in found]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"shard": "3-2/8"},
        {"shard": "0-8/8"},
        {"shard": "0-3"},
        {"shard": "0-3/8", "shards": 9},
        {"shard": "0-3/8", "server_count": 2},
        {"shard": "2/2", "server_count": 2, "shards": 8},
        {"shard": "0/3", "server_count": 3, "shards": 2},
        {"shard": "0/3", "server_count": 2, "shards": 8},
    ],
)
def test_no_such_shards(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        find_shards(ServeConfig(**options), environment={})


def test_a_pod_finds_its_shards() -> None:
    config = ServeConfig(shard="auto", server_count=3)
    found = find_shards(config, {"PERSIA_SHARDS": "8"}, host="ps-2")
    assert found == (range(5, 8), 8)


def test_pods_behind_the_first_ones_join() -> None:
    config = ServeConfig(
        shard="auto",
        server_count=2,
        join="ps-0:8888",
        checkpoints=Path("c"),
        restore="x",
    )
    for pod, joins in (("ps-1", None), ("ps-2", "ps-0:8888")):
        assert find_join(config, {}, host=pod) == joins
    for options in ({"shard": "0-3/8"}, {"join": "a:1"}):
        given = ServeConfig(**{"server_count": None} | options)
        assert find_join(given, {}) == options.get("join")
    with pytest.raises(ValueError, match="restore"):
        ServeConfig(join="a:1", checkpoints=Path("c"), restore="x")


@pytest.mark.parametrize("servers", [1, 2])
def test_rows_and_a_checkpoint(servers: int, tmp_path: Path) -> None:
    whole = make_store("adagrad", *TABLES)
    for seed, (table, _, _) in enumerate(TABLES):
        fill(whole, table, 2_000, seed)
    whole.save(tmp_path / "job", step=1)
    with (
        serving(servers, checkpoints=tmp_path) as addresses,
        make_store("adagrad", *TABLES, servers=addresses) as store,
    ):
        store.load(tmp_path / "job")
        for table, _, _ in TABLES:
            assert_same_rows(whole, store, table)
        store.save(tmp_path / "again", step=2)
        shards = store.stats()["servers"]
        assert len(shards) == SHARDS
        assert sum(not s["beside"] for s in shards) == servers
        assert store.stats()["memory"] == sum(
            s["memory_used"] for s in shards if not s["beside"]
        )
    again = make_store("adagrad", *TABLES)
    again.load(tmp_path / "again")
    for table, _, _ in TABLES:
        assert_same_rows(whole, again, table)


@pytest.mark.parametrize("kept", ["log", "exit"])
def test_another_number_of_servers(kept: str, tmp_path: Path) -> None:
    """No update is lost, nor reported as lost, whoever has which shard."""
    options: dict[str, Any] = (
        {"durable": "process", "log": str(tmp_path / "log")}
        if kept == "log"
        else {
            "checkpoints": tmp_path,
            "save_on_exit": "job",
            "restore": "job",
            "or_empty": True,
        }
    )
    total = 0
    for servers in (1, 3, 2, 5):
        with serving(servers, **options) as addresses:
            counter = Counter(addresses)
            if total:
                counter.check(total)
            counter.add(3)
            total += 3
            counter.check(total)
            counter.store.close()


def test_another_number_of_shards(tmp_path: Path) -> None:
    """They begin with the checkpoint that the job saved when it ended."""
    options: dict[str, Any] = {
        "checkpoints": tmp_path,
        "save_on_exit": "job",
        "restore": "job",
        "or_empty": True,
    }
    for i, (servers, count) in enumerate(((2, 3), (5, 7), (1, 3))):
        with serving(servers, count, **options) as addresses:
            counter = Counter(addresses)
            if i:
                counter.check(3 * i)
            counter.add(3)
            counter.store.save(tmp_path / "job", step=i)
            counter.store.close()


def test_what_is_seen_of_each_shard() -> None:
    with serving(1, metrics_port=0) as addresses:
        counter = Counter(addresses)
        counter.add(2)
        found = ask(addresses, interval=0.0)
        assert [s.shard for s in found] == list(range(SHARDS))
        assert {s.shards for s in found} == {SHARDS}
        assert not any(s.error for s in found)
        rows = [sum(t["rows"] for t in s.stats["tables"]) for s in found]
        assert sum(rows) == 100 and all(rows)
        counter.store.close()


def test_metrics_of_each_shard(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(1, metrics_port=0) as addresses:
        counter = Counter(addresses)
        counter.add(2)
        url = next(
            word
            for word in "".join(capfd.readouterr()).split()
            if word.startswith("http://")
        )
        with urllib.request.urlopen(url) as page:
            lines = page.read().decode().splitlines()
        each = [x for x in lines if x.startswith("persia_shard_rows{")]
        assert len(each) == SHARDS
        assert sum(float(x.split()[-1]) for x in each) == 100
        assert 'persia_table_rows{table="t"} 100.0' in lines
        assert "persia_updates_total 2.0" in lines
        counter.store.close()
