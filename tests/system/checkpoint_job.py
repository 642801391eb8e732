"""What the ranks of a job do in tests/system/test_checkpoint_job.py.

    python checkpoint_job.py FOLDER SCENARIO SERVERS ROOT

SERVERS: addresses, or "ranks". A scenario returns what the test compares:
FOLDER/SCENARIO.RANK.pt.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import persia
from persia import Batch, JaggedBatch, errors
from persia.checkpoint import ranks as checkpoint_ranks
from persia.checkpoint.ranks import Ranks

STEPS = 8
SAVED = 3  # steps before the checkpoint
ROWS = 500


class Source:
    """Batches of one rank: another seed in each."""

    epoch = 0

    def __init__(self, rank: int, steps: int) -> None:
        self.rank = rank
        self.steps = steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            g = torch.Generator().manual_seed(2 * step + self.rank)
            ids = torch.randint(0, 40 + 20 * step, (60,), generator=g)
            yield Batch(None, JaggedBatch(["u", "i"], ids))


class Trained:
    """A job that uses all that has a state."""

    def __init__(self, servers: str, rank: int, steps: int = STEPS) -> None:
        torch.manual_seed(0)
        self.store = persia.Store(
            persia.optim.Adam(lr=0.02), servers=servers, timeout=15, threads=1
        )
        bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[
                persia.EmbeddingBagConfig("u", 8, data_type="bf16"),
                persia.EmbeddingBagConfig("i", 6),
            ],
        )
        top = nn.Sequential(nn.Dropout(0.3), nn.Linear(14, 1))
        self.model = nn.ModuleDict({"bags": bags, "top": top})
        self.net = nn.parallel.DistributedDataParallel(top)
        self.optimizer = torch.optim.Adam(top.parameters(), lr=0.01)
        self.loader = persia.DataLoader(
            Source(rank, steps), self.model, staleness=0
        )
        torch.manual_seed(rank)  # ranks draw numbers of their own

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
        }

    def train(
        self, did: Callable[[int], None] = lambda step: None
    ) -> list[float]:
        """To the end of the epoch; did(i) is called after step i, from 1."""
        losses = []
        for step, batch in enumerate(self.loader, self.loader._given + 1):
            out = self.net(self.model["bags"](batch.ids).values())
            loss = (out - torch.rand(30, 1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            did(step)
        self.store.flush()
        dist.barrier()
        return losses

    def everything(self) -> dict[str, Any]:
        ids = torch.arange(200)
        return {
            "u": self.store.rows_and_state("u", ids),
            "i": self.store.rows_and_state("i", ids),
            "weight": self.model["top"][1].weight.detach().clone(),
            "updates": self.store.updates,
        }


def undisturbed(servers: str, root: str, rank: int) -> Any:
    """Saves in the middle of an epoch, and goes on to its end."""
    job = Trained(servers, rank)

    def did(step: int) -> None:
        if step == SAVED:
            job.store.save(root, **job.state(), extra={"rank": rank})

    losses = job.train(did)
    return {"losses": losses[SAVED:], **job.everything()}


def resumed(servers: str, root: str, rank: int) -> Any:
    """Goes on from there, twice."""
    job = Trained(servers, rank)
    every = []
    for _ in range(2):
        found = job.store.load(root, **job.state())
        assert found.extra == {"rank": 0}
        every.append({"losses": job.train(), **job.everything()})
    return every


# ---- counting --------------------------------------------------------------


class Counter:
    """Every update adds 1 to every row of a table."""

    def __init__(self, servers: str, batches: int, staleness: int) -> None:
        self.store = persia.Store(
            persia.optim.SGD(lr=1.0),
            servers=servers,
            timeout=15,
            threads=1,
            grad_division=False,
        )
        self.bags = persia.EmbeddingBagCollection(
            store=self.store,
            tables=[persia.EmbeddingBagConfig("t", 2, init=0.0)],
        )
        ids = torch.arange(ROWS)
        source = [Batch(None, JaggedBatch(["t"], ids)) for _ in range(batches)]
        self.loader = persia.DataLoader(source, self.bags, staleness)

    def state(self) -> dict[str, Any]:
        return {"model": self.bags, "loader": self.loader}

    def push(self, batch: Any) -> None:
        self.bags(batch.ids).values().sum().neg().backward()

    def values(self) -> set[float]:
        self.store.flush()
        dist.barrier()
        return set(self.store.rows("t", torch.arange(ROWS)).flatten().tolist())


def counting(servers: str, root: str, rank: int) -> Any:
    """Saves after every second batch, until it is killed."""
    job = Counter(servers, 10_000, 2)
    if Path(root, "LATEST").exists():
        job.store.load(root, **job.state())
    Path(f"{root}.{rank}").write_text(str(os.getpid()))
    for done, batch in enumerate(job.loader, job.loader._given + 1):
        job.push(batch)
        if done % 2 == 0:
            job.store.save(
                root,
                **job.state(),
                extra={"pushes": done * dist.get_world_size()},
                keep=2,
                step=done,
            )
    raise AssertionError("not killed")


def kept(servers: str, root: str, rank: int) -> Any:
    """Goes on with the rows of this job, or tries to with an earlier one's."""
    job = Counter(servers, 4, 0)
    if Path(root, "LATEST").exists():
        try:
            job.store.load(root, **job.state(), resume="continue")
        except errors.PersiaError as error:
            return f"{type(error).__name__}: {error}"
    for step, batch in enumerate(job.loader, 1):
        job.push(batch)
        if step == 2:
            job.store.save(root, **job.state())
    job.store.load(root, **job.state(), resume="continue")
    for batch in job.loader:
        job.push(batch)
    once = job.values()
    job.store.load(root, **job.state())
    job.store.load(root, **job.state(), resume="continue")
    for batch in job.loader:
        job.push(batch)
    return once, job.values()


