"""What a data loader does: it sends a share of the data, or parts of it.

Loaders share parts. Each part is a stream of batches that has the same name,
and the same batches under the same numbers, whichever loader sends it.
Embedding workers know which loader has a part; one that is silent loses it to
another. Servers know which batches are trained, so those are passed over then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from persia import errors
from persia.data import Dataset, Kafka, Sender
from persia.data.batches.batch import Batch
from persia.data.kafka.source import grown_parts

_ASK = 2.0  # seconds until the parts of others are asked for again
_UNSURE = 15.0  # seconds in which workers may not know who has a part
_COMMIT = 5.0  # seconds between commits to a group of Kafka
_IDLE = 0.5  # seconds until new messages are looked for again
_ALONE = 30.0  # seconds until a part is taken that is another loader's share


def parts_of(source: Dataset, n: int) -> dict[str, Dataset]:
    """By name, the partitions of topics, or ``n`` parts of other data.

    Raises:
        InvalidArgument: topics have another number of partitions.
    """
    if not isinstance(source, Kafka):
        return {f"{i}/{n}": part for i, part in enumerate(source.parts(n))}
    parts: dict[str, Dataset] = {**source.partitions()}
    if n != len(parts):
        raise errors.InvalidArgument(
            f"{n} parts: the topics have {len(parts)} partitions, and each "
            "is a part"
        )
    return parts


class Share:
    """The batches of a share, or of a part, and what sends them."""

    def __init__(
        self, source: Dataset, sender: Sender, part: str = ""
    ) -> None:
        self.source = source
        self.sender = sender
        self.part = part
        self.samples = 0
        self.failure: errors.PersiaError | None = None
        """Of the first batch that ended without an update."""
        self.shown = 0  # how many of these were printed
        self._alone = isinstance(source, Kafka) and source.whole
        self._last = 0  # the number of the last batch
        self._committed = time.monotonic()
        self._position = 0  # batches that were committed
        self.epochs = 0  # that were sent

    def send(self, epoch: int) -> None:
        """Sends an epoch, from 0."""
        self.source.epoch = epoch
        self.send_new()
        self.sender.end()
        self.epochs = epoch + 1

    def send_new(self) -> bool:
        """Sends the batches that follow the last one; whether there are."""
        before = self._last
        for number, batch in self._numbered():
            self._wait(partial(self.sender.skip, number - 1))
            self.sender.send(batch)
            self._last = number
            self.samples += len(batch)
            self.commit_later()
        return self._last > before

    def _numbered(self) -> Iterator[tuple[int, Batch]]:
        if self._alone:
            assert isinstance(self.source, Kafka)
            yield from self._after(self.next)
        else:
            yield from enumerate(self.source, self._last + 1)

    def _after(self, number: int) -> Iterator[tuple[int, Batch]]:
        """The batches of a partition that follow this one."""
        assert isinstance(self.source, Kafka)
        for one in self.source.numbered(number):
            after = self.next
            if after < number:  # a checkpoint was loaded into the servers
                yield from self._after(after)
                return
            yield one

    def commit(self) -> None:
        """Says how much is trained, where others look for that."""
        position = self.sender.position
        if self._alone and position != self._position:
            assert isinstance(self.source, Kafka)
            self.source.commit_batches(position)
        self._position = position
        self._committed = time.monotonic()

    def commit_later(self) -> None:
        """The same, some time after the last one; also of a quiet part."""
        if time.monotonic() - self._committed >= _COMMIT:
            self.commit()

    @property
    def next(self) -> int:
        """How many batches come before the one that is sent next."""
        return max(self._last, self.sender.position)

    @property
    def trained(self) -> bool:
        """Whether all batches so far are, or ended without an update."""
        return self.sender.position >= self._last

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all are trained. Batches that failed are remembered,
        and do not keep others from being sent.

        Raises:
            DeadlineExceeded: none was trained for ``timeout`` seconds.
        """
        self._wait(partial(self.sender.flush, timeout))

    def _wait(self, call: Callable[[], None]) -> None:
        try:
            call()
        except errors.PersiaError as error:
            if not self.trained:
                raise  # of the connection, not of a batch
            self.failure = self.failure or error
            call()


