"""Work that the ranks of a job do together, and fail together."""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed

from persia import errors
from persia.distributed.ranks import Keys, backends

T = TypeVar("T")

TICK = 1.0  # seconds between signs of life while rank 0 works
_GRACE = 5.0  # seconds more than rank 0 waits, which knows who is missing
_PATIENCE = 10.0  # seconds for the others after Ctrl-C
_POLL = 0.05  # seconds between looks at what a signal left
_LOOK = 3.0  # seconds until rank 0 has told the others who is missing
_SILENT = "persia/checkpoint/silent"  # key of what it tells them
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Code in which no signal raises: half a message, or a lock that is not
# given back, would leave all ranks waiting.
_OURS = (globals(), vars(contextlib))


class _Message(NamedTuple):
    """What a rank tells the others."""

    failure: tuple[str, str] | None  # class and text of an exception
    done: bool
    value: Any


def _failure(error: BaseException | None) -> tuple[str, str] | None:
    if error is None:
        return None
    if isinstance(error, OSError) and not isinstance(
        error, errors.PersiaError
    ):
        return "StorageError", str(error)
    if isinstance(error, Exception):
        return type(error).__name__, str(error)
    return "Interrupted", f"interrupted ({type(error).__name__})"


def _exception(rank: int, failure: tuple[str, str]) -> Exception:
    """The exception that another rank had."""
    name, text = failure
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    text = f"rank {rank}: {text}"
    try:
        error = kind(text) if kind is not None else None
    except TypeError:  # some want more than a text
        error = None
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{text} ({name})")


