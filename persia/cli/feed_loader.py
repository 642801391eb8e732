"""``persia feed --parts``: parts of the data, which loaders share.

Each part is a stream of batches that has the same name, and the same batches
under the same numbers, whichever loader sends it. Embedding workers know which
loader has a part; one that they do not hear of any more loses it to another.
Servers know which batches are trained, so those are passed over then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from persia import errors
from persia.data import Batch, Dataset, Kafka, Sender

__all__ = ["feed", "parts_of"]

_ASK = 2.0  # seconds until the parts of others are asked for again
_COMMIT = 5.0  # seconds between commits to a group of Kafka


def parts_of(source: Dataset, n: int) -> dict[str, Dataset]:
    """By name, the partitions of topics, or ``n`` parts of other data.

    Raises:
        InvalidArgument: topics have another number of partitions.
    """
    parts: Sequence[Dataset]
    if isinstance(source, Kafka):
        parts = source.partitions()
        if n != len(parts):
            raise errors.InvalidArgument(
                f"--parts {n}: the topics have {len(parts)} partitions, and "
                "each is a part"
            )
    else:
        parts = source.parts(n)
    return {f"{i}/{len(parts)}": part for i, part in enumerate(parts)}


def feed(
    parts: Mapping[str, Dataset], epochs: int, sender: Callable[[str], Sender]
) -> Counter[str]:
    """Sends the parts that no other loader has, until all have ended.

    Args:
        parts: by name, in the order in which they are asked for.
        epochs: of each part.
        sender: makes that of a part's name.

    Returns:
        what this loader sent: ``parts``, ``samples``, and the ``stats()`` of
        the senders, added up.
    """
    loader = _Loader(parts, epochs, sender)
    try:
        return loader.run()
    except BaseException:
        for one in loader.owned:
            one.abandon()
        raise


class _Part:
    """A part that this loader has."""

    def __init__(self, source: Dataset, sender: Sender) -> None:
        self._source = source
        self._sender = sender
        self._samples = 0
        self._last = 0  # the number of the last batch
        self._committed = time.monotonic()

    def send(self, epoch: int) -> None:
        """Sends an epoch, from 0."""
        self._source.epoch = epoch
        for number, batch in self._numbered():
            self._sender.skip(number - 1)
            self._sender.send(batch)
            self._last = number
            self._samples += len(batch)
            if time.monotonic() - self._committed >= _COMMIT:
                self._commit()
        self._sender.end()

    def _numbered(self) -> Iterator[tuple[int, Batch]]:
        if isinstance(self._source, Kafka):
            after = max(self._last, self._sender.position)
            return self._source.numbered(after)
        return enumerate(self._source, self._last + 1)

    def _commit(self) -> None:
        """Says how much is trained, where others look for that."""
        position = self._sender.position
        if isinstance(self._source, Kafka) and position:
            self._source.commit_batches(position)
        self._committed = time.monotonic()

    @property
    def trained(self) -> bool:
        return self._sender.position >= self._last

    def close(self) -> Counter[str]:
        """Waits until all is trained."""
        self._sender.flush()
        self._commit()
        found = Counter(self._sender.stats())
        self._sender.close()
        found.update(parts=1, samples=self._samples)
        return found

    def abandon(self) -> None:
        """Another loader is to have it."""
        self._sender.close(ended=False)


class _Loader:
    def __init__(
        self,
        parts: Mapping[str, Dataset],
        epochs: int,
        sender: Callable[[str], Sender],
    ) -> None:
        self.owned: list[_Part] = []
        self._left = dict(parts)  # that others have, or none
        self._epochs = epochs
        self._sender = sender
        self._sent: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        for epoch in range(self._epochs):
            for one in self.owned:
                one.send(epoch)
            while self._claim(epoch + 1):
                pass
        while self._left:  # those of a loader that dies are to be had
            if not self._claim(self._epochs):
                time.sleep(_ASK)
        while self.owned:
            self._close(self.owned[0])
        return self._sent

    def _claim(self, epochs: int) -> bool:
        """Sends the first epochs of one more part, if there is one."""
        for name in list(self._left):
            sender = self._sender(name)
            state = sender.claim(self._epochs)
            if state == "own":
                one = _Part(self._left.pop(name), sender)
                self.owned.append(one)
                for epoch in range(epochs):
                    one.send(epoch)
                self._close_trained(epochs)
                return True
            sender.close(ended=False)
            if state == "ended":
                del self._left[name]
        return False

    def _close_trained(self, epochs: int) -> None:
        """Of many parts few are open at once; workers are to know by one of
        them that this loader is there for more."""
        for one in self.owned[:-1]:
            if epochs == self._epochs and one.trained:
                self._close(one)

    def _close(self, one: _Part) -> None:
        self._sent += one.close()
        self.owned.remove(one)
