"""The states of a partition that is read, and what leads from one to another.

``docs/_tools/drawings.py`` draws the table.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a partition is."""

    PLACING = "its first offset is looked for"
    READING = "messages arrive"
    AHEAD = "it is paused, until others have caught up"
    QUIET = "no message arrives; its leader is asked where it ends"
    OVERTAKEN = "the messages at its place are gone"
    DONE = "it was read to its end"
    FAILED = "an error with its name was raised"


class Event(enum.Enum):
    """What happens to a partition."""

    PLACED = "it is read from an offset on"
    MESSAGE = "a message, or that there is none up to an offset"
    FULL = "more messages are held than four batches need"
    TAKEN = "batches have taken most of them"
    SILENT = "no message for some seconds"
    GONE = "the broker has no such offset"
    END = "the offset that it ended with was reached"
    ERROR = "access, storage or a timeout"


TABLE: dict[State, dict[Event, State]] = {
    State.PLACING: {
        Event.PLACED: State.READING,
        Event.ERROR: State.FAILED,
    },
    State.READING: {
        Event.MESSAGE: State.READING,
        Event.FULL: State.AHEAD,
        Event.SILENT: State.QUIET,
        Event.GONE: State.OVERTAKEN,
        Event.END: State.DONE,
        Event.ERROR: State.FAILED,
    },
    State.AHEAD: {
        Event.MESSAGE: State.AHEAD,
        Event.TAKEN: State.READING,
        Event.GONE: State.OVERTAKEN,
        Event.END: State.DONE,
        Event.ERROR: State.FAILED,
    },
    State.QUIET: {
        Event.MESSAGE: State.READING,
        Event.SILENT: State.QUIET,
        Event.GONE: State.OVERTAKEN,
        Event.END: State.DONE,
        Event.ERROR: State.FAILED,
    },
    State.OVERTAKEN: {
        Event.MESSAGE: State.OVERTAKEN,
        Event.PLACED: State.READING,
        Event.GONE: State.OVERTAKEN,
        Event.ERROR: State.FAILED,
    },
    State.DONE: {
        Event.MESSAGE: State.DONE,
        Event.GONE: State.DONE,
    },
    State.FAILED: {},
}
