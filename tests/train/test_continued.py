"""A training that is started again with the rows that servers have, in one
process: tests/system/test_elastic.py has ranks that join and leave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import errors
from persia.checkpoint.recent import DenseFiles, Moment
from persia.datasets import SyntheticCTR
from persia.train import Elastic, Every, Trainer
from tests.remote import Servers

BATCHES = 20


class Stop(Exception):
    """The process dies."""


class Life:
    """One start of the training."""

    def __init__(self, to: Servers | None, folder: Path, **more: Any) -> None:
        self.data = SyntheticCTR(BATCHES * 16, 16)
        servers = to.text if to else "embedded"
        arguments = {"servers": servers, "job": "x", "lost": "raise"}
        self.store = persia.Store(
            persia.optim.SGD(lr=0.1), threads=1, **(arguments | more)
        )
        tables = [
            persia.EmbeddingBagConfig(key, 2, [key]) for key in self.data.keys
        ]
        bags = persia.EmbeddingBagCollection(store=self.store, tables=tables)
        self.model = persia.models.DLRM(bags, self.data.dense_features)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.trainer = Trainer(self.model, self.optimizer, staleness=0)
        self.elastic = Elastic(
            self.trainer, self.store, self.data, every=4, folder=str(folder)
        )

    def train(self, until: int | None = None) -> None:
        """To the end, or until so many steps, where an error ends it."""

        def look() -> None:
            if self.trainer.step == until:
                raise Stop

        hooks = [Every(look, steps=1)]
        with contextlib.suppress(Stop):
            self.elastic.fit(1, hooks=hooks)

    def weights(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        return {n: p.detach().clone() for n, p in named if p.numel()}

    def updates(self) -> int:
        return max(t["pushes"] for t in self.store.stats()["tables"].values())


@pytest.fixture
def servers() -> Iterator[Servers]:
    with contextlib.closing(Servers(2)) as some:
        yield some


def test_it_continues_where_it_failed(
    servers: Servers, tmp_path: Path
) -> None:
    first = Life(servers, tmp_path)
    assert first.elastic.begin() is None
    first.train(6)
    first.store.close()
    again = Life(servers, tmp_path)
    found = again.elastic.begin()
    assert found is not None
    assert (found.step, found.epoch, found.ranks) == (6, 0, (1, 1))
    assert (found.behind, list(found.lost)) == (0, [])
    for name, weight in first.weights().items():
        assert torch.equal(weight, again.weights()[name])
    state = again.optimizer.state_dict()["state"]
    assert all(one["step"] == 6 for one in state.values())
    again.train()
    assert (again.trainer.step, again.updates()) == (BATCHES, BATCHES)
    again.store.close()
    # It is over: a file of it would continue another training.
    assert DenseFiles("default", "x", str(tmp_path)).newest() is None


def test_an_older_dense_part_lacks_steps(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Life(servers, tmp_path)
    first.elastic.begin()
    monkeypatch.setattr(Elastic, "keep", lambda self: None)  # it was killed
    first.train(7)
    first.store.close()
    again = Life(servers, tmp_path)
    found = again.elastic.begin()
    assert found is not None and (found.step, found.behind) == (4, 3)
    again.train(6)
    again.store.close()
    last = Life(servers, tmp_path)
    found = last.elastic.begin()
    assert found is not None and (found.step, found.behind) == (4, 2)
    last.train()
    assert last.updates() == BATCHES  # each once
    last.store.close()


def test_nothing_is_left_of_the_dense_part(
    servers: Servers, tmp_path: Path
) -> None:
    first = Life(servers, tmp_path / "a")
    first.elastic.begin()
    first.train(6)
    first.store.close()
    other = Life(servers, tmp_path / "b")
    with pytest.raises(errors.StorageError):
        other.elastic.begin()
    assert other.elastic.begin(otherwise=True) is None
    other.store.close()


def test_an_older_file_returns(servers: Servers, tmp_path: Path) -> None:
    """The machine of a later life is gone."""
    first = Life(servers, tmp_path / "a")
    first.elastic.begin()
    first.train(6)
    first.store.close()
    (tmp_path / "b").mkdir()
    there = next((tmp_path / "a").iterdir())
    (tmp_path / "b" / there.name).mkdir()
    for path in there.iterdir():
        (tmp_path / "b" / there.name / path.name).write_bytes(
            path.read_bytes()
        )
    second = Life(servers, tmp_path / "a")
    assert second.elastic.begin() is not None
    second.train(9)
    second.store.close()
    third = Life(servers, tmp_path / "b")
    with pytest.raises(errors.StorageError):
        third.elastic.begin()
    third.store.close()


def test_files_of_other_rows_are_left_alone(tmp_path: Path) -> None:
    with contextlib.closing(Servers(2)) as some:
        first = Life(some, tmp_path)
        first.elastic.begin()
        first.train(6)
        first.store.close()
    with contextlib.closing(Servers(2)) as others:
        again = Life(others, tmp_path)
        assert again.elastic.begin() is None
        again.train()
        assert again.updates() == BATCHES
        again.store.close()


@pytest.mark.parametrize("lost", ["raise", "continue"])
def test_a_server_has_lost_its_rows(
    servers: Servers, tmp_path: Path, lost: str
) -> None:
    first = Life(servers, tmp_path)
    first.elastic.begin()
    first.train(6)
    first.store.close()
    servers.kill(1)
    servers.restart(1)
    again = Life(servers, tmp_path, lost=lost)
    if lost == "raise":
        with pytest.raises(errors.UpdatesLost):
            again.elastic.begin()
    else:
        found = again.elastic.begin()
        assert found is not None and found.lost
        again.train()
        assert again.trainer.step == BATCHES
    again.store.close()


def test_what_does_not_go(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "PERSIA_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.InvalidArgument):
        Life(None, tmp_path)
    for more in ({"job": None}, {"update": "step"}):
        with pytest.raises(errors.InvalidArgument):
            Life(servers, tmp_path, **more)
    # torchrun would give ranks the addresses of those before.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(errors.InvalidArgument):
        Life(servers, tmp_path)


def test_the_newest_file_stays(tmp_path: Path) -> None:
    files = DenseFiles("n", "job", str(tmp_path))
    assert files.newest() is None
    files.write(Moment(0, 9), {"format": 1})
    files.write(Moment(1, 4), {"format": 1})
    files.write(Moment(0, 12), {"format": 1})
    assert files.newest() == (1, 4)
    assert len(list(files.folder.iterdir())) == 1
    assert DenseFiles("n", "other", str(tmp_path)).newest() is None
    files.remove()
    assert not files.folder.exists()
