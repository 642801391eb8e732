"""Shards that go from one server to another while clients use them.

The server that has a shard does the work, in a thread: it sends the rows to
the other server while updates continue, and again those that change meanwhile.
When few are left it holds the shard, so that nothing changes it, sends the
rest, and takes the shard out: from then on it says to whom asks for it where
it is. Only then the other one answers. Until it was taken out the move can be
given up, and nothing has happened.

With logs the shard is out once the disk of its server says so, and the other
one has it once its own does (:mod:`persia.distributed.places`). Either may be
killed at any time: what was begun continues when it starts again.

``persia.proto`` has the messages (``Move``), and ``docs/dev/elastic.md`` the
reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia import _core, errors
from persia.base.counts import counted
from persia.base.logs import audit, say
from persia.distributed.places import Gone, Prepared
from persia.distributed.rounds import Rounds
from persia.distributed.security import Security
from persia.distributed.server import Arrival, ServeConfig, Server

if TYPE_CHECKING:
    from persia.distributed.shards import Shards

_IDLE = 0.2  # seconds between looks for moves to forget
_SOON = 0.01  # seconds before the second attempt
_ASK = 0.1  # seconds between questions to the other server, at most
_ANSWER = 5.0  # seconds that it has for each
_SILENT = 30.0  # seconds without an answer after which a move is given up
_FORGET = 60.0  # seconds after which the other server forgets one
_BEGUN = 10.0  # seconds that updates which have begun have to end
_LOOK = 0.002  # seconds between looks whether they have
_TEXT = 500  # of an error in an answer
_LEVELS = ("off", "process", "disk")  # each keeps what those before keep
_FREE, _CLOSING, _HELD = 0, 1, 2  # see Server.hold()


def towards(config: ServeConfig) -> Security:
    """How a server speaks with the others: as a client, by the variables of
    the environment, and with its own tokens where these name none."""
    own = config.security(config.admin_token_file)
    return Security.from_environment().or_of(own)


def channel(address: str, security: Security, timeout: float) -> _core.Channel:
    """The way to a server."""
    return _core.Channel(address, security.arguments(), timeout)


def is_gone(address: str) -> bool:
    """Whether there is surely no process at an address: its machine answers
    that nothing listens."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False


def _request(shard: int, number: int) -> dict[str, Any]:
    """What is left of one that an earlier life of the server was sent."""
    verb = _core.MOVE_COMMIT
    return {"shard": shard, "id": number, "by": "a command", "verb": verb}


def _unknown(number: int) -> str:
    return (
        f"no move {number:016x} is prepared: the server was started again, or "
        "has forgotten it"
    )


class _Cancelled(errors.PersiaError):
    """The move was given up."""


class _Stopping(errors.PersiaError):
    """The server ends; what is on its disk says how the move continues."""


def _why(error: Exception) -> str:
    """Why a move failed: its error, by its name where users know it."""
    if isinstance(error, _Cancelled):
        return str(error)
    return f"{type(error).__name__}: {error}"


@dataclasses.dataclass
class _Leaving:
    """A shard of this server that goes to another one."""

    request: dict[str, Any]
    state: int = _core.MOVED_RUNNING
    text: str = "begins"
    rows: int = 0
    parts: int = 0  # that were answered
    held: float = 0.0  # when it began to take no updates
    cancelled: bool = False


@dataclasses.dataclass
class _Arriving:
    """A shard that arrives here."""

    request: dict[str, Any]
    asked: float
    state: int = _core.MOVED_RUNNING
    text: str = "takes the rows"
    parts: int = 0  # that were taken
    server: Server | None = None  # None: its log is being read


def _is_being_read(one: _Arriving) -> bool:
    return one.server is None and one.state != _core.MOVED_FAILED


