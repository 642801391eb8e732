"""What happens in a round: all of it follows from its seed."""

from __future__ import annotations

import dataclasses
from random import Random

#: What becomes of the rows of servers.
KEPT = "kept"  # SIGTERM, after which they begin with what they saved
EMPTY = "empty"  # they are killed, and begin without rows
SNAPSHOTS = "snapshots"  # ... and begin with the last of their snapshots
ROLLBACK = "rollback"  # trainers load a checkpoint whenever they start
DURABLE = "durable"  # ... and servers have a log, which loses nothing

AGAIN = 3  # exit status of a rank that begins again with a checkpoint
KINDS = ("parts", "shard", "named", "unnamed")


@dataclasses.dataclass(frozen=True)
class Event:
    """Signals, all at once.

    Attributes:
        at: batches that are trained then.
        targets: names of processes.
        signal: KILL, TERM, STOP, or SAVE: a snapshot of a server.
        seconds: until they are started again, or continue.
    """

    at: int
    targets: tuple[str, ...]
    signal: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Round:
    """A job, and what happens to it.

    Attributes:
        rows: whether rows travel to the trainers.
        group: batches of an update.
        kind: of the loaders: one of KINDS.
        per_epoch: batches.
        size: samples of a batch.
        lease, silence: seconds, of the workers.
        fate: what becomes of the rows of servers.
        lost: policy of the trainers.
        pace: seconds that a trainer sleeps for each batch.
        named: whether the trainers name their job, too.
        durable: level of the servers' logs; off: they have none.
    """

    seed: int
    staleness: int
    ranks: int
    rows: bool
    group: int
    servers: int
    workers: int
    loaders: int
    kind: str
    parts: int
    epochs: int
    per_epoch: int
    size: int
    lease: float
    silence: float
    fate: str
    lost: str
    pace: float
    named: bool
    durable: str
    events: tuple[Event, ...]

    @property
    def names(self) -> dict[str, list[str]]:
        """Of the processes, by role."""
        return {
            role: [f"{role}{i}" for i in range(n)]
            for role, n in (
                ("server", self.servers),
                ("worker", self.workers),
                ("loader", self.loaders),
                ("rank", self.ranks),
            )
        }

    @property
    def units(self) -> int:
        """Streams of batches: what workers call loaders."""
        return self.parts if self.kind == "parts" else self.loaders

    @property
    def ends_by_loss(self) -> bool:
        """Whether a trainer that learns of a loss ends, and all are started
        again: one that loads checkpoints, and ranks in step, which learn of
        it at different steps."""
        steps = self.staleness == 0 and self.ranks > 1
        return self.fate == ROLLBACK or (steps and self.lost == "raise")

    def has(self, signal: str, role: str) -> bool:
        """Whether some process of the role gets the signal."""
        return any(
            event.signal == signal and any(role in t for t in event.targets)
            for event in self.events
        )

    def __str__(self) -> str:
        return (
            f"{self.fate} {self.kind} s{self.staleness} "
            f"{self.servers}s/{self.workers}w/{self.loaders}l/{self.ranks}r "
            f"g{self.group}{' rows' if self.rows else ''} {self.lost}"
        )


def of_seed(seed: int, short: bool, durable: str = "off") -> Round:
    """The round of a seed; durable: the level of the servers' logs. Other than
    "off": servers are killed."""
    r = Random(f"chaos {seed}")
    killed = durable != "off" or seed % 3 == 0
    fate = r.choice(
        [EMPTY, SNAPSHOTS, ROLLBACK] if killed else [KEPT, KEPT, ROLLBACK]
    )
    if durable != "off":
        fate = DURABLE
    staleness = r.choice([0, 1, 8])
    ranks = 1 if fate == ROLLBACK else r.choice([1, 2])
    steps = staleness == 0 and ranks > 1
    kinds = KINDS if fate != ROLLBACK else KINDS[:3]
    epochs = r.choice([1, 2]) if short else r.choice([1, 2, 3])
    per_epoch = 48 if short else r.randrange(120, 260, 20)
    made = Round(
        seed=seed,
        staleness=staleness,
        ranks=ranks,
        rows=r.random() < 0.3,
        group=r.choice([1, 1, 2, 3, 4]),
        servers=r.choice([1, 2, 2, 3]),
        workers=r.choice([1, 2, 2, 3]),
        loaders=1 if steps else r.choice([1, 2]),
        kind=r.choice(kinds),
        parts=1 if steps else r.choice([2, 4]),
        epochs=epochs,
        per_epoch=per_epoch,
        size=16,
        lease=r.choice([2.0, 6.0, 60.0]) if short else r.choice([6, 15, 60]),
        silence=12.0 if short else r.choice([15.0, 30.0]),
        fate=fate,
        lost="raise" if fate == ROLLBACK else r.choice(["raise", "continue"]),
        pace=0.02 if short else 0.03,
        named=r.random() < 0.5,
        durable=durable,
        events=(),
    )
    if steps or fate == ROLLBACK:
        # Of the last run of a loader a part of a group may be left, and no
        # epoch ends.
        made = dataclasses.replace(made, group=1)
    n = 3 if short else 8
    return dataclasses.replace(made, events=_events(made, r, n, killed))


_WEIGHTS = {"loader": 3, "worker": 4, "server": 3, "rank": 2}


def _signals(made: Round, role: str, killed: bool) -> list[str]:
    """Those that a process of the role may get."""
    if role == "server" and not killed:
        return ["TERM", "STOP"]
    if role == "server":
        return ["KILL", "KILL", "STOP"]
    if role == "loader" and made.kind == "unnamed":
        return ["STOP"]  # it would send everything again
    return ["KILL", "KILL", "TERM", "STOP"]


def _events(made: Round, r: Random, n: int, killed: bool) -> tuple[Event, ...]:
    total = made.per_epoch * made.epochs
    found = []
    for k in range(n):
        at = int(total * (k + r.random()) / n * 0.95)
        roles = r.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=2)
        if k == 0 and killed:
            roles[0] = "server"
        both = r.random() < 0.35
        targets = {r.choice(made.names[one]) for one in roles[: 1 + both]}
        allowed = [
            set(_signals(made, one.rstrip("0123456789"), killed))
            for one in targets
        ]
        signals = set.intersection(*allowed)
        signal = r.choice(sorted(signals) + ["KILL"] * ("KILL" in signals))
        most = 3.0 if signal == "STOP" else 1.0
        seconds = r.random() * most * made.silence / 12
        found.append(Event(at, tuple(sorted(targets)), signal, seconds))
    if made.fate == SNAPSHOTS:
        for _ in range(n):
            at = r.randrange(total)
            name = r.choice(made.names["server"])
            found.append(Event(at, (name,), "SAVE", 0.0))
    return tuple(sorted(found, key=lambda event: event.at))
