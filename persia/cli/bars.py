"""How far work is: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from persia.base.logs import say

EVERY = 5.0  # seconds between two lines


class Tell(Protocol):
    """Says how far the work is."""

    def __call__(self, done: float, text: str = "", title: str = "") -> None:
        """
        Args:
            done: of the total.
            text: what else there is to say.
            title: of this part of the work; default: that of all.
        """


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Tell]:
    """Within the block, work whose progress is shown on stderr.

    Args:
        title: what is done.
        total: how much there is to do; None: it is not known.
    """
    show = _bar if sys.stderr.isatty() else _lines
    with show(title, total) as tell:
        yield tell


@contextmanager
def _lines(title: str, total: float | None) -> Iterator[Tell]:
    last = time.monotonic()

    def tell(done: float, text: str = "", title: str = title) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            share = f", {done / total:.0%}" if total else ""
            say(f"{title}{share}: {text}", aside=True, done=done, total=total)

    yield tell


@contextmanager
def _bar(title: str, total: float | None) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %") if total else TextColumn(""),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    console = Console(stderr=True, emoji=False, highlight=False, markup=False)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, text="")

        def tell(done: float, text: str = "", title: str = title) -> None:
            bar.update(task, completed=done, text=text, description=title)

        yield tell


class Counted:
    """Batches whose samples are counted for the user while they are read. All
    else is that of the source."""

    def __init__(self, source: Any, title: str) -> None:
        self._source = source
        self._title = title

    def __iter__(self) -> Iterator[Any]:
        began, samples = time.monotonic(), 0
        with progress(self._title) as tell:
            for batch in self._source:
                yield batch
                samples += len(batch)
                rate = samples / max(time.monotonic() - began, 1e-9)
                tell(samples, f"{samples:,} samples, {rate:,.0f} samples/s")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@contextmanager
def watched(
    title: str, look: Callable[[], tuple[float, str]]
) -> Iterator[None]:
    """Within the block, work that reports nothing by itself.

    Args:
        title: what is done.
        look: how much is done, and a text; is called in a thread.
    """
    import threading

    over = threading.Event()

    def watch(tell: Tell) -> None:
        while not over.wait(1.0):
            tell(*look())

    with progress(title) as tell:
        thread = threading.Thread(target=watch, args=(tell,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