class Moves:
    """The moves of a process; its thread takes the calls of ``Move``.

    Args:
        shards: of the process, which listens.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._places = shards.places
        self._config = shards.config
        self._core = shards.core
        self._over = threading.Event()
        self._leaving: _Leaving | None = None
        self._arriving: dict[int, _Arriving] = {}
        self._arrived: set[int] = set()
        self._dropped: set[int] = set()  # their parts may still arrive
        self._threads: list[threading.Thread] = []
        self._begin_again()
        self._start(self._run)

    def _begin_again(self) -> None:
        """Continues what an earlier life of the server has begun."""
        places = self._places
        if places is None:
            return
        for shard, gone in places.gone().items():
            self._core.place(shard, gone.address, gone.move)
            if gone.folder:
                self._leaving = _Leaving(
                    _request(shard, gone.move) | {"address": gone.address}
                )
                self._start(partial(self._leave_again, self._leaving, gone))
        for number, one in places.prepared().items():
            found = _Arriving(_request(one.shard, number), time.monotonic())
            self._arriving[number] = found
            self._start(partial(self._arrive_again, found, one))

    def _start(self, body: Callable[[], None]) -> None:
        self._threads = [t for t in self._threads if t.is_alive()]
        thread = threading.Thread(target=body, name="persia-move", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Gives up what can be given up."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for one in self._arriving.values():
            if one.server is not None:
                one.server.close()

    # ---- calls

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                found = self._core.move_next(_IDLE)
            except errors.Closed:
                return
            if found is None:
                self._forget()
            else:
                self._answer(*found)

    def _answer(self, call: object, request: dict[str, Any]) -> None:
        error = text = ""
        state, shard, number, rows, by = _core.MOVED_NONE, 0, 0, 0, ""
        try:
            of = self._take(call, request)
            if of is not None:
                state, text = of.state, of.text
                rows = of.rows if isinstance(of, _Leaving) else 0
                shard, number = of.request["shard"], of.request["id"]
                by = of.request["by"]
        except errors.PersiaError as raised:
            error, text = raised.code, str(raised)
        except Exception as raised:
            error, text = errors.InternalError.code, repr(raised)
        self._core.move_give(
            call,
            error,
            text[:_TEXT],
            state,
            shard,
            number,
            rows,
            by,
            self._shards.count,
            self._shards.here(),
        )

    def _take(
        self, call: object, request: dict[str, Any]
    ) -> _Leaving | _Arriving | None:
        """Does what a call asks for; the move that its answer is about."""
        self._check(request)
        verb, number = request["verb"], request["id"]
        if number in self._arriving:
            self._arriving[number].asked = time.monotonic()
        if verb == _core.MOVE_BEGIN:
            return self._begin(request)
        if verb == _core.MOVE_CANCEL:
            return self._cancel(number)
        if verb == _core.MOVE_PLACE:
            self._place(request["shard"], number, request["address"])
        elif verb == _core.MOVE_PREPARE:
            return self._prepare(call, request)
        elif verb == _core.MOVE_COMMIT:
            self.commit(number)
        elif verb == _core.MOVE_ABORT:
            self._drop(number)
        elif verb == _core.MOVE_REVIVE:
            return self._revive(request)
        return self._leaving

    def _check(self, request: dict[str, Any]) -> None:
        namespace = self._config.namespace
        if request["namespace"] != namespace:
            raise errors.SchemaMismatch(
                f"the move is of namespace '{request['namespace']}', the "
                f"server holds namespace '{namespace}'"
            )
        if request["verb"] in (_core.MOVE_STATUS, _core.MOVE_CANCEL):
            return
        if request["shards"] != self._shards.count:
            raise errors.SchemaMismatch(
                f"the move is of a job of {request['shards']} shards, the "
                f"server of one of {self._shards.count}"
            )

    def _place(self, shard: int, number: int, address: str) -> None:
        self._core.place(shard, address, number)
        if self._places is not None:
            self._places.place(shard, number, address)

    # ---- the shard leaves

    def _begin(self, request: dict[str, Any]) -> _Leaving:
        old = self._leaving
        if old is not None and old.request["id"] == request["id"]:
            return old  # the answer to the first call was lost
        if old is not None and old.state == _core.MOVED_RUNNING:
            raise errors.Unavailable(
                f"{old.request['by']} moves shard {old.request['shard']} of "
                f"this server to {old.request['address']}; wait for its end"
            )
        if request["shard"] not in self._shards.here():
            raise errors.InvalidArgument(
                f"shard {request['shard']} is not at this server"
            )
        if not self._shards.is_ready:
            raise errors.Unavailable("the server recovers")
        self._leaving = _Leaving(request)
        self._start(partial(self._leave, self._leaving))
        return self._leaving

    def _cancel(self, number: int) -> _Leaving | None:
        found = self._leaving
        if found is not None and found.request["id"] == number:
            found.cancelled = True
        return found

    def _leave(self, one: _Leaving) -> None:
        server = self._shards.server(one.request["shard"])
        with self._ending(one):
            self._move(one, server)
            self._shards.forget(server)
            server.close()
            self._left(one)

    def _leave_again(self, one: _Leaving, gone: Gone) -> None:
        """It was taken out in an earlier life."""
        shard, to = one.request["shard"], gone.address
        one.text = f"{to} takes the shard"
        say(f"shard {shard} was on its way to {to} when the server ended")
        with self._ending(one):
            other = channel(to, towards(self._config), _ANSWER)
            try:
                with contextlib.closing(other):
                    self._commit(one, other)
            except _Stopping:
                raise
            except errors.PersiaError:
                server = self._again(shard, self._shards.folder(gone))
                self._back(server, recovered=True)
                raise
            self._left(one)

    @contextlib.contextmanager
    def _ending(self, one: _Leaving) -> Iterator[None]:
        """What becomes of a move is what the context ends with."""
        shard, to = one.request["shard"], one.request["address"]
        try:
            yield
        except _Stopping:
            return
        except Exception as error:
            one.text = _why(error)
            one.state = _core.MOVED_FAILED
            say(f"shard {shard} stays here: {one.text}")
            return
        one.text = f"shard {shard} is at {to}"
        if one.held:
            one.text += f", it took no updates for {one.held:.3f} s"
        one.state = _core.MOVED_DONE
        say(f"{one.text}; {counted(one.rows, 'row')}")
        audit(
            "moved",
            shard=shard,
            to=to,
            by=one.request["by"],
            rows=one.rows,
        )

    def _left(self, one: _Leaving) -> None:
        """The other server has it."""
        if self._places is not None:
            self._keep_trying(partial(self._places.left, one.request["shard"]))

    def _keep_trying(self, write: Callable[[], None]) -> None:
        """What must get onto the disk."""
        said = False
        while True:
            try:
                return write()
            except errors.StorageError as error:
                if not said:
                    say(f"a move cannot continue: {error}", "warning")
                said = True
            if self._over.wait(_ASK):
                raise _Stopping("the server is stopping")

    def _move(self, one: _Leaving, server: Server) -> None:
        other = channel(one.request["address"], towards(self._config), _ANSWER)
        with contextlib.closing(other), self._copying(server):
            try:
                one.text = "asks the other server"
                words = self._words(one, _core.MOVE_STATUS)
                ask = partial(other.move, *words)
                self._check_other(one, self._until_answered(one, ask))
                began = self._send_all(one, server, other)
                self._check_cancelled(one)
                self._take_out(one, server)
            except BaseException:
                with contextlib.suppress(errors.PersiaError):
                    other.move(*self._words(one, _core.MOVE_ABORT))
                server.core.hold(_FREE)
                raise
            one.text = "the other server takes the shard"
            try:
                self._commit(one, other)
            except _Stopping:
                raise
            except errors.PersiaError:
                self._back(server)
                raise
        one.held = time.monotonic() - began

    @contextlib.contextmanager
    def _copying(self, server: Server) -> Iterator[None]:
        server.core.copy_begin()
        try:
            yield
        finally:
            server.core.copy_end()

    def _send_all(
        self, one: _Leaving, server: Server, other: _core.Channel
    ) -> float:
        """Sends the whole shard, which is held in the end; when that
        began."""
        hello = server.hello()
        level = _LEVELS.index(server.config.durable)
        shard = (hello["boot"], hello["lineage"], level)

        def send() -> dict[str, Any]:
            words = self._words(one, _core.MOVE_PREPARE)
            words += (*shard, one.parts, server.core)
            return other.move(*words)

        while True:
            self._await_save(one, server, other)
            one.text = "copies the rows"
            self._copy(one, server, send)
            one.rows = server.rows()
            one.text = "holds updates"
            began = time.monotonic()
            if self._closes(server):
                break
        self._hold(one, server)
        one.text = "sends the last rows"
        self._round(one, server, send, last=True)
        return began

    def _copy(
        self, one: _Leaving, server: Server, send: Callable[[], dict[str, Any]]
    ) -> None:
        """Sends rows until few are left, or no fewer than a round before."""
        rounds = Rounds()
        while True:
            rows, busy = self._round(one, server, send, rounds.share)
            left = server.core.copy_left()
            one.text = f"copies rows that changed meanwhile: {left:,}"
            if rounds.is_last(rows, busy, left):
                return

    def _round(
        self,
        one: _Leaving,
        server: Server,
        send: Callable[[], dict[str, Any]],
        share: float = 1.0,
        last: bool = False,
    ) -> tuple[int, float]:
        """Sends the parts of a round: how many rows, and for how long."""
        rows, busy = 0, 0.0
        while True:
            began = time.monotonic()
            some = server.core.copy_next(last)
            if some is None:
                return rows, busy
            answer = self._until_answered(one, send)
            if answer["state"] == _core.MOVED_FAILED:
                raise errors.Unavailable(
                    f"{one.request['address']}: {answer['text']}"
                )
            one.parts += 1
            rows += some
            if not last:
                one.rows += some
            took = time.monotonic() - began
            busy += took
            self._over.wait(took * (1.0 / share - 1.0))

    def _take_out(self, one: _Leaving, server: Server) -> None:
        """The decision."""
        shard, number = one.request["shard"], one.request["id"]
        if self._places is not None:
            self._places.leave(shard, number, one.request["address"])
        self._core.remove(server.core, one.request["address"], number)

    def _commit(self, one: _Leaving, other: _core.Channel) -> None:
        """Asks the other server to have the shard, until it does.

        Raises:
            PersiaError: it never will.
        """
        while True:
            try:
                other.move(*self._words(one, _core.MOVE_COMMIT))
                return
            except errors.InvalidArgument:
                raise
            except errors.PersiaError as error:
                one.text = f"waits for the other server: {error}"
                # It may have the shard, as long as it lives; its log outlives
                # it. No cancel changes that.
                if self._places is None and (
                    isinstance(error, errors.SchemaMismatch)
                    or is_gone(one.request["address"])
                ):
                    raise
            if self._over.wait(_ASK):
                raise _Stopping("the server is stopping")

    def _again(self, shard: int, folder: Path) -> Server:
        """One with the rows and updates of a log."""
        server = Server(
            self._config,
            (shard, self._shards.count),
            beside=self._core,
            log=folder,
        )
        try:
            server.recover()
        except BaseException:
            server.close()
            raise
        return server

    def _back(self, server: Server, recovered: bool = False) -> None:
        """Answers for a shard that was taken out."""
        if self._places is not None:
            self._keep_trying(partial(self._places.back, server.shard))
        if recovered:
            server.ready()
            self._core.add(server.core)
            self._shards.take(server)
            return
        server.core.reborn()
        server.core.hold(_FREE)
        self._core.add(server.core)

    def _words(self, one: _Leaving, verb: int) -> tuple[Any, ...]:
        request = one.request
        return (
            *(verb, self._config.namespace),
            *(request["shard"], self._shards.count, request["id"]),
            *(request["address"], request["by"]),
        )

    def _until_answered(
        self, one: _Leaving, ask: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        pause = _SOON
        until = time.monotonic() + _SILENT
        while True:
            self._check_cancelled(one)
            try:
                return ask()
            except (errors.Unavailable, errors.DeadlineExceeded):
                if time.monotonic() > until:
                    raise
            self._over.wait(pause)
            pause = min(2 * pause, _ASK)

    def _check_cancelled(self, one: _Leaving) -> None:
        if one.cancelled or self._over.is_set():
            why = "cancelled" if one.cancelled else "the server is stopping"
            raise _Cancelled(f"the move was given up: {why}")

    def _check_other(self, one: _Leaving, answer: dict[str, Any]) -> None:
        shard, shards = one.request["shard"], answer["shards"]
        if shards != self._shards.count:
            raise errors.SchemaMismatch(
                f"{one.request['address']} is a server of a job of {shards} "
                f"shards, this is one of {self._shards.count}"
            )
        if shard in answer["here"]:
            raise errors.InvalidArgument(
                f"{one.request['address']} has shard {shard} already, or is "
                "this server"
            )

    def _await_save(
        self, one: _Leaving, server: Server, other: _core.Channel
    ) -> None:
        """A checkpoint that has begun finds the shard here until its end."""
        ask = partial(other.move, *self._words(one, _core.MOVE_STATUS))
        while server.is_saved():
            one.text = "waits for a checkpoint that is being written"
            self._until_answered(one, ask)  # which does not forget the move
            self._over.wait(_ASK)

    def _closes(self, server: Server) -> bool:
        """Whether no checkpoint has begun meanwhile."""
        try:
            server.core.hold(_CLOSING)
        except errors.Unavailable:
            if server.is_saved():
                return False
            raise
        return True

    def _hold(self, one: _Leaving, server: Server) -> None:
        """From now on nothing changes."""
        until = time.monotonic() + _BEGUN
        while server.core.begun():
            self._check_cancelled(one)
            if time.monotonic() > until:
                raise errors.Unavailable(
                    "updates of several batches have begun in the shard and "
                    f"did not end within {_BEGUN:.0f} s; try again"
                )
            self._over.wait(_LOOK)
        server.core.hold(_HELD)

    # ---- a shard arrives

    def _prepare(self, call: object, request: dict[str, Any]) -> _Arriving:
        number, part = request["id"], request["part"]
        found = self._arriving.get(number)
        if found is None:
            if part or number in self._dropped:
                raise errors.InvalidArgument(_unknown(number))
            self._check_arrives(number, request["shard"])
            found = _Arriving(
                request, time.monotonic(), server=self._empty(request)
            )
            self._arriving[number] = found
        found.asked = time.monotonic()
        if found.state == _core.MOVED_RUNNING and part == found.parts:
            self._take_part(found, call)
        elif found.state != _core.MOVED_FAILED and part != found.parts - 1:
            raise errors.InvalidArgument(
                f"part {part} of a move arrives, {found.parts} are here"
            )
        return found

    def _revive(self, request: dict[str, Any]) -> _Arriving:
        """A shard that no server has begins as at the start of one. All
        servers are asked, so that it begins at one of them only."""
        number, shard, to = request["id"], request["shard"], request["address"]
        found = self._arriving.get(number)
        if found is None:
            if not self._shards.is_ready:
                raise errors.Unavailable("the server recovers")
            self._check_revives(shard)
            self._check_arrives(number, shard)
            found = _Arriving(request, time.monotonic(), text="reads its rows")
            self._arriving[number] = found
            if to:
                found.text = f"shard {shard} begins at {to}"
                found.state = _core.MOVED_FAILED  # no COMMIT follows here
            else:
                self._start(partial(self._revive_one, found))
        return found

    def _check_revives(self, shard: int) -> None:
        for one in self._arriving.values():
            asked = one.request
            if asked["shard"] == shard and asked["verb"] == _core.MOVE_REVIVE:
                raise errors.Unavailable(
                    f"{asked['by']} lets shard {shard} begin again; wait for "
                    "its end"
                )

    def _revive_one(self, one: _Arriving) -> None:
        try:
            server = self._empty(one.request)
            try:
                if self._config.restore is not None:
                    server.restore()
                if self._places is not None:
                    number, steps = one.request["id"], server.core.steps()
                    self._places.prepare(server.shard, number, steps)
            except BaseException:
                server.close()
                raise
        except Exception as error:
            one.text = _why(error)
            one.state = _core.MOVED_FAILED
        else:
            one.server = server
            one.state = _core.MOVED_DONE

    def _take_part(self, one: _Arriving, call: object) -> None:
        assert one.server is not None
        number = one.request["id"]
        try:
            whole = one.server.core.arrive(call)
            if whole and self._places is not None:
                steps = one.server.core.steps()
                self._places.prepare(one.server.shard, number, steps)
        except Exception as error:
            one.text = _why(error)
            one.state = _core.MOVED_FAILED
        else:
            one.parts += 1
            if whole:
                one.state = _core.MOVED_DONE

    def _empty(self, request: dict[str, Any]) -> Server:
        """A shard without rows, for those that arrive."""
        durable = self._config.durable
        if _LEVELS.index(durable) < request["durable"]:
            raise errors.InvalidArgument(
                "the shard is of a server with "
                f"`durable={_LEVELS[request['durable']]}`, this one has "
                f"`durable={durable}`"
            )
        shard, places = request["shard"], self._places
        server = Server(
            self._config,
            (shard, request["shards"]),
            beside=self._core,
            arrives=Arrival(request["boot"], request["lineage"]),
            log=places.arriving(shard, request["id"]) if places else None,
        )
        try:
            if places is not None:
                server.core.replay(0)
        except BaseException:
            server.close()
            raise
        return server

    def _check_arrives(self, number: int, shard: int) -> None:
        if self._has_arrived(number) or shard in self._shards.here():
            raise errors.InvalidArgument(
                f"shard {shard} is at this server already"
            )
        gone = self._places.gone().get(shard) if self._places else None
        if gone is not None and gone.folder:
            raise errors.Unavailable(f"shard {shard} leaves this server")
        for other, one in list(self._arriving.items()):
            if one.request["shard"] == shard:
                self._drop(other)

    def _has_arrived(self, number: int) -> bool:
        return number in self._arrived or (
            self._places is not None and self._places.has_arrived(number)
        )

    def _arrive_again(self, one: _Arriving, found: Prepared) -> None:
        """It was read in an earlier life."""
        try:
            folder = self._shards.folder(found)
            server = self._again(found.shard, folder)
            server.core.set_steps(found.steps)
        except Exception as error:
            one.text = _why(error)
            one.state = _core.MOVED_FAILED
            say(f"shard {found.shard} cannot arrive: {one.text}", "warning")
        else:
            one.state = _core.MOVED_DONE
            one.server = server

    def commit(self, number: int) -> None:
        """Answers for a shard that has been read."""
        if self._has_arrived(number):
            return  # the answer to the first call was lost
        found = self._arriving.get(number)
        if found is not None and _is_being_read(found):
            found.asked = time.monotonic()
            raise errors.Unavailable(f"the server reads {number:016x}")
        if found is None or found.state != _core.MOVED_DONE:
            self._drop(number)
            raise errors.InvalidArgument(_unknown(number))
        assert found.server is not None
        try:
            if self._places is not None:
                self._places.arrive(number)
        except errors.StorageError as error:
            self._drop(number)
            raise errors.InvalidArgument(f"{error}") from error
        found.server.ready()
        self._core.add(found.server.core)
        self._shards.take(found.server)
        self._arrived.add(number)
        del self._arriving[number]
        rows = found.server.rows()
        shard = found.request["shard"]
        say(f"shard {shard} is here: {counted(rows, 'row')}")

    def _drop(self, number: int) -> None:
        self._dropped.add(number)
        found = self._arriving.pop(number, None)
        if found is not None:
            self._start(partial(self._end, found))

    def _end(self, one: _Arriving) -> None:
        while _is_being_read(one):
            time.sleep(_IDLE)
        if one.server is not None:
            one.server.close()
        if self._places is not None:
            with contextlib.suppress(errors.StorageError):
                self._places.drop(one.request["shard"], one.request["id"])

    def _forget(self) -> None:
        """Those that are not asked about any more."""
        late = time.monotonic() - _FORGET
        for number, one in list(self._arriving.items()):
            if one.asked < late:
                self._drop(number)
