"""A training that publishes until it may stop, in tests/serving/test_kills.py.

    python -m tests.serving.chain_job FOLDER BEGIN [SERVERS]

Step v sets every element of every row, and the dense part, to v: from BEGIN
on. At the end what it has published must be an export of the same moment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import persia
from persia.serving import Publisher
from tests.serving import models
from tests.serving.publishing import Versioned


def main(folder: Path, begin: str, servers: str | None = None) -> None:
    """Writes versions and packets into FOLDER/out; stops when FOLDER/stop is
    there."""
    where = {} if servers is None else {"servers": servers, "timeout": 60}
    store = models.store(threads=1, **where)
    model = Versioned(store)
    now = int(begin)
    model.set(now)
    out, want = folder / "out", folder / "want"
    with Publisher(
        model, out, example=model.example, every=0.02, rebase=6.0
    ) as publisher:
        while not (folder / "stop").exists():
            now += 1
            model.set(now)
            publisher.step()
        publisher.flush()
        assert publisher.publish()
        publisher.flush()
        persia.export(model, want, example=model.example)
    loaded, same = persia.load_model(out), persia.load_model(want)
    loaded.catch_up()
    assert torch.equal(loaded(*model.example), same(*model.example))
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