# ---- failures --------------------------------------------------------------


class Bad:
    """A part with a state that fails in some way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def state_dict(self) -> dict[str, Any]:
        if self.how == "raises":
            raise KeyError("no such state")
        return {"x": Path("/") if self.how == "unreadable" else 1}

    def load_state_dict(self, state: Any) -> None:
        if self.how == "load":
            raise ValueError("it does not fit")


def failing(servers: str, root: str, rank: int) -> Any:
    """One rank fails: what each of them raises, and what is left."""
    job = Counter(servers, 2, 0)
    ids = torch.arange(ROWS)
    for batch in job.loader:
        job.push(batch)
    good = job.store.save(root, model=job.bags, optimizer=Bad("fine"))
    for batch in job.loader:
        job.push(batch)
    out: dict[str, Any] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
        else:
            out[name] = "nothing"
        assert job.store.rows("t", ids).eq(8.0).all()
        assert job.store.updates == 4

    for how in ("raises", "unreadable"):
        bad = Bad(how if rank == 1 else "fine")
        attempt(how, lambda: job.store.save(root, loader=bad))  # noqa: B023
    where = root if rank == 0 else Path("s3:/bucket/out")
    attempt("path", lambda: job.store.save(where))
    attempt("disk", lambda: job.store.save("/proc/nothing/out"))
    bad = Bad("load" if rank == 1 else "fine")
    attempt("load", lambda: job.store.load(root, optimizer=bad))
    attempt("step", lambda: job.store.load(root, step=77))
    for _ in job.loader:
        attempt("pass", lambda: job.store.load(root))
        break
    dist.barrier()
    found = job.store.load(root, optimizer=Bad("fine"))
    assert found.path == good
    out["rows"] = set(job.store.rows("t", ids).flatten().tolist())
    out["files"] = sorted(os.listdir(root))
    return out


def interrupted(servers: str, root: str, rank: int) -> Any:
    """Ctrl-C at each rank in turn, at many moments: while rank 0 works and
    the others wait, then while the rank does its part.
    """
    checkpoint_ranks.TICK = 0.01
    moments = random.Random(0)
    out: list[str] = []
    for turn in range(80):
        delay = moments.uniform(0, 0.02)
        ready = Path(f"{root}.ready.{turn}")
        try:
            with Ranks(alone=False) as ranks:
                assert ranks.gathered(rank) == [0, 1]
                if rank == turn % 2:
                    Thread(target=interrupt, args=(ready, delay)).start()
                if turn < 40:
                    ranks.lead(partial(until_stopped, ranks, ready))
                with ranks.agreed():
                    if rank == turn % 2:
                        ready.touch()
                        time.sleep(60)
        except (KeyboardInterrupt, Exception) as error:
            out.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return out


def until_stopped(ranks: Ranks, ready: Path) -> None:
    ready.touch()
    assert ranks.stop.wait(60)


def interrupt(ready: Path, delay: float) -> None:
    """Sends Ctrl-C to this process so many seconds after rank 0 works."""
    while not ready.exists():
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)


def frozen(servers: str, root: str, rank: int) -> Any:
    """Each rank in turn is stopped while rank 0 works: what the others say."""
    return [freeze(root, rank, victim) for victim in (1, 0)]


def frozen_of_three(servers: str, root: str, rank: int) -> Any:
    return [freeze(root, rank, 1)]


def freeze(root: str, rank: int, victim: int) -> str:
    # A process group that has failed is of no more use: one for each turn.
    if dist.is_initialized():
        dist.destroy_process_group()
    store = f"file://{root}.group.{victim}"
    world = int(os.environ["WORLD_SIZE"])
    # Without a name torch takes gloo on the CPU, too.
    backend = "gloo" if victim else None
    dist.init_process_group(backend, store, rank=rank, world_size=world)
    ready = Path(f"{root}.ready.{victim}")
    try:
        with Ranks(alone=False, silence=2.0) as ranks:
            pids = ranks.gathered(os.getpid())
            if rank == victim:
                freezing = Thread(target=stop_when, args=(ready,))
                freezing.start()
            ranks.lead(partial(until_stopped, ranks, ready))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    Path(f"{ready}.{rank}").touch()
    if rank != victim:
        # When all others have their errors: what is woken breaks connections.
        others = [Path(f"{ready}.{r}") for r in range(world) if r != victim]
        while not all(path.exists() for path in others):
            time.sleep(0.05)
        os.kill(pids[victim], signal.SIGCONT)
    return text


def stop_when(ready: Path) -> None:
    while not ready.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    folder, scenario, servers, root = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = globals()[scenario](servers, root, rank)
    torch.save(result, Path(folder) / f"{scenario}.{rank}.pt")
    if not scenario.startswith("frozen"):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
