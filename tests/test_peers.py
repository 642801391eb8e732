"""What a process writes of peers that it has lost, and of those that are
back."""

from __future__ import annotations

import contextlib
import logging

import pytest

import persia
from persia import _core
from persia.distributed.peers import LOST_S, Peers
from tests.remote import Servers
from tests.system.processes import wait_until

SERVER, WORKER = "persia.v1.ParameterServer", "persia.v1.EmbeddingWorker"
ONE, TWO = "ps0:8888", "w0:8889"


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, list[str]]]:
    fields = [vars(record)["fields"] for record in caplog.records]
    return [(one["event"], one["peers"]) for one in fields]


def test_a_peer_is_reported_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = Peers()

    def look(at: float, one: bool, two: bool) -> None:
        peers.look([(SERVER, ONE, one), (WORKER, TWO, two)], at)

    look(0.0, False, True)  # it was never there: calls report that
    look(9.0, True, True)
    look(10.0, False, False)
    look(10.0 + LOST_S / 2, False, True)  # it was started again at once
    assert not events(caplog)
    look(10.0 + LOST_S, False, True)
    look(20.0, False, True)
    assert events(caplog) == [("peers lost", [ONE])]
    look(22.0, True, True)
    look(23.0, True, True)
    assert events(caplog)[1:] == [("peers back", [ONE])]
    assert vars(caplog.records[1])["fields"]["seconds"] == 12.0


def test_channels_of_one_peer_are_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a peer whose channels were closed is none."""
    peers = Peers()
    peers.look([(SERVER, ONE, True), (SERVER, ONE, True)], 0.0)
    peers.look([(SERVER, ONE, False), (SERVER, ONE, True)], 1.0)
    peers.look([(SERVER, ONE, False), (SERVER, ONE, True)], 9.0)
    peers.look([(SERVER, ONE, False)], 10.0)
    peers.look([], 11.0)
    peers.look([(SERVER, ONE, False)], 30.0)
    peers.look([(SERVER, ONE, False)], 40.0)
    assert not caplog.records


def test_many_peers_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    peers = Peers()
    for at, up in ((0.0, True), (1.0, False), (9.0, False)):
        peers.look([(SERVER, f"ps{i}:8888", up) for i in range(500)], at)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert len(record.getMessage()) < 400


def test_the_core_knows_which_servers_are_connected() -> None:
    if not _core.GRPC[0].isdigit():
        pytest.skip("built without gRPC")

    def of(address: str) -> list[bool]:
        return [up for _, at, up in _core.peers() if at == address]

    with contextlib.closing(Servers(2)) as servers:
        gone, stays = servers.addresses
        store = persia.Store(persia.optim.SGD(lr=1.0), servers=servers.text)
        with contextlib.closing(store):
            wait_until(lambda: of(gone) == of(stays) == [True])
            servers.kill(0)
            wait_until(lambda: of(gone) == [False])
            assert of(stays) == [True]
        assert not of(stays)
