"""What the ranks of a job say to each other, through torch.distributed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from persia import errors

if TYPE_CHECKING:
    from persia.distributed.cluster import Job

_POLL = 0.05  # seconds
_FIRST_PAUSE = 5e-5
_PATIENCE = 600.0  # seconds for other ranks to arrive
_MEETING = 1800.0  # the same in a pass, as long as torch's collectives wait
# SOCK_NONBLOCK: else setdefaulttimeout() would make a blocking one another.
_AS_IT_IS = socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
_SILENT = (  # a minute in which the other machine's kernel answers nothing
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),  # ms
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
)
# What gloo says behind the place in its source.
_BROKEN = re.compile(r"gloo/transport/\S+\] (.*?)(?:\. |$)")


def group_here() -> Any:
    """torch.distributed with its default process group, or None."""
    dist = torch.distributed
    return dist if dist.is_available() and dist.is_initialized() else None


def need_group(why: str) -> Any:
    """torch.distributed; an error that says what needs it."""
    group = group_here()
    if group is None:
        raise errors.InvalidArgument(
            f"{why} needs a process group: call "
            "torch.distributed.init_process_group() first"
        )
    return group


def notice_lost_machines() -> None:
    """A machine that loses its power says nothing, and torch waits half an
    hour for it. The TCP connections that this process has now, those of its
    process group among them, fail after a minute in which the other machine
    answers nothing.
    """
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed, or not of TCP
            if not stat.S_ISSOCK(os.stat(file).st_mode):
                continue
            with socket.socket(*_AS_IT_IS, fileno=os.dup(file)) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                for level, option, value in _SILENT:
                    one.setsockopt(level, option, value)


def lost_rank(error: RuntimeError) -> errors.Unavailable | None:
    """What to say where a collective of torch failed by this error because
    the connection to another rank broke; None: it is another error."""
    found = _BROKEN.search(" ".join(str(error).split()))
    if found is None:
        return None
    return errors.Unavailable(
        "another rank has ended, or its machine is lost; the first rank that "
        f"failed says why ({found[1]})"
    )


def backends(group: Any) -> dict[str, str]:
    """Of the default group, by device. A group that was made without the
    name of a backend may have several; torch then says "undefined" for all.
    """
    pairs = group.get_backend_config().split(",")
    return dict(pair.split(":", 1) for pair in pairs)


# The gloo group beside each default group, by that group's identity: a new
# default group after destroy_process_group() gets a side group of its own.
_sides: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def side_group(group: Any) -> Any:
    """The group of exchanges of the store, whose tensors are on the host.

    That is the default group where it has a backend for the CPU. Beside NCCL
    it is one of gloo, made by the first exchange, which all ranks call: an
    exchange then neither uses the device nor waits for its work.
    """
    if "cpu" in backends(group):
        return None
    world = group.group.WORLD
    if world not in _sides:
        _sides[world] = group.new_group(backend="gloo")
    return _sides[world]


def _finish(work: Any) -> None:
    """A wait within torch would not end at Ctrl-C."""
    pause = _FIRST_PAUSE
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _POLL)
    work.wait()


def _reduce(values: Sequence[float], dtype: torch.dtype, op: Any) -> Any:
    group = need_group("a value of all ranks")
    t = torch.tensor(values, dtype=dtype, device="cpu")
    _finish(group.all_reduce(t, op, group=side_group(group), async_op=True))
    return t.tolist()


def swap_pieces(pieces: Sequence[bytes]) -> list[bytes]:
    """Piece r goes to rank r; what came from each. All ranks call it."""
    group = need_group("an exchange of all ranks")
    side = side_group(group)
    sizes = torch.tensor([len(piece) for piece in pieces], device="cpu")
    theirs = torch.empty_like(sizes)
    _finish(group.all_to_all_single(theirs, sizes, group=side, async_op=True))
    lengths = theirs.tolist()
    sent = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    came = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
    _finish(
        group.all_to_all_single(
            came, sent, lengths, sizes.tolist(), group=side, async_op=True
        )
    )
    return [x.numpy().tobytes() for x in torch.split(came, lengths)]


def all_max(values: Sequence[int]) -> list[int]:
    """The largest of all ranks, place by place. All ranks call it."""
    op = torch.distributed.ReduceOp.MAX
    return [int(x) for x in _reduce(values, torch.int64, op)]


def all_sum(values: Sequence[float]) -> list[float]:
    """The sums over all ranks, place by place. All ranks call it."""
    op = torch.distributed.ReduceOp.SUM
    return [float(x) for x in _reduce(values, torch.float64, op)]


class Keys:
    """The key-value store of torch.distributed, under a prefix; waits poll,
    so that Ctrl-C works."""

    def __init__(self, prefix: str) -> None:
        from persia.base.torch_private import default_key_value_store

        store: Any = torch.distributed.PrefixStore  # type: ignore[attr-defined]
        self._store = store(prefix, default_key_value_store())

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def first(self, key: str, value: str) -> str:
        """The value of the rank that comes first."""
        return bytes(self._store.compare_set(key, "", value)).decode()

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def drop(self, key: str) -> None:
        self._store.delete_key(key)

    def get(self, key: str, why: str = "has not opened its Store") -> str:
        """Waits for it, and reads a text."""
        return self.read(key, why).decode()

    def read(self, key: str, why: str) -> bytes:
        """Waits for it; ``why``: what a rank then has not done."""
        deadline, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
        while not self.has(key):
            if time.monotonic() > deadline:
                raise errors.DeadlineExceeded(
                    f"no {key} of this job within {_PATIENCE:.0f} s: a rank "
                    f"{why}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL)
        return bytes(self._store.get(key))

    def gather(
        self,
        key: str,
        value: Any,
        job: Job,
        why: str = "has not opened its Store",
    ) -> list[Any]:
        """The values of all ranks; ``why``: what a rank then has not done."""
        self.set(f"{key}/{job.rank}", json.dumps(value))
        return [
            json.loads(self.get(f"{key}/{r}", why)) for r in range(job.world)
        ]

    def count(self, key: str, more: int) -> int:
        """Adds to a counter of all ranks; what it is then."""
        return int(self._store.add(key, more))


class Passes:
    """The training passes of a rank over its batches, and values that the
    ranks agree on within them.

    A rank whose batches have ended takes part in no collective of ours any
    more: in ``model.join()`` it shadows those of DistributedDataParallel
    alone. The others then exchange their values through the key-value store.
    They know of it in time: a rank tells its end after its last step, and
    before its shadow takes part in the backward of the step behind; and that
    it is back, before its next forward.

    Without DistributedDataParallel nothing keeps the ranks' steps together.
    Then they meet before each exchange: until every rank reached it or has
    ended its pass, the first, second, ... of each rank being one.

    Args:
        prefix: of the keys; the same on all ranks, and in no other use.
        job: this rank.
    """

    def __init__(self, prefix: str, job: Job) -> None:
        self._prefix = prefix
        self._job = job
        self._open = 0  # passes of this rank
        self._is_out = False  # and has reported it
        # Made once, and few keys: a store keeps what it is given. It also
        # knows what an earlier object like this one has told.
        self._keys: Keys | None = None
        # Of passes whose ranks meet: the number of the last one, and of its
        # last exchange; None: this rank is in none.
        self._number = 0
        self._turn: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether this rank is in a training pass."""
        return self._open > 0

    def begin(self, meets: bool = False) -> None:
        """A pass that trains begins; ``meets``: no DistributedDataParallel
        keeps the ranks together. The same on all ranks."""
        self._open += 1
        if self._job.world == 1 or group_here() is None:
            return
        if self._keys is None:
            self._keys = Keys(self._prefix)
            self._is_out = self._has_told_out(self._keys, self._job.rank)
        if self._is_out:
            self._tell(self._keys, is_out=False)
        if meets and self._turn is None:
            last = max(self._number, self._ended(self._keys, self._job.rank))
            self._number = last + 1
            self._turn = 0

    def end(self) -> None:
        """It ends, for this rank."""
        self._open -= 1
        if self._open or self._keys is None:
            return
        # The ranks' key-value store may be gone, and they with it.
        with contextlib.suppress(RuntimeError):
            if self._turn is not None:
                self._keys.set(f"ended/{self._job.rank}", str(self._number))
                self._keys.count(f"ended/of/{self._number}", 1)
            self._tell(self._keys, is_out=True)
        self._turn = None

    def close(self) -> None:
        """The passes that are open have ended, and there will be none."""
        if self._open:
            self._open = 1
            self.end()
        self._keys = None

    @staticmethod
    def _has_told_out(keys: Keys, rank: int) -> bool:
        out = f"out/{rank}"
        return keys.has(out) and bool(int(keys.get(out)))

    def _tell(self, keys: Keys, is_out: bool) -> None:
        self._is_out = is_out
        keys.set(f"out/{self._job.rank}", str(int(is_out)))
        keys.count("out", 1 if is_out else -1)

    def all_max(self, values: Sequence[int]) -> list[int]:
        """The largest of all ranks that continue, place by place."""
        return self._agree(values, all_max, max)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks that continue, place by place."""
        return self._agree(values, all_sum, sum)

    def swap(self, cut: Callable[[int], Sequence[bytes]]) -> list[bytes]:
        """Cuts something into a piece (of one byte at least) for each rank
        that continues and sends it; what this rank was given, by rank."""
        ranks = self._going_on()
        if ranks is None:
            return swap_pieces(cut(self._job.world))
        return self._tell_each_other(ranks, cut(len(ranks)))

    def _agree(
        self,
        values: Sequence[Any],
        collective: Callable[[Sequence[Any]], list[Any]],
        fold: Callable[[Sequence[Any]], Any],
    ) -> list[Any]:
        ranks = self._going_on()
        if ranks is None:
            return collective(values)
        told = json.dumps(list(values)).encode()
        every = self._tell_each_other(ranks, [told] * len(ranks))
        return [
            fold(place) for place in zip(*map(json.loads, every), strict=True)
        ]

    def _going_on(self) -> list[int] | None:
        """The ranks whose batches have not ended; None: all, or those who ask
        are in no pass."""
        keys = self._keys
        if not self._open or keys is None:
            return None
        if self._turn is not None:
            return self._met(keys)
        if not keys.count("out", 0):
            return None
        return [
            rank
            for rank in range(self._job.world)
            if not self._has_told_out(keys, rank)
        ]

    @staticmethod
    def _ended(keys: Keys, rank: int) -> int:
        """The number of the last pass that it has ended; 0: of none."""
        ended = f"ended/{rank}"
        return int(keys.get(ended)) if keys.has(ended) else 0

    def _met(self, keys: Keys) -> list[int] | None:
        """Waits until each rank is at this exchange or has ended its pass.
        Those who are there wait for this one, so none of them ends it now:
        all find the same."""
        assert self._turn is not None
        self._turn += 1
        world, here = self._job.world, f"at/{self._number}/{self._turn}"
        over = f"ended/of/{self._number}"
        deadline, pause = time.monotonic() + _MEETING, _FIRST_PAUSE
        came = keys.count(here, 1)
        while came + (ended := keys.count(over, 0)) < world:
            if time.monotonic() > deadline:
                raise errors.DeadlineExceeded(
                    f"{world - came - ended} of {world} ranks neither reached "
                    f"exchange {self._turn} of training pass {self._number} "
                    f"nor ended their batches within {_MEETING:.0f} s; all "
                    "ranks make as many passes, or their model is in "
                    "DistributedDataParallel, and the DataLoader given that"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL)
            came = keys.count(here, 0)
        there = [
            rank
            for rank in range(world)
            if not ended or self._ended(keys, rank) < self._number
        ]
        if self._turn > 1 and self._job.rank == there[0]:  # all have left it
            keys.drop(f"at/{self._number}/{self._turn - 1}")
        return there if ended else None

    def _tell_each_other(
        self, ranks: list[int], pieces: Sequence[bytes]
    ) -> list[bytes]:
        """Gives each of these ranks, this one among them, its piece; what
        each gave to this one."""
        keys, me = self._keys, self._job.rank
        assert keys is not None
        who = ",".join(map(str, ranks))
        # Values exchanged by this set of ranks: a number that all of it know.
        turn = keys.count(f"{who}/turns/{me}", 1)
        for rank, piece in zip(ranks, pieces, strict=True):
            keys.set(f"{who}/{turn}/{me}/{rank}", piece)
        late = "that has not ended its batches sends no values"
        every = []
        for rank in ranks:
            key = f"{who}/{turn}/{rank}/{me}"
            every.append(keys.read(key, late))
            keys.drop(key)  # no other rank reads it
        return every
