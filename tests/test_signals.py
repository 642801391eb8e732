"""The rule by which processes end at a signal."""

from __future__ import annotations

import pytest

from tests.ready import ended

SEEN = """
import signal
from persia.base.signals import Ending

def first(number):
    print(ending.number == number, 0 < ending.left <= 60)

ending = Ending(60.0, first)
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_signal_is_known_where_it_is_handled() -> None:
    """The main thread may be faster than the one that watches: SIGTERM must
    not be taken for another signal then."""
    done = ended("-c", SEEN, timeout=60)
    assert done.stdout == "True True\n", done
