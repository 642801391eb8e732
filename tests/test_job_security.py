"""Tokens and certificates that the ranks of a job share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.distributed.cluster import Job
from persia.distributed.job_security import JOB_SECRET, secure_job
from persia.distributed.ranks import Keys
from persia.distributed.security import VARIABLES, Security
from persia.errors import InvalidArgument
from persia.store import norm

WORLD = 2


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, JOB_SECRET):
        monkeypatch.delenv(name, raising=False)


class Spy(Keys):
    """The ranks' keys, in a store of torch's without a group."""

    def __init__(self) -> None:
        self._store: Any = torch.distributed.HashStore()
        self._sent: list[str] = []

    def set(self, key: str, value: str) -> None:
        self._sent.append(value)
        super().set(key, value)

    def sent(self) -> str:
        """All that went through the store, in clear."""
        return "\n".join(self._sent)

    def text(self, key: str) -> str:
        return bytes(self._store.get(key)).decode()


def on_ranks(call: Callable[[Job], Security]) -> list[Security]:
    found: dict[int, Security] = {}

    def run(rank: int) -> None:
        found[rank] = call(Job(rank, WORLD, 0))

    threads = [threading.Thread(target=run, args=(r,)) for r in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(WORLD)]


def test_one_machine_shares_a_token_in_no_key() -> None:
    keys = Spy()
    first, other = on_ranks(lambda job: secure_job(keys, job, True, None))
    assert first == other
    assert first.token is not None and len(first.token) == 64
    assert not Path(keys.text("token file")).exists()
    assert first.token not in keys.text("token file")


def test_the_file_of_a_token_is_its_users_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = []
    read = Path.read_text

    def read_text(path: Path, *args: Any, **more: Any) -> str:
        modes.append(path.stat().st_mode & 0o777)
        return read(path, *args, **more)

    monkeypatch.setattr(Path, "read_text", read_text)
    keys = Spy()
    on_ranks(lambda job: secure_job(keys, job, True, None))
    assert modes == [0o600] * WORLD


@pytest.mark.parametrize("rank", range(WORLD))
def test_several_machines_need_a_secret(rank: int) -> None:
    """Each rank raises by itself; none waits for another."""
    keys = Spy()
    with pytest.raises(InvalidArgument, match=JOB_SECRET):
        secure_job(keys, Job(0, WORLD, 0), False, None)
    with pytest.raises(InvalidArgument, match=JOB_SECRET):
        secure_job(keys, Job(rank, WORLD, 0), False, None)


def test_a_rank_with_a_secret_hears_that_the_first_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = Spy()
    with pytest.raises(InvalidArgument):
        secure_job(keys, Job(0, WORLD, 0), False, None)
    monkeypatch.setenv(JOB_SECRET, "plum")
    with pytest.raises(InvalidArgument, match=JOB_SECRET):
        secure_job(keys, Job(1, WORLD, 0), False, None)


def test_a_secret_seals_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_SECRET, "plum")
    keys = Spy()
    first, other = on_ranks(lambda job: secure_job(keys, job, False, None))
    assert first == other
    assert first.ca and first.cert and first.key and first.mutual
    assert first.token and first.admin_token
    sent = keys.sent()
    assert sent
    for secret in (first.key, first.cert, first.token, first.admin_token):
        assert not any(part in sent for part in secret.split("\n") if part)
    for secret in ("pear", ""):
        monkeypatch.setenv(JOB_SECRET, secret)
        with pytest.raises(InvalidArgument, match=JOB_SECRET):
            secure_job(keys, Job(1, WORLD, 0), False, None)


def test_what_the_user_gives_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, job = Spy(), Job(0, WORLD, 0)
    given = Security(token="word")
    assert secure_job(keys, job, True, given) is given
    with pytest.raises(InvalidArgument, match="cert"):
        secure_job(keys, job, True, Security(ca="pem"))
    monkeypatch.setenv("PERSIA_TOKEN", "word")
    assert secure_job(keys, job, True, None).token == "word"


def test_sums_for_other_ranks_are_plain_bytes() -> None:
    share = [
        (3, torch.tensor([5, -1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        (4, torch.empty(0, dtype=torch.int64), torch.empty(0, 8)),
    ]
    found = norm.unpack(norm.pack(share))
    assert [table for table, _, _ in found] == [3, 4]
    for mine, theirs in zip(share, found, strict=True):
        assert torch.equal(mine[1], theirs[1])
        assert torch.equal(mine[2], theirs[2])
