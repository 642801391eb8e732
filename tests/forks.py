"""Calls in a forked child."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

from persia import errors


def in_child(*calls: Callable[[], object]) -> list[str]:
    """For each call the name of the error of ours that it raised there, or
    "nothing". Fails if the child does not end in peace."""
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()

    def name(call: Callable[[], object]) -> str:
        try:
            call()
        except errors.PersiaError as e:
            return type(e).__name__
        return "nothing"

    child = fork.Process(
        target=lambda: results.put([name(call) for call in calls])
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0
    got: list[str] = results.get()
    return got
