"""Named tensors over four roles: they reach the trainer as they were sent,
and a model of two tasks is what it is in one process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import persia
from persia import Stream, _core, errors
from persia.cli.app import app
from persia.data import Sender
from persia.data.batches.batch import flat
from tests.ready import Ready
from tests.remote import Servers
from tests.roles import Workers, batches, open_store, servers, workers
from tests.test_roles import feeding

__all__ = ["servers", "workers"]

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

pytestmark = pytest.mark.timeout(120)


def with_tensors(n: int) -> Iterator[persia.Batch]:
    """Batches with labels that are missing, carried columns of any dtype and
    shape, and times beside the ids of a feature."""
    g = torch.Generator().manual_seed(1)
    for i, batch in enumerate(batches(n)):
        samples, (ids, _) = len(batch), batch.ids["item"]
        label = torch.rand(samples, 2, generator=g).round()
        label[torch.rand(samples, 2, generator=g) < 0.3] = torch.nan
        batch.label = label
        batch.group = torch.randint(-(2**62), 2**62, (samples,), generator=g)
        batch.tensors |= {
            "session": torch.arange(samples) + i,
            "flag": label[:, 0] > 0.5,
            "image": torch.rand(samples, 2, 3, generator=g).half(),
            "nothing": torch.zeros(samples, 0),
        }
        batch.aligned = {
            "item": {"time": ids.double() / 3, "kind": ids[:, None].byte()}
        }
        yield batch


def test_tensors_travel_as_they_are(
    servers: Servers, workers: Workers
) -> None:
    model = persia.EmbeddingCollection(
        store=open_store(servers.text),
        tables=[persia.EmbeddingConfig("t", 8, ["item", "user"])],
    )
    sent = {int(b["session"][0]): b for b in with_tensors(12)}
    seen = set()
    with feeding(workers, with_tensors(12)):
        for batch in persia.DataLoader(Stream(workers.addresses), model):
            model(batch.ids)["item"].values().sum().backward()
            number = int(batch["session"][0])
            expected = flat(sent[number])
            assert flat(batch).keys() == expected.keys()
            for name, tensor in flat(batch).items():
                assert tensor.dtype == expected[name].dtype
                assert tensor.shape == expected[name].shape
                assert tensor.numpy().tobytes() == (
                    expected[name].numpy().tobytes()
                )
            # Ids that travel as rows have as many entries as their times.
            assert len(batch.ids["item"][0]) == len(expected["item\x1ftime"])
            seen.add(number)
    assert seen == set(sent)


def test_what_is_no_tensor_of_the_samples_is_not_sent(
    workers: Workers,
) -> None:
    (batch,) = batches(1)
    with Sender(workers.addresses, timeout=10) as sender:
        batch.tensors["short"] = torch.zeros(3)
        with pytest.raises(errors.ShapeError):
            sender.send(batch)
        del batch.tensors["short"]
        batch.aligned = {"none": {"time": torch.zeros(3)}}
        with pytest.raises(errors.MissingFeature):
            sender.send(batch)
        assert sender.stats()["sent"] == 0


@pytest.mark.slow
def test_tasks_over_four_roles_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    """``persia feed`` and ``persia train --workers``, and without them."""
    rng = np.random.default_rng(0)
    item = rng.integers(0, 50, 2000)
    click = (rng.random(2000) < 0.2 + 0.012 * item).astype(float)
    buy = np.where(click == 1, (rng.random(2000) < 0.5) * 1.0, np.nan)
    frame = {"user": item % 7, "item": item, "click": click, "buy": buy}
    data = str(tmp_path / "clicks.parquet")
    pd.DataFrame(frame).to_parquet(data)

    def call(*words: object) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if isinstance(result.exception, errors.PersiaError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    of_data = [data, "--label", "click,buy", "--group", "user"]
    of_data += ["--batch-size", "100"]
    train = ["train", *of_data, "--model", "mmoe", "--staleness", 0]
    call(*train, "--save", tmp_path / "one")
    with contextlib.ExitStack() as stack:
        made = Servers(2, checkpoints=str(tmp_path))
        servers = stack.enter_context(contextlib.closing(made))
        workers = Workers(servers.addresses)
        stack.enter_context(contextlib.closing(workers))
        to = ["--workers", ",".join(workers.addresses)]
        loader = Ready("-m", "persia", "feed", *of_data, *to)
        where = ["--servers", servers.text, *to]
        call(*train, *where, "--save", tmp_path / "four")
        assert loader.wait() == 0
    one, four = (
        json.loads(call("evaluate", tmp_path / name, "--json"))
        for name in ("one", "four")
    )
    assert list(one["tasks"]) == ["click", "buy"]
    assert one["gauc"] == pytest.approx(four["gauc"], abs=1e-4)
    for name, scores in one["tasks"].items():
        assert four["tasks"][name] == pytest.approx(scores, rel=1e-4)
    assert one["tasks"]["click"]["auc"] > 0.6
