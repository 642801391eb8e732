"""More or fewer servers for a job that runs: which shard goes where, and
asking the servers to move them."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from persia import _core
from persia.base.patience import patiently
from persia.distributed.security import Security
from persia.errors import (
    InvalidArgument,
    PersiaError,
    SchemaMismatch,
    Unavailable,
)

Item = TypeVar("Item")

_ASK = 0.1  # seconds between questions
_QUIET = 1.0  # seconds in which a command that lives begins its next move


@dataclasses.dataclass(frozen=True)
class Move:
    """A shard, the address of its server, and that of the next one."""

    shard: int
    source: str
    target: str


@dataclasses.dataclass
class Progress:
    """How far a move is.

    Attributes:
        move: which.
        number, count: it is this one of so many, from 1.
        text: what is being done.
        rows: of the shard, once they are written.
        seconds: since it began.
    """

    move: Move
    number: int
    count: int
    text: str
    rows: int
    seconds: float


@dataclasses.dataclass
class _Run:
    """A move that is made, or will be."""

    progress: Progress
    show: Callable[[Progress], None]
    name: int
    began: float = 0.0


def plan(places: Mapping[str, Sequence[int]], to: int) -> list[Move]:
    """The fewest moves after which the first ``to`` servers share the shards
    evenly, and the others have none.

    Args:
        places: the shards of each server, by its address.
        to: how many servers are to have shards.

    Raises:
        InvalidArgument: there are not so many servers, or shards.
    """
    shards = sum(len(some) for some in places.values())
    if not 1 <= to <= len(places):
        raise InvalidArgument(
            f"`to={to}`: need 1 to {len(places)}, the number of servers given"
        )
    if to > shards:
        raise InvalidArgument(
            f"`to={to}`: the job has {shards} shards, and each server needs "
            "one. Their number is chosen when the job first starts "
            "(persia launch --shards)"
        )
    # Those with the most shards may keep one more.
    kept = sorted(list(places)[:to], key=lambda a: -len(places[a]))
    most = {
        address: shards // to + (i < shards % to)
        for i, address in enumerate(kept)
    }
    # In turn, so that each server that gives shards is relieved soon, and
    # those that take some do so side by side.
    away = _in_turn(
        [
            [
                (shard, address)
                for shard in sorted(some)[most.get(address, 0) :]
            ]
            for address, some in places.items()
        ]
    )
    room = _in_turn(
        [
            [address] * (most[address] - len(places[address]))
            for address in list(places)[:to]
        ]
    )
    return [
        Move(shard, source, target)
        for (shard, source), target in zip(away, room, strict=True)
    ]


def _in_turn(lists: Sequence[Sequence[Item]]) -> list[Item]:
    """The first item of each list, then the second of each, and so on."""
    longest = max(map(len, lists), default=0)
    return [some[i] for i in range(longest) for some in lists if i < len(some)]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server answers about its shards.

    Attributes:
        here: those that it has.
        shards: of the job.
        state: of the last move away from it, as ``_core.MOVED_RUNNING``.
        shard, id, by, text: of that move.
    """

    here: Sequence[int]
    shards: int
    state: int
    shard: int
    id: int
    by: str
    text: str


def may_begin(
    waiting: Sequence[Move], running: Sequence[Move], at_once: int | None
) -> list[Move]:
    """The moves that may begin now: a server is in one move at a time.

    Args:
        waiting: those that have not begun.
        running: those that have.
        at_once: so many side by side at most; None: no limit.
    """
    busy = {name for move in running for name in (move.source, move.target)}
    found: list[Move] = []
    for move in waiting:
        if at_once is not None and len(running) + len(found) >= at_once:
            break
        if move.source not in busy and move.target not in busy:
            busy |= {move.source, move.target}
            found.append(move)
    return found