class Loader:
    """Sends data, so many epochs of it.

    Its counts may be read by another thread meanwhile.
    """

    def __init__(self, epochs: int) -> None:
        self.failure: errors.PersiaError | None = None
        """Of the first batch that ended without an update."""
        self._epochs = epochs
        self.shares: list[Share] = []
        # Parts that had ended, in rows of which lineage.
        self._closed: dict[str, tuple[Dataset, int]] = {}
        self._ended: Counter[str] = Counter()
        # Since when others have a part, in rows of which lineage.
        self._held: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()  # a sender is not counted and closed

    def send(self, source: Dataset, make: Callable[[], Sender]) -> None:
        """Sends all of a source, until it is trained."""
        left = {"": source}
        with self._abandoned():
            while left:
                one = self._start(left, "", make())
                with self._again(one, left):
                    for epoch in range(self._epochs):
                        one.send(epoch)
                    self._close(one, left)

    def send_parts(
        self, parts: Mapping[str, Dataset], sender: Callable[[str], Sender]
    ) -> None:
        """Sends the parts that no other loader has, until all have ended.

        Args:
            parts: by name, in the order in which they are asked for.
            sender: makes that of a part's name.
        """
        left = dict(parts)  # that others have, or none
        with self._abandoned():
            while left or self.shares:
                if self._send_next(left, sender):
                    continue
                self._check_replaced(left)
                if left:  # those of a loader that dies are to be had
                    time.sleep(_ASK)
                elif self.shares:
                    self._close_unless_others_wait(self.shares[0], left)

    def _send_next(
        self, left: dict[str, Dataset], sender: Callable[[str], Sender]
    ) -> bool:
        """Sends one more epoch of the parts that are behind, and as much of
        those that are to be had; whether there were any. Workers have room
        for a few epochs, and each is trained when all parts of it are
        there."""
        behind = [one for one in self.shares if one.epochs < self._epochs]
        epoch = min((one.epochs for one in behind), default=0)
        if behind and self._is_unsure(left):
            behind, epoch = [], epoch - 1
        for one in behind:
            if one.epochs == epoch:
                with self._again(one, left):
                    one.send(epoch)
        sent = bool(behind)
        while self._claim(left, sender, epoch + 1):
            sent = True
        return sent

    def _is_unsure(self, left: Mapping[str, Dataset]) -> bool:
        """Whether a part may be this loader's soon. After a load workers take
        each for another's, for a while: what is sent of the others meanwhile
        would fill the queues with later epochs."""
        late = time.monotonic() - _UNSURE
        return any(
            since > late
            for (name, _), since in self._held.items()
            if name in left
        )

    def follow(
        self,
        own: Mapping[str, Dataset],
        others: Mapping[str, Dataset],
        sender: Callable[[str], Sender],
    ) -> None:
        """Sends what arrives in parts, in one epoch that does not end.

        Args:
            own: parts of this loader's share, by name.
            others: those of other loaders, taken where one has died.
            sender: makes that of a part's name.
        """
        left = [dict(own), dict(others)]
        began = asked = time.monotonic()
        with self._abandoned():
            while self._claim(left[0], sender, 0):
                pass
            while True:
                sent = False
                for one in self._grown():
                    with self._again(one, left[0]):
                        sent |= one.send_new()
                self._check_replaced(left[0])
                for one in self.shares:
                    one.commit_later()
                self.show_failures()
                now = time.monotonic()
                if now - asked >= _ASK:
                    self._claim(left[0], sender, 0)
                    if now - began >= _ALONE:
                        self._claim(left[1], sender, 0)
                    asked = time.monotonic()
                if not sent:
                    time.sleep(_IDLE)

    def _grown(self) -> list[Share]:
        """The open parts that may have a batch that was not sent: by one
        question for all."""
        sources = {
            one.part: (one.source, one.next)
            for one in self.shares
            if isinstance(one.source, Kafka)
        }
        grown = grown_parts(sources)
        return [one for one in self.shares if one.part in grown]

    def counts(self) -> Counter[str]:
        """``samples``, ``streams`` that have ended, and the ``stats()`` of
        all senders, added up."""
        with self._lock:
            return sum(map(_counts, self.shares), self._ended.copy())

    def lag(self) -> dict[str, int]:
        """By "topic/partition", the messages that are not sent yet."""
        found: dict[str, int] = {}
        for one in list(self.shares):
            if isinstance(one.source, Kafka):
                found |= one.source.stats()["lag"]
        return found

    def _claim(
        self,
        left: dict[str, Dataset],
        make: Callable[[str], Sender],
        epochs: int,
    ) -> bool:
        """Sends the first epochs of one more part, if there is one."""
        for name in list(left):
            sender = make(name)
            state = sender.claim(self._epochs)
            if state == "own":
                one = self._start(left, name, sender)
                with self._again(one, left):
                    for epoch in range(epochs):
                        one.send(epoch)
                self._close_trained(epochs, left)
                return True
            if state == "held" and sender.lineage:
                key = name, sender.lineage
                self._held.setdefault(key, time.monotonic())
            if state == "ended":
                self._closed[name] = left.pop(name), sender.lineage
            sender.close(ended=False)
        return False

    def _start(
        self, left: dict[str, Dataset], name: str, sender: Sender
    ) -> Share:
        one = Share(left.pop(name), sender, name)
        self.shares.append(one)
        return one

    @contextlib.contextmanager
    def _again(self, one: Share, left: dict[str, Dataset]) -> Iterator[None]:
        """Where a checkpoint was loaded that lacks batches of a stream, it is
        left to be sent: what servers have is passed over then."""
        try:
            yield
        except errors.RowsReplaced:
            lost = one.sender.stats()["lost"]
            part = f"{one.part}: " if one.part else ""
            print(
                f"{part}the checkpoint that was loaded lacks {lost:,} "
                "batches: sends them again",
                flush=True,
            )
            with self._lock:
                self.shares.remove(one)
                one.sender.close(ended=False)
            left[one.part] = one.source
            # They may lack batches as well.
            left |= {name: of for name, (of, _) in self._closed.items()}
            self._closed.clear()

    def _check_replaced(self, left: dict[str, Dataset]) -> None:
        """Of streams of which there is nothing to send now."""
        for one in list(self.shares):
            with self._again(one, left):
                one.sender.skip(0)
                self._reopen(one, left)

    def _reopen(self, one: Share, left: dict[str, Dataset]) -> None:
        """Rows of another lineage may lack batches of the parts that had
        ended: a claim tells."""
        lineage = one.sender.lineage
        for name, (source, then) in list(self._closed.items()):
            if then != lineage:
                left[name] = source
                del self._closed[name]

    def _close_trained(self, epochs: int, left: dict[str, Dataset]) -> None:
        """Of many parts few are open at once; workers are to know by one of
        them that this loader is there for more."""
        for one in self.shares[:-1]:
            if epochs == self._epochs and one.trained:
                self._close_unless_others_wait(one, left)

    def _close_unless_others_wait(
        self, one: Share, left: dict[str, Dataset]
    ) -> None:
        """It may be the turn of a stream that is to be sent again: the
        batches of the next epoch are trained after those of this one."""
        with (
            contextlib.suppress(errors.DeadlineExceeded),
            self._again(one, left),
        ):
            self._close(one, left, _ASK)

    def _close(
        self,
        one: Share,
        left: dict[str, Dataset],
        timeout: float | None = None,
    ) -> None:
        """Waits until all is trained, at most so long without a batch that
        becomes trained."""
        one.flush(timeout)
        self._reopen(one, left)
        one.commit()
        self.failure = self.failure or one.failure
        with self._lock:
            self._ended += _counts(one)
            self._ended["streams"] += 1
            self.shares.remove(one)
            self._closed[one.part] = one.source, one.sender.lineage
            one.sender.close()

    def show_failures(self) -> None:
        """Of streams without an end, where no later error reports them."""
        for one in self.shares:
            failed = one.sender.stats()["failed"]
            if failed > one.shown:
                one.shown = failed
                one.flush()
                print(
                    f"{one.part}: {failed:,} batches ended without an update "
                    f"so far: {one.failure}",
                    flush=True,
                )
                one.failure = None

    @contextlib.contextmanager
    def _abandoned(self) -> Iterator[None]:
        """After an error another loader is to have what is open."""
        try:
            yield
        except BaseException:
            with self._lock:
                while self.shares:
                    self.shares.pop().sender.close(ended=False)
            raise


def _counts(one: Share) -> Counter[str]:
    found = Counter(one.sender.stats() | {"samples": one.samples})
    if isinstance(one.source, Kafka):
        stats = one.source.stats()
        found |= Counter({k: stats[k] for k in ("malformed", "dead_letters")})
    return found