class Ranks:
    """This rank among all of torch.distributed's default process group, or
    the only one. A context manager around one collective call.

    Every rank calls the same methods in the same order. An exception of one
    rank is raised by all, at the next of these calls: by others with the
    text "rank N: …". Ctrl-C (or what else a handler of SIGINT or SIGTERM
    raises) waits until the others have heard of it, at most ten seconds.

    Args:
        alone: no other rank takes part, whatever the process group says.
        silence: seconds after which a rank that says nothing while rank 0
            works is an error. Before and after, ranks may take their time:
            the timeout of the process group is for that.
    """

    def __init__(self, alone: bool, silence: float = 60.0) -> None:
        self.rank, self.world = 0, 1
        self._silence = silence
        #: Set when the work of rank 0 is not wanted any more.
        self.stop = threading.Event()
        #: What a signal's handler raised and the others are to raise.
        self._interrupt: BaseException | None = None
        self._open = False  # within agreed(): a signal raises there
        self._handlers: dict[int, Any] = {}  # those before ours
        self._device: int | None = None
        self._can_meet = False
        if alone:
            return
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        kinds = backends(torch.distributed)
        self._can_meet = kinds.get("cpu") == "gloo"
        if "cpu" not in kinds:
            self._device = torch.cuda.current_device()

    def __enter__(self) -> Ranks:
        # One thread for what passes between the ranks, as a signal must not
        # end that half-way, and one for the work of rank 0.
        self._threads = concurrent.futures.ThreadPoolExecutor(2)
        if self._can_meet and self.rank == 0:
            Keys(_SILENT).drop("rank")
        if (
            self.world > 1
            and threading.current_thread() is threading.main_thread()
        ):
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if callable(before):
                    self._handlers[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._handlers.items():
            signal.signal(number, before)
        self._threads.shutdown(wait=False)
        if error is None and self._interrupt is not None:
            raise self._interrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """A signal: its own handler raises at once only in what is done
        within agreed(); elsewhere it is kept.
        """
        handler = self._handlers[number]
        if (
            self._open
            and frame
            and not any(frame.f_globals is ours for ours in _OURS)
        ):
            handler(number, frame)
            return
        try:
            handler(number, frame)
        except BaseException as error:
            self._interrupt = self._interrupt or error

    # ---- messages

    def _wait(self, sign: Any, rank: int, until: float | None) -> None:
        """Until a sign was sent to a rank, or came from it (None: as long as
        the process group has patience)."""
        try:
            if until is None:
                sign.wait()
            else:
                left = max(until - time.monotonic(), 1e-3)
                sign.wait(timedelta(seconds=left))
        except RuntimeError as error:
            if "Timed out" not in str(error):
                raise
            if self.rank == 0:
                # gloo has closed the connections to all others by now.
                with contextlib.suppress(RuntimeError):
                    Keys(_SILENT).set("rank", str(rank))
            raise self._silent(rank, error) from error

    def _silent(
        self, rank: int, error: RuntimeError
    ) -> errors.DeadlineExceeded:
        text = (str(error) or "no text").splitlines()[0]
        return errors.DeadlineExceeded(
            f"rank {rank} of {self.world} has said nothing for too long in "
            f"the middle of a checkpoint ({text}): is it stopped, or cut off?"
        )

    def _told(self) -> int | None:
        """The rank that rank 0 gave up, where this one learns it."""
        if not self._can_meet or self.rank == 0:
            return None
        deadline = time.monotonic() + _LOOK
        # The ranks' key-value store may be gone, and rank 0 with it.
        with contextlib.suppress(RuntimeError):
            keys = Keys(_SILENT)
            while time.monotonic() < deadline:
                if keys.has("rank"):
                    return int(keys.get("rank"))
                time.sleep(_POLL)
        return None

    def _meet(self, silence: float | None) -> None:
        """Until every rank is here: each reports to rank 0, then rank 0 to
        each. Unlike the collectives of torch it knows which rank is
        missing."""
        dist, sign = torch.distributed, torch.zeros(1)
        until = None if silence is None else time.monotonic() + silence
        if self.rank:
            until = until and until + _GRACE
            self._wait(dist.isend(sign, 0), 0, until)
            self._wait(dist.irecv(sign, 0), 0, until)
            return
        others = range(1, self.world)
        heard = [dist.irecv(torch.empty(1), rank) for rank in others]
        for rank, one in zip(others, heard, strict=True):
            self._wait(one, rank, until)
        for rank in others:
            self._wait(dist.isend(sign, rank), rank, until)

    def _gather(self, mine: _Message, silence: float | None) -> list[_Message]:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        every: list[Any] = [None] * self.world
        try:
            if self._can_meet:
                self._meet(silence)
            torch.distributed.all_gather_object(every, mine)
        except RuntimeError as error:
            silent = self._told()
            if silent not in (None, self.rank):
                raise self._silent(silent, error) from error
            text = (str(error) or "no text").splitlines()[0]
            raise errors.Unavailable(
                f"rank {self.rank} of {self.world} lost another in the "
                f"middle of a checkpoint: {text}"
            ) from error
        return every

    def _exchange(
        self,
        value: Any = None,
        error: BaseException | None = None,
        done: bool = False,
        silence: float | None = None,
    ) -> list[_Message]:
        """What each rank has to say; raises what any has failed with."""
        error = error or self._interrupt
        message = _Message(_failure(error), done, value)
        future = self._threads.submit(self._gather, message, silence)
        deadline: float | None = None
        while concurrent.futures.wait([future], _POLL).not_done:
            if self._interrupt is None:
                continue
            deadline = deadline or time.monotonic() + _PATIENCE
            if time.monotonic() > deadline:
                raise self._interrupt
        every = future.result()
        for rank, one in enumerate(every):
            if one.failure is None:
                continue
            if error is not None and (
                rank == self.rank or not isinstance(error, Exception)
            ):
                raise error
            raise _exception(rank, one.failure) from error
        return every

    # ---- what ranks do together

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """What is done within succeeds on all ranks, or fails on all. A
        barrier at its end.
        """
        if self.world == 1:
            yield
            return
        own: BaseException | None = None
        self._open = True
        try:
            yield
        except BaseException as error:
            own = error
        finally:
            self._open = False
        self._exchange(error=own)

    def gathered(self, mine: T) -> list[T]:
        """What each rank has, on all ranks."""
        if self.world == 1:
            return [mine]
        return [message.value for message in self._exchange(mine)]

    def lead(self, work: Callable[[], T]) -> T:
        """Rank 0 works while the others wait; all return its result.

        The ranks report to each other every second meanwhile, so that no
        deadline of the process group passes, and a dead rank is noticed. Work
        that may take long looks at `stop` now and then.
        """
        if self.world == 1:
            return work()
        self.stop.clear()
        future = self._threads.submit(work) if self.rank == 0 else None
        try:
            while True:
                done, error, value = False, None, None
                if future is not None:
                    concurrent.futures.wait([future], TICK)
                    if future.done():
                        done, error = True, future.exception()
                        value = None if error else future.result()
                every = self._exchange(value, error, done, self._silence)
                if every[0].done:
                    result: T = every[0].value
                    return result
        finally:
            self.stop.set()
            if future is not None:
                concurrent.futures.wait([future])