class Scaling:
    """The way to the servers of a job, to change which shard is where.

    Args:
        addresses: host:port of all servers, as clients reach them.
        namespace: of the job.
        security: default: that of the environment.
        timeout: seconds that an answer may take.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        namespace: str = "default",
        security: Security | None = None,
        timeout: float = 10.0,
    ) -> None:
        if len(set(addresses)) != len(addresses) or not addresses:
            raise InvalidArgument(
                "need the address of each server of the job once: "
                "`servers=ps0:8888,ps1:8888`"
            )
        secret = (security or Security.from_environment()).arguments()
        self._namespace = namespace
        self._timeout = timeout
        self._by = f"{_user()}@{socket.gethostname()} (pid {os.getpid()})"
        self._channels = {
            address: _core.Channel(address, secret, timeout)
            for address in addresses
        }
        self.shards = 0
        self._last: dict[str, dict[str, Any]] = {}  # answers at rest
        self._own: set[int] = set()  # moves of this command
        self._told: set[int] = set()  # moves that all servers know of
        self._all_told = False  # of the shards of all others

    def __enter__(self) -> Scaling:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels.values():
            channel.close()

    def _ask(
        self,
        address: str,
        verb: int,
        shard: int = 0,
        move: int = 0,
        target: str = "",
    ) -> dict[str, Any]:
        channel = self._channels[address]
        return patiently(
            lambda: channel.move(
                *(verb, self._namespace, shard, self.shards, move),
                *(target, self._by),
            ),
            self._timeout,
        )

    def _settled(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """What the servers answer when no shard moves: a move that was
        begun by a command that is dead ends by itself. An interrupt gives it
        up."""
        known: set[int] | None = None
        until = 0.0
        while True:
            found = {
                a: self._ask(a, _core.MOVE_STATUS) for a in self._channels
            }
            moving = {
                address: answer
                for address, answer in found.items()
                if answer["state"] == _core.MOVED_RUNNING
            }
            if not moving and time.monotonic() >= until:
                return found
            ids = {answer["id"] for answer in moving.values()}
            for address, answer in moving.items():
                text = (
                    f"{answer['by']} moves shard {answer['shard']} of "
                    f"{address}: {answer['text']}"
                )
                if known is not None and answer["id"] not in known:
                    raise Unavailable(f"{text}; wait for its end")
                tell(text)
            if moving:
                known, until = ids, time.monotonic() + _QUIET
            try:
                time.sleep(_ASK)
            except KeyboardInterrupt:
                for address, answer in moving.items():
                    self._cancel(address, answer["shard"], answer["id"])
                raise

    def places(
        self, tell: Callable[[str], None] = lambda text: None
    ) -> dict[str, list[int]]:
        """The shards of each server, by its address, when none moves.

        Args:
            tell: is called again and again with what is waited for: a move
                of a command that was killed.

        Raises:
            SchemaMismatch: they are not all shards of one job.
            Unavailable: a server does not answer; or another command moves
                shards.
        """
        places = self._places(tell)
        lost = _lost(places, self.shards)
        if lost:
            raise SchemaMismatch(
                f"no server given has the shards {lost}, of {self.shards} of "
                "the job: give the addresses of all servers. If they are all "
                "there, a server was started again without its rows: "
                "`revive` lets these shards begin again"
            )
        return places

    def revive(
        self, to: int, tell: Callable[[str], None] = lambda text: None
    ) -> dict[int, str]:
        """Shards that no server has begin again, as they would with a server
        that is started: with the rows of the checkpoint that its ``restore``
        names, or without rows. Clients report what is missing.

        Args:
            to: the first so many servers may have them.
            tell: see :meth:`places`.

        Returns:
            At which server each is.

        Raises:
            Unavailable: see :meth:`places`; or one could not begin.
        """
        found: dict[int, str] = {}
        places = self._places(tell)
        for shard in _lost(places, self.shards):
            target = min(list(places)[:to], key=lambda a: len(places[a]))
            if self._revive(shard, target, tell):
                found[shard] = target
            places = self._places(tell)
        return found

    def _revive(
        self, shard: int, target: str, tell: Callable[[str], None]
    ) -> bool:
        """Whether it began: it does not if another command was faster. Each
        server knows of this command until the shard is there."""
        name = _name()
        try:
            self._revive_asked(shard, target, name)
            if shard not in _lost(self._places(tell), self.shards):
                return False
            while self._revive_asked(shard, target, name) != _core.MOVED_DONE:
                tell(f"shard {shard} begins at {target}")
                time.sleep(_ASK)
            self._ask(target, _core.MOVE_COMMIT, shard, name)
            self._placed(shard, name, target, target)
            return True
        finally:
            for address in self._channels:
                with contextlib.suppress(PersiaError):
                    self._ask(address, _core.MOVE_ABORT, shard, name)

    def _revive_asked(self, shard: int, target: str, name: int) -> int:
        """Asks all servers, always in one order, so that one of two commands
        continues; the state of the shard at its server."""
        state = _core.MOVED_NONE
        for address in sorted(self._channels):
            here = address == target
            answer = self._ask(
                *(address, _core.MOVE_REVIVE, shard, name),
                "" if here else target,
            )
            if here:
                state = answer["state"]
                if state == _core.MOVED_FAILED:
                    raise Unavailable(
                        f"shard {shard} does not begin at {target}: "
                        f"{answer['text']}"
                    )
        return int(state)

    def _places(self, tell: Callable[[str], None]) -> dict[str, list[int]]:
        """Those that the servers have."""
        found = self._last = self._settled(tell)
        counts = {answer["shards"] for answer in found.values()}
        if len(counts) != 1:
            raise SchemaMismatch(
                "the servers are of jobs with different numbers of shards: "
                + ", ".join(f"{a}: {m['shards']}" for a, m in found.items())
            )
        (self.shards,) = counts
        places = {address: m["here"] for address, m in found.items()}
        counted = Counter(s for some in places.values() for s in some)
        twice = sorted(shard for shard, n in counted.items() if n > 1)
        if twice:
            raise SchemaMismatch(
                f"two servers have the shards {twice}: one of them was "
                "started again with shards that it had given away. Start it "
                "with those that only it has. Or two addresses are of one "
                "server"
            )
        return places

    def look(self) -> dict[str, Answer | PersiaError]:
        """What each server answers now, by its address. It waits for no
        move, and for no server that is away."""

        def one(address: str) -> Answer | PersiaError:
            try:
                found = self._channels[address].move(
                    *(_core.MOVE_STATUS, self._namespace, 0, 0, 0, "", "")
                )
            except PersiaError as error:
                return error
            fields = [f.name for f in dataclasses.fields(Answer)]
            return Answer(**{name: found[name] for name in fields})

        with ThreadPoolExecutor(min(len(self._channels), 32)) as pool:
            found = dict(
                zip(self._channels, pool.map(one, self._channels), strict=True)
            )
        for answer in found.values():
            if isinstance(answer, Answer):
                self.shards = answer.shards
        return found

    def settle(self, found: Mapping[str, Answer | PersiaError]) -> None:
        """Servers learn where shards are, and of moves that are done: what
        began those may be dead.

        Args:
            found: by :meth:`look`.
        """
        known = {a: m for a, m in found.items() if isinstance(m, Answer)}
        if len(known) < len(found):
            return  # later, when all can learn
        if not self._all_told:
            self.tell({a: m.here for a, m in known.items()})
        self._all_told = True
        places = {s: a for a, m in known.items() for s in m.here}
        for source, m in known.items():
            target = places.get(m.shard, source)
            if (
                m.state == _core.MOVED_DONE
                and m.id not in self._told
                and target != source
            ):
                self._placed(m.shard, m.id, source, target)
                self._told.add(m.id)

    def begin(self, move: Move, name: int | None = None) -> None:
        """Begins a move, which ends by itself.

        Args:
            move: of a shard of the servers that answered last.
            name: its number; None: a new one.

        Raises:
            Unavailable: another one moves a shard of that server.
        """
        self._ask(
            *(move.source, _core.MOVE_BEGIN, move.shard, name or _name()),
            move.target,
        )

    def _placed(self, shard: int, name: int, source: str, target: str) -> None:
        """The servers that took no part in a move learn of it."""
        for address in self._channels:
            if address not in (source, target):
                self._ask(address, _core.MOVE_PLACE, shard, name, target)

    def tell(self, places: Mapping[str, Sequence[int]]) -> None:
        """Tells each server where the shards of the others are."""
        for address in self._channels:
            for other, shards in places.items():
                for shard in shards if other != address else ():
                    self._ask(address, _core.MOVE_PLACE, shard, target=other)

    def run(
        self,
        moves: Sequence[Move],
        show: Callable[[Progress], None] = lambda progress: None,
        at_once: int | None = None,
    ) -> None:
        """Moves shards. A server is in one move at a time; moves of different
        servers are made side by side. An interrupt gives up those that have
        begun, whose shards stay where they were.

        Args:
            moves: of :func:`plan`.
            show: is called again and again.
            at_once: so many moves side by side at most; None: no limit.

        Raises:
            Unavailable: another one moves a shard of a server, or has moved
                one meanwhile; or a move failed: the shard is where it was.
                Those beside it have ended.
        """
        places = self.places()
        for move in moves:
            if move.shard not in places[move.source]:
                self._raise_not_alone(move.source, self._last[move.source])
        self.tell(places)
        numbers = {move: number for number, move in enumerate(moves, 1)}
        waiting, running = list(moves), list[_Run]()
        failed: list[PersiaError] = []
        try:
            while running or (waiting and not failed):
                now = [one.progress.move for one in running]
                for move in [] if failed else may_begin(waiting, now, at_once):
                    waiting.remove(move)
                    progress = Progress(
                        move, numbers[move], len(moves), "", 0, 0.0
                    )
                    running.append(_Run(progress, show, _name()))
                for one in list(running):
                    try:
                        over = self._step(one)
                    except PersiaError as error:
                        self._give_up(one)
                        failed.append(error)
                        over = True
                    if over:
                        running.remove(one)
                if running:
                    time.sleep(_ASK)
        except BaseException:
            for one in running:
                self._give_up(one)
            raise
        if failed:
            raise failed[0]
        before = self._last
        self.places()
        for address, answer in self._last.items():
            if answer["id"] not in (0, before[address]["id"], *self._own):
                self._raise_not_alone(address, answer)

    @staticmethod
    def _raise_not_alone(address: str, answer: dict[str, Any]) -> NoReturn:
        raise Unavailable(
            f"{answer['by'] or 'another command'} moves shards of {address} "
            "at the same time; look where they are, and try again"
        )

    def _step(self, one: _Run) -> bool:
        """Begins a move, or looks how far it is; whether it is over."""
        move, progress = one.progress.move, one.progress
        if not one.began:
            one.began = time.monotonic()
            self._own.add(one.name)
            self.begin(move, one.name)
        answer = self._ask(move.source, _core.MOVE_STATUS)
        if answer["id"] != one.name:
            raise Unavailable(
                f"{move.source} does not know of the move of shard "
                f"{move.shard}: it was started again"
            )
        progress.text, progress.rows = answer["text"], answer["rows"]
        progress.seconds = time.monotonic() - one.began
        one.show(progress)
        if answer["state"] == _core.MOVED_FAILED:
            raise Unavailable(
                f"shard {move.shard} stays at {move.source}: {answer['text']}"
            )
        if answer["state"] != _core.MOVED_DONE:
            return False
        self._placed(move.shard, one.name, move.source, move.target)
        return True

    def _cancel(self, source: str, shard: int, name: int) -> str:
        """Cancels a move, and waits a while for its end; what became of
        it."""
        until = time.monotonic() + self._timeout
        verb = _core.MOVE_CANCEL
        with contextlib.suppress(PersiaError):
            while True:
                answer = self._ask(source, verb, shard, name)
                if answer["id"] != name:
                    return ""
                if (
                    answer["state"] != _core.MOVED_RUNNING
                    or time.monotonic() > until
                ):
                    return str(answer["text"])
                verb = _core.MOVE_STATUS
                time.sleep(_ASK)
        return ""

    def _give_up(self, one: _Run) -> None:
        move = one.progress.move
        if text := self._cancel(move.source, move.shard, one.name):
            one.progress.text = text
            one.show(one.progress)


def _lost(places: Mapping[str, Sequence[int]], shards: int) -> list[int]:
    """Those that no server has."""
    here = {shard for some in places.values() for shard in some}
    return [shard for shard in range(shards) if shard not in here]


def _name() -> int:
    """A number of a move, above those of earlier ones."""
    return time.time_ns() // 1_000_000 << 20 | secrets.randbits(20)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "uid " + str(os.getuid())
