"""Shards that go from one server to another while clients use them.

The server that has a shard does the work, in a thread: it holds the shard, so
that nothing changes it, writes its rows beside the checkpoints, lets the other
server read them, and takes the shard out: from then on it says to whom asks
for it where it is. Only then the other one answers. Until it was taken out the
move can be given up, and nothing has happened.

With logs the shard is out once the disk of its server says so, and the other
one has it once its own does (:mod:`persia.distributed.places`). Either may be
killed at any time: what was begun continues when it starts again.

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia import _core, errors
from persia.base.logs import say
from persia.checkpoint.files import LocalRoot, write_file
from persia.checkpoint.snapshot import Snapshot, save_rows
from persia.distributed.places import Gone, Prepared
from persia.distributed.security import Security
from persia.distributed.server import Arrival, ServeConfig, Server

if TYPE_CHECKING:
    from persia.distributed.shards import Shards

_IDLE = 0.02  # seconds between looks for calls
_SOON = 0.01  # seconds to the first question whether the rows are read
_ASK = 0.1  # seconds between questions to the other server, at most
_ANSWER = 5.0  # seconds that it has for each
_SILENT = 30.0  # seconds without an answer after which a move is given up
_FORGET = 60.0  # seconds after which the other server forgets one
_BEGUN = 10.0  # seconds that updates which have begun have to end
_TEXT = 500  # of an error in an answer
_BESIDE = "steps.json"
_LEVELS = ("off", "process", "disk")  # each keeps what those before keep
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
    beside = {
        "boot": hello["boot"],
        "steps": server.core.steps(),
        "durable": server.config.durable,
    }
    text = json.dumps(beside).encode()
    saved = save_rows(root, partial(server.write_rows, root.path.name))
    write_file(root.path / _BESIDE, lambda file: file.write(text))
    return sum(file.rows for file in saved.files)


def _request(shard: int, number: int) -> dict[str, Any]:
    """What is left of one that an earlier life of the server was sent."""
    return {"shard": shard, "id": number, "by": "a command"}


class _Cancelled(errors.PersiaError):
    """The move was given up."""


class _Stopping(errors.PersiaError):
    """The server ends; what is on its disk says how the move continues."""


@dataclasses.dataclass
class _Leaving:
    """A shard of this server that goes to another one."""

    request: dict[str, Any]
    state: int = _core.MOVED_RUNNING
    text: str = "begins"
    rows: int = 0
    cancelled: bool = False


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
        self._places = shards.places
        self._config = shards.config
        self._core = shards.core
        self._over = threading.Event()
        self._leaving: _Leaving | None = None
        self._arriving: dict[int, _Arriving] = {}
        self._arrived: set[int] = set()
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
            self._place(request["shard"], number, request["address"])
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
        if self._config.checkpoints is None:
            raise errors.InvalidArgument(
                "rows travel through the folder of checkpoints: start all "
                "servers with the same `checkpoints`"
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
            one.text = f"{type(error).__name__}: {error}"
            one.state = _core.MOVED_FAILED
            say(f"shard {shard} stays here: {one.text}")
            return
        one.text = f"shard {shard} is at {to}"
        one.state = _core.MOVED_DONE
        say(f"shard {shard} has moved to {to}: {one.rows:,} rows")

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
                if server.log is not None:
                    stack.enter_context(
                        server.log.without_cuts(
                            partial(self._check_cancelled, one)
                        )
                    )
                self._hold(one, server)
                one.text = "writes the rows"
                one.rows = write(server, root)
                one.text = "the other server reads the rows"
                self._read(one, ask)
                # From now on no server can begin to read them: so one that
                # says that it does not have them never will.
                shutil.rmtree(root.path)
                self._check_cancelled(one)
                self._take_out(one, server)
            except BaseException:
                with contextlib.suppress(errors.PersiaError):
                    other.move(*self._words(one, _core.MOVE_ABORT, name))
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
                other.move(*self._words(one, _core.MOVE_COMMIT, ""))
                return
            except errors.InvalidArgument:
                raise
            except errors.PersiaError as error:
                one.text = f"waits for the other server: {error}"
                # It may have the shard, as long as it lives; its log outlives
                # it.
                if self._places is None:
                    if isinstance(error, errors.SchemaMismatch) or is_gone(
                        one.request["address"]
                    ):
                        raise
                    self._check_cancelled(one)
            if self._over.wait(_ASK) and self._places is not None:
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
                if time.monotonic() > until:
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
        pause = _SOON
        while True:
            answer = ask(_core.MOVE_PREPARE)
            if answer["state"] == _core.MOVED_DONE:
                return
            if answer["state"] == _core.MOVED_FAILED:
                raise errors.Unavailable(
                    f"{one.request['address']}: {answer['text']}"
                )
            self._over.wait(pause)
            pause = min(2 * pause, _ASK)

    # ---- a shard arrives

    def _prepare(self, request: dict[str, Any]) -> _Arriving:
        number, shard = request["id"], request["shard"]
        found = self._arriving.get(number)
        if found is None:
            self._check_arrives(number, shard)
            found = _Arriving(request, time.monotonic())
            self._arriving[number] = found
            self._start(partial(self._arrive, found))
        found.asked = time.monotonic()
        return found

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

    def _arrive(self, one: _Arriving) -> None:
        try:
            one.server, one.rows = self._load(one.request)
        except Exception as error:
            one.text = f"{type(error).__name__}: {error}"
            one.state = _core.MOVED_FAILED
        else:
            one.state = _core.MOVED_DONE

    def _arrive_again(self, one: _Arriving, found: Prepared) -> None:
        """It was read in an earlier life."""
        try:
            folder = self._shards.folder(found)
            one.server = self._again(found.shard, folder)
            one.server.core.set_steps(found.steps)
        except Exception as error:
            one.text = f"{type(error).__name__}: {error}"
            one.state = _core.MOVED_FAILED
            say(f"shard {found.shard} cannot arrive: {one.text}", "warning")
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
        durable = self._config.durable
        if _LEVELS.index(durable) < _LEVELS.index(beside["durable"]):
            raise errors.InvalidArgument(
                f"the shard is of a server with `durable={beside['durable']}`,"
                f" this one has `durable={durable}`"
            )
        shard, number = request["shard"], request["id"]
        places = self._places
        server = Server(
            self._config,
            (shard, request["shards"]),
            beside=self._core,
            arrives=Arrival(beside["boot"], rows.lineage),
            log=places.arriving(shard, number) if places else None,
        )
        try:
            read = server.read_rows(root.path.name, folder.name, rows)
            server.core.set_steps(beside["steps"])
            if places is not None:
                server.begin_log()
                places.prepare(shard, number, beside["steps"])
        except BaseException:
            server.close()
            if places is not None:
                with contextlib.suppress(errors.StorageError):
                    places.drop(shard, number)
            raise
        return server, read

    def commit(self, number: int) -> None:
        """Answers for a shard that has been read."""
        if self._has_arrived(number):
            return  # the answer to the first call was lost
        found = self._arriving.get(number)
        if found is not None and found.state == _core.MOVED_RUNNING:
            found.asked = time.monotonic()
            raise errors.Unavailable(f"the server reads {number:016x}")
        if found is None or found.server is None:
            raise errors.InvalidArgument(
                f"no move {number:016x} is prepared: the server was started "
                "again, or has forgotten it"
            )
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
        if self._places is not None:
            with contextlib.suppress(errors.StorageError):
                self._places.drop(one.request["shard"], one.request["id"])

    def _forget(self) -> None:
        """Those that are not asked about any more."""
        late = time.monotonic() - _FORGET
        for number, one in list(self._arriving.items()):
            if one.asked < late:
                self._drop(number)
