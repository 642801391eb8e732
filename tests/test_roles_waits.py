"""A trainer that gets no batch says why."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from persia import _core
from persia.base import patience
from persia.data import Sender
from persia.distributed import Security, addresses
from tests.remote import Servers
from tests.roles import Workers
from tests.roles_told import job
from tests.test_roles import in_thread
from tests.test_roles_failures import wait_for

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(120)


def test_a_trainer_that_waits_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no loader; then it has only batches that servers have."""
    monkeypatch.setattr(patience, "_SAY_AFTER", 0.1)
    monkeypatch.setattr(patience, "_SAY_AGAIN", 0.1)

    def said(text: str) -> bool:
        return text in caplog.text

    with (
        contextlib.closing(Servers(2, checkpoints=str(tmp_path))) as servers,
        contextlib.closing(Workers(servers.addresses, 2)) as workers,
    ):
        trainer = job.Trainer(servers, workers)
        trainer.open()
        one = in_thread(lambda: trainer.train(4))
        wait_for(lambda: said("no data loader"))
        with Sender(workers.addresses, name="job") as sender:
            job.send(sender, 0, 2)
            sender.flush(30)
            wait_for(lambda: said("batches arrive again"))
            caplog.clear()
            wait_for(lambda: said("0 batches, 0 are at trainers"))
            job.send(sender, 2, 4)
            one()
        trainer.close()


def test_batches_that_wait_for_servers_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server is away: loaders and jobs are as they should be."""
    stats = {"streams": 1, "queued": 480, "looking": 2, "returning": 1}
    monkeypatch.setattr(addresses, "_ask_worker", lambda *_: stats)
    assert "3 wait" in addresses.why_no_batch(["w:1"], "default", Security())
