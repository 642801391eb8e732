"""Shards that go from one server to another while clients use them.

The server that has a shard does the work, in a thread: it holds the shard, so
that nothing changes it, writes its rows beside the checkpoints, lets the other
server read them, and takes the shard out: from then on it says to whom asks
for it where it is. Only then the other one answers. Until it was taken out the
move can be given up, and nothing has happened.

``persia.proto`` has the messages (``Move``), and ``docs/dev/elastic.md`` the
reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from persia import _core, errors
from persia.base.logs import say
from persia.checkpoint.files import LocalRoot, write_file
from persia.checkpoint.snapshot import Snapshot, save_rows
from persia.distributed.security import Security
from persia.distributed.server import Arrival, ServeConfig, Server

if TYPE_CHECKING:
    from persia.distributed.shards import Shards

_IDLE = 0.02  # seconds between looks for calls
_ASK = 0.1  # seconds between questions to the other server
_ANSWER = 5.0  # seconds that it has for each
_SILENT = 30.0  # seconds without an answer after which a move is given up
_FORGET = 60.0  # seconds after which the other server forgets one
_BEGUN = 10.0  # seconds that updates which have begun have to end
_TEXT = 500  # of an error in an answer
_BESIDE = "steps.json"
_FREE, _CLOSING, _HELD = 0, 1, 2  # see Server.hold()


def towards(config: ServeConfig) -> Security:
    """How a server speaks with the others: as a client, by the variables of
    the environment, and with its own tokens where these name none."""
    own = config.security(config.admin_token_file)
    security = Security.from_environment()
    return dataclasses.replace(
        security,
        token=security.token or own.token,
        admin_token=security.admin_token or own.admin_token,
    )


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


def write(server: Server, root: LocalRoot) -> int:
    """Writes a shard that nothing changes; how many rows."""
    hello = server.hello()
    beside = {"boot": hello["boot"], "steps": server.core.steps()}
    text = json.dumps(beside).encode()
    saved = save_rows(root, partial(server.write_rows, root.path.name))
    write_file(root.path / _BESIDE, lambda file: file.write(text))
    return sum(file.rows for file in saved.files)


class _Cancelled(errors.PersiaError):
    """The move was given up."""


@dataclasses.dataclass
class _Leaving:
    """A shard of this server that goes to another one."""

    request: dict[str, Any]
    state: int = _core.MOVED_RUNNING
    text: str = "begins"
    rows: int = 0
    cancelled: bool = False
    out: bool = False  # it was taken out


@dataclasses.dataclass
class _Arriving:
    """A shard that is read here."""

    request: dict[str, Any]
    asked: float
    state: int = _core.MOVED_RUNNING
    text: str = "reads the rows"
    rows: int = 0
    server: Server | None = None


class Moves:
    """The moves of a process; its thread takes the calls of ``Move``.

    Args:
        shards: of the process, which listens.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._config = shards.config
        self._core = shards.core
        self._over = threading.Event()
        self._leaving: _Leaving | None = None
        self._arriving: dict[int, _Arriving] = {}
        self._arrived: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._run)

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
                found = self._core.move_next()
            except errors.Closed:
                return
            if found is None:
                self._forget()
                self._over.wait(_IDLE)
            else:
                self._answer(*found)

    def _answer(self, call: object, request: dict[str, Any]) -> None:
        error = text = ""
        state, shard, number, rows, by = _core.MOVED_NONE, 0, 0, 0, ""
        try:
            of = self._take(request)
            if of is not None:
                state, text, rows = of.state, of.text, of.rows
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

    def _take(self, request: dict[str, Any]) -> _Leaving | _Arriving | None:
        """Does what a call asks for; the move that its answer is about."""
        self._check(request)
        verb, number = request["verb"], request["id"]
        if verb == _core.MOVE_BEGIN:
            return self._begin(request)
        if verb == _core.MOVE_CANCEL:
            return self._cancel(number)
        if verb == _core.MOVE_PLACE:
            self._core.place(request["shard"], request["address"])
        elif verb == _core.MOVE_PREPARE:
            return self._prepare(request)
        elif verb == _core.MOVE_COMMIT:
            self.commit(number)
        elif verb == _core.MOVE_ABORT:
            self._drop(number)
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
        if self._config.durable != "off":
            raise errors.InvalidArgument(
                "shards with a log do not move yet: start the servers with "
                "`durable=off`, or stop the job and start it with another "
                "number of servers"
            )

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
        if self._config.checkpoints is None:
            raise errors.InvalidArgument(
                "rows travel through the folder of checkpoints: start all "
                "servers with the same `checkpoints`"
            )
        if request["shard"] not in self._shards.here():
            raise errors.InvalidArgument(
                f"shard {request['shard']} is not at this server"
            )
        self._leaving = _Leaving(request)
        self._start(partial(self._leave, self._leaving))
        return self._leaving

    def _cancel(self, number: int) -> _Leaving | None:
        found = self._leaving
        if found is not None and found.request["id"] == number:
            found.cancelled = True
        return found

    def _leave(self, one: _Leaving) -> None:
        shard, to = one.request["shard"], one.request["address"]
        server = self._shards.server(shard)
        try:
            self._move(one, server)
        except Exception as error:
            one.text = f"{type(error).__name__}: {error}"
            one.state = _core.MOVED_FAILED
            say(f"shard {shard} stays here: {one.text}")
            return
        one.text = f"shard {shard} is at {to}"
        one.state = _core.MOVED_DONE
        say(f"shard {shard} has moved to {to}: {one.rows:,} rows")

    def _move(self, one: _Leaving, server: Server) -> None:
        assert self._config.checkpoints is not None
        name = f"move-{one.request['id']:016x}"
        root = LocalRoot(self._config.checkpoints / name)
        other = channel(one.request["address"], towards(self._config), _ANSWER)
        ask = partial(self._ask, one, other, name)
        with contextlib.closing(other), contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, root.path, ignore_errors=True)
            try:
                one.text = "asks the other server"
                self._check_other(one, ask(_core.MOVE_STATUS))
                one.text = "holds updates"
                self._hold(one, server)
                one.text = "writes the rows"
                one.rows = write(server, root)
                one.text = "the other server reads the rows"
                self._read(one, ask)
            except BaseException:
                with contextlib.suppress(errors.PersiaError):
                    other.move(*self._words(one, _core.MOVE_ABORT, name))
                server.core.hold(_FREE)
                raise
            one.text = "the other server takes the shard"
            self._hand_over(one, server, ask)
        self._shards.forget(server)
        server.close()

    def _words(self, one: _Leaving, verb: int, root: str) -> tuple[Any, ...]:
        request = one.request
        return (
            *(verb, self._config.namespace),
            *(request["shard"], self._shards.count, request["id"]),
            *(request["address"], request["by"], root),
        )

    def _ask(
        self, one: _Leaving, other: _core.Channel, root: str, verb: int
    ) -> dict[str, Any]:
        """Asks until there is an answer."""
        until = time.monotonic() + _SILENT
        while True:
            self._check_cancelled(one)
            try:
                return other.move(*self._words(one, verb, root))
            except (errors.Unavailable, errors.DeadlineExceeded):
                # One that was taken out may be at the other server, as long
                # as that one lives.
                if (
                    is_gone(one.request["address"])
                    if one.out
                    else time.monotonic() > until
                ):
                    raise
            self._over.wait(_ASK)

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

    def _hold(self, one: _Leaving, server: Server) -> None:
        """From now on nothing changes."""
        server.core.hold(_CLOSING)
        until = time.monotonic() + _BEGUN
        while server.core.begun():
            self._check_cancelled(one)
            if time.monotonic() > until:
                raise errors.Unavailable(
                    "updates of several batches have begun in the shard and "
                    f"did not end within {_BEGUN:.0f} s; try again"
                )
            self._over.wait(_IDLE)
        server.core.hold(_HELD)

    def _read(
        self, one: _Leaving, ask: Callable[[int], dict[str, Any]]
    ) -> None:
        while True:
            answer = ask(_core.MOVE_PREPARE)
            if answer["state"] == _core.MOVED_DONE:
                return
            if answer["state"] == _core.MOVED_FAILED:
                raise errors.Unavailable(
                    f"{one.request['address']}: {answer['text']}"
                )
            self._over.wait(_ASK)

    def _hand_over(
        self,
        one: _Leaving,
        server: Server,
        ask: Callable[[int], dict[str, Any]],
    ) -> None:
        """Takes the shard out; the other server is to take it."""
        try:
            self._check_cancelled(one)
        except _Cancelled:
            server.core.hold(_FREE)
            raise
        self._core.remove(server.core, one.request["address"])
        one.out = True
        try:
            ask(_core.MOVE_COMMIT)
        except errors.PersiaError:
            # It does not have it, and never will; or an operator says so.
            server.core.reborn()
            server.core.hold(_FREE)
            self._core.add(server.core)
            raise

    # ---- a shard arrives

    def _prepare(self, request: dict[str, Any]) -> _Arriving:
        found = self._arriving.get(request["id"])
        if found is None:
            if request["shard"] in self._shards.here():
                raise errors.InvalidArgument(
                    f"shard {request['shard']} is at this server already"
                )
            found = _Arriving(request, time.monotonic())
            self._arriving[request["id"]] = found
            self._start(partial(self._arrive, found))
        found.asked = time.monotonic()
        return found

    def _arrive(self, one: _Arriving) -> None:
        try:
            one.server, one.rows = self._load(one.request)
        except Exception as error:
            one.text = f"{type(error).__name__}: {error}"
            one.state = _core.MOVED_FAILED
        else:
            one.state = _core.MOVED_DONE

    def _load(self, request: dict[str, Any]) -> tuple[Server, int]:
        if self._config.checkpoints is None:
            raise errors.InvalidArgument(
                "rows travel through the folder of checkpoints: start the "
                "server with the `checkpoints` of the others"
            )
        root = LocalRoot(self._config.checkpoints / request["root"])
        saved = Snapshot.of_root(root)
        if saved is None:
            raise errors.StorageError(
                f"{root.path} is not there: `checkpoints` is not the folder "
                "of the other server"
            )
        folder, rows = saved
        beside = json.loads((root.path / _BESIDE).read_bytes())
        server = Server(
            self._config,
            (request["shard"], request["shards"]),
            beside=self._core,
            arrives=Arrival(beside["boot"], rows.lineage),
        )
        try:
            read = server.read_rows(root.path.name, folder.name, rows)
            server.core.set_steps(beside["steps"])
        except BaseException:
            server.close()
            raise
        return server, read

    def commit(self, number: int) -> None:
        """Answers for a shard that has been read."""
        if number in self._arrived:
            return  # the answer to the first call was lost
        found = self._arriving.get(number)
        if found is None or found.server is None:
            raise errors.InvalidArgument(
                f"no move {number:016x} is prepared: the server was started "
                "again, or has forgotten it"
            )
        self._core.add(found.server.core)
        self._shards.take(found.server)
        self._arrived.add(number)
        del self._arriving[number]
        say(f"shard {found.request['shard']} is here: {found.rows:,} rows")

    def _drop(self, number: int) -> None:
        found = self._arriving.pop(number, None)
        if found is not None:
            self._start(partial(self._end, found))

    def _end(self, one: _Arriving) -> None:
        while one.state == _core.MOVED_RUNNING:  # it reads
            time.sleep(_IDLE)
        if one.server is not None:
            one.server.close()

    def _forget(self) -> None:
        """Those that are not asked about any more."""
        late = time.monotonic() - _FORGET
        for number, one in list(self._arriving.items()):
            if one.asked < late:
                self._drop(number)
