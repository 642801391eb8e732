"""Bytes of each message as a release writes them, kept in ``golden/``.

usage: python -m tests.wire.golden

It adds messages that the file of this version of the protocol lacks. Bytes
that are there stay: releases were out with them.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from tests.wire.structs import ROOT
from tests.wire.test_proto import MESSAGES, Message, messages, wire

GOLDEN = Path(__file__).with_name("golden")
MOST = 400  # bytes, if one is as small
EXAMPLES = 60


def versions() -> range:
    """Those of the protocol that this tree speaks."""
    text = (ROOT / "csrc" / "wire" / "wire.h").read_text()
    found = [
        int(n) for n in re.findall(r"WIRE_VERSION(?:_MIN)? = (\d+)", text)
    ]
    return range(min(found), max(found) + 1)


def read(version: int) -> dict[str, str]:
    """Message -> its bytes as hex."""
    path = GOLDEN / f"{version}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def sample(name: str) -> bytes:
    """The largest that is not too large."""
    best = b""

    @seed(39)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(messages([name]))
    def look(message: Message) -> None:
        nonlocal best
        with contextlib.suppress(ValueError):  # one that C refuses
            data = wire.write(message)
            if not best or len(best) < len(data) <= MOST:
                best = data

    look()
    return best


def main() -> None:
    """Adds what is missing."""
    version = versions()[-1]
    known = read(version)
    for name in MESSAGES:
        if name not in known:
            known[name] = sample(name).hex()
    GOLDEN.mkdir(exist_ok=True)
    text = json.dumps(known, indent=0, sort_keys=True) + "\n"
    (GOLDEN / f"{version}.json").write_text(text)


if __name__ == "__main__":
    main()
