"""What the processes of a round do."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import persia
from persia import _core, errors
from persia.distributed.security import Security
from persia.distributed.server import ServeConfig, Server
from persia.distributed.status import ask_embedding
from persia.torture import data
from persia.torture.plan import AGAIN, DURABLE, ROLLBACK, Round

TIMEOUT = 40.0
SAVE_EVERY = 20  # batches
JOB = "chaos"


def command(*arguments: str) -> None:
    """``persia`` ..."""
    from persia.cli import main

    sys.argv = ["persia", *arguments]
    main()


def server(made: Round, folder: Path, ports: list[int], i: int) -> None:
    """``persia serve ps``"""
    flags = ["--shard", f"{i}/{made.servers}", "--port", str(ports[i])]
    flags += ["--threads", "2", "--grace", "5"]
    if made.fate == DURABLE:
        # Short, so that cuts are taken and segments are removed, too.
        flags += ["--durable", made.durable, "--log", str(folder / "log")]
        flags += ["--log-limit", "256KiB"]
    elif made.fate != "empty":
        flags += ["--checkpoints", str(folder), "--restore", "out"]
        flags += ["--or-empty", "--save-on-exit", "out"]
    command("serve", "ps", *flags)


def worker(made: Round, servers: str, port: int) -> None:
    """``persia serve worker``"""
    command(
        *("serve", "worker", "--servers", servers, "--port", str(port)),
        *("--threads", "2", "--grace", "5", "--timeout", str(TIMEOUT)),
        *("--loaders", str(made.units), "--lease", str(made.lease)),
        *("--loader-silence", str(made.silence), "--queue-limit", "1MiB"),
    )


def loader(made: Round, folder: Path, workers: str, i: int) -> None:
    """``persia feed``, or a script with a Sender."""
    if made.kind in ("named", "unnamed"):
        send(made, folder, workers, i)
        return
    flags = ["--data", data.glob(folder), "--workers", workers]
    flags += ["--schema", str(folder / "schema.yaml"), "--eval-split", "0"]
    flags += ["--batch-size", str(made.size), "--epochs", str(made.epochs)]
    flags += ["--job", JOB, "--timeout", str(TIMEOUT), "--move-after", "1"]
    flags += ["--loader", f"{i}/{made.loaders}"]
    if made.kind == "parts":
        flags += ["--parts", str(made.parts)]
    command("feed", *flags)


def send(made: Round, folder: Path, workers: str, i: int) -> None:
    """Prints what it has counted as ``persia feed`` does."""
    os.environ["PERSIA_RUN_ID"] = JOB
    name = f"{JOB} {i}" if made.kind == "named" else None
    source = data.units(made, folder)[i]
    while True:
        with persia.data.Sender(
            workers, name=name, timeout=TIMEOUT, move_after=1
        ) as sender:
            try:
                for epoch in range(made.epochs):
                    source.epoch = epoch
                    for batch in source:
                        sender.send(batch)
                    sender.end()
                sender.flush()
                stats = sender.stats()
                break
            except errors.RowsReplaced:
                sender.close(ended=False)
    print(f"sent {stats['sent']:,} batches")
    print(f"{stats['passed']:,} of them servers had already")
    print(f"lost {stats['lost']}", flush=True)


class Saver(Server):
    """Has a server process write its rows for --restore."""

    def __init__(self, address: str, shard: int, shards: int, folder: Path):
        self.config = ServeConfig.model_validate({"checkpoints": folder})
        self.shard, self.shards = shard, shards
        self._channel = _core.Channel(address, Security().arguments(), 30.0)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def save(made: Round, folder: Path, ports: list[int], i: int) -> None:
    """A snapshot of one server."""
    address = f"127.0.0.1:{ports[i]}"
    with contextlib.suppress(errors.PersiaError):
        Saver(address, i, made.servers, folder).save("out")


class Rank:
    """A trainer: each sample adds 1 to the rows of its ids."""

    def __init__(
        self,
        made: Round,
        folder: Path,
        servers: str,
        workers: str,
        rank: int,
        life: int,
    ) -> None:
        torch.set_num_threads(1)
        if made.named:
            os.environ["PERSIA_RUN_ID"] = JOB
        self.made, self.folder, self.rank = made, folder, rank
        if made.ranks > 1:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{folder}/ranks.{life}",
                rank=rank,
                world_size=made.ranks,
            )
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=servers,
            timeout=TIMEOUT,
            lost=made.lost,
            update="step" if made.group > 1 else "backward",
            job=JOB,
            rank=rank,
            world_size=made.ranks,
            grad_division=False,
        )
        self.model: Any = model(self.store, made.rows)
        self.stream = persia.Stream(workers, timeout=TIMEOUT, move_after=1)
        self._progress = os.open(
            folder / "progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._pending = self._lost = self._n = 0

    def say(self, what: str, number: int) -> None:
        print(what, number, flush=True)

    def run(self) -> None:
        """All epochs; without an end where checkpoints are loaded."""
        if self.made.fate == ROLLBACK:
            self.load()
        while self.over() < self.made.epochs or self.made.fate == ROLLBACK:
            self.epoch()
            self.say("epoch", self.stream.stats()["epochs"])
        self.flush()
        self.say("lost", self.lost())
        print(self.stream.stats(), flush=True)
        self.store.close()

    def load(self) -> None:
        """The last checkpoint; there is one from the beginning."""
        if (self.folder / "out" / "LATEST").exists():
            self.store.load(self.folder / "out")
        else:
            self.store.save(self.folder / "out")

    def over(self) -> int:
        """Epochs that are, for all ranks."""
        over = torch.tensor(self.stream.stats()["epochs"])
        if self.made.ranks > 1:
            group = torch.distributed
            group.all_reduce(over, group.ReduceOp.MAX)
        return int(over)

    def lost(self) -> int:
        """As the store has counted."""
        return int(self.store.stats()["client"]["lost"])

    def epoch(self) -> None:
        """A pass; a loop that learns of a loss begins again."""
        while True:
            try:
                batch: persia.Batch | None
                for batch in persia.DataLoader(
                    self.stream, self.model, self.made.staleness
                ):
                    self.step(batch)
                    del batch
                break
            except errors.UpdatesLost:
                self.told()
        self.update()
        self.flush()

    def told(self) -> None:
        """A loss is no reason to stop, or one to begin again."""
        self.say("lost", self.lost())
        if self.made.ends_by_loss:
            os._exit(AGAIN)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except errors.UpdatesLost:
            self.told()

    def step(self, batch: persia.Batch) -> None:
        try:
            loss = self.loss(batch)
        except errors.UpdatesLost:
            self.told()
            loss = self.loss(batch)
        with self.telling():
            torch.autograd.backward(loss)
        del loss
        self._pending += 1
        self._n += 1
        if self._pending >= self.made.group:
            self.update()
        os.write(self._progress, b".")
        lost = self.stream.stats()["lost"]
        if lost != self._lost:
            self._lost = lost
            self.say("lost", self.lost())
        if self._n % SAVE_EVERY == 0:
            self.check()
        time.sleep(self.made.pace)

    def loss(self, batch: persia.Batch) -> torch.Tensor:
        out = self.model(batch.ids)
        loss: torch.Tensor = out.rows() if self.made.rows else out.values()
        return -loss.sum()

    def update(self) -> None:
        """What was collected."""
        if self._pending and self.made.group > 1:
            with self.telling():
                self.store.optimizer.step()
        self._pending = 0

    def check(self) -> None:
        """From time to time."""
        histogram = self.store.stats()["lookahead"]["staleness"]
        self.say("staleness", max(histogram, default=0))
        if self.made.fate == ROLLBACK:
            self.update()
            # A server that is killed meanwhile: the next one, then.
            with self.telling(), contextlib.suppress(errors.Unavailable):
                self.store.save(self.folder / "out")

    def flush(self) -> None:
        with self.telling():
            self.store.flush()
        self.check()


def model(store: persia.Store, rows: bool) -> Any:
    """A table for each feature."""
    if rows:
        return persia.EmbeddingCollection(
            store=store,
            tables=[
                persia.EmbeddingConfig(f, 2, feature_names=[f], init=0.0)
                for f in data.FEATURES
            ],
        )
    return persia.EmbeddingBagCollection(store=store, tables=configs())


def configs() -> list[persia.EmbeddingBagConfig]:
    """The tables."""
    return [
        persia.EmbeddingBagConfig(f, 2, feature_names=[f], init=0.0)
        for f in data.FEATURES
    ]


def read(made: Round, folder: Path, servers: str, workers: str) -> None:
    """In a process of its own: the rows, and what they should be, into a
    file."""
    torch.set_num_threads(1)
    store = persia.Store(
        persia.optim.SGD(lr=1.0),
        servers=servers,
        read_only=True,
        lost="continue",
        timeout=30,
    )
    for config in configs():
        store.add_table(config)
    samples = made.per_epoch * made.size
    rows = store.rows("device_ip", torch.arange(samples))[:, 0]
    sites = store.rows("site_id", torch.arange(40))[:, 0]
    batches = [
        {f: batch.ids[f][0].tolist() for f in ("device_ip", "site_id")}
        for unit in data.units(made, folder)
        for batch in unit
    ]
    store.close()
    found = {
        "rows": rows.tolist(),
        "sites": sites.tolist(),
        "batches": batches,
        "workers": [
            one.stats for one in ask_embedding(workers.split(","), interval=0)
        ],
    }
    (folder / "rows.json").write_text(json.dumps(found))
