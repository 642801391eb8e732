"""``persia train --publish-to`` and ``persia serve model``, as processes that
are killed in the middle of packets."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import persia
from persia import errors
from persia.serving import Publisher
from persia.serving.folder import LocalVersions, versions_of
from tests.ready import Ready
from tests.remote import Servers
from tests.serving.conftest import call, lines_of
from tests.system.processes import ranks

pytestmark = pytest.mark.slow


def options(place: Path, out: Path) -> list[str]:
    return [
        *("train", str(place / "clicks.csv")),
        *("--schema", str(place / "schema.yaml")),
        *("--batch-size", "50", "--threads", "1"),
        *("--publish-to", str(out), "--publish-every", "0.02"),
        *("--publish-rows", "100000"),
    ]


def test_what_was_published_is_what_was_saved(
    place: Path, tmp_path: Path
) -> None:
    out, saved = tmp_path / "out", tmp_path / "saved"
    call(*options(place, out), "--epochs", 3, "--save", saved)
    call("export", saved, tmp_path / "want")
    loaded = persia.load_model(out)
    assert loaded.catch_up() or loaded.version > "v-000001"
    frame = pd.read_csv(place / "clicks.csv", keep_default_na=False)[:500]
    want = persia.load_model(tmp_path / "want").predict(frame)
    assert torch.equal(loaded.predict(frame), want)
    call("model", "verify", out)
    call("model", "ls", out)


@pytest.mark.parametrize("where", ["ranks", "servers"])
def test_ranks_publish_together(where: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = where
        if where == "servers":
            made = Servers(2, checkpoints=str(tmp_path))
            stack.enter_context(contextlib.closing(made))
            servers = made.text
        words = ("-m", "tests.serving.publishing_job", str(tmp_path), servers)
        status, text = ranks(2, *words)
    assert status == 0, text


@pytest.mark.long
def test_ranks_of_the_command_publish(place: Path, tmp_path: Path) -> None:
    out, saved = tmp_path / "out", tmp_path / "saved"
    words = (*options(place, out), "--epochs", "3", "--save", str(saved))
    status, text = ranks(2, "-m", "persia", *words)
    assert status == 0, text
    call("export", saved, tmp_path / "want")
    loaded = persia.load_model(out)
    assert loaded.catch_up() or loaded.version > "v-000001"
    frame = pd.read_csv(place / "clicks.csv", keep_default_na=False)[:500]
    want = persia.load_model(tmp_path / "want").predict(frame)
    assert torch.equal(loaded.predict(frame), want)


def test_a_training_is_saved_that_could_not_be_published(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise errors.StorageError("the storage is away")

    monkeypatch.setattr(LocalVersions, "write_file", failing)
    short = functools.partialmethod(Publisher.flush, timeout=0.1)
    monkeypatch.setattr(Publisher, "flush", short)
    saved = tmp_path / "saved"
    told: list[str] = []
    monkeypatch.setattr("persia.train.run.warn", told.append)
    call(*options(place, tmp_path / "out"), "--save", saved)
    assert told
    call("export", saved, tmp_path / "export")


def stats(address: str) -> dict[str, Any]:
    url = f"http://{address}/v2/models/out/stats"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())["model_stats"][0]
    return found


def started(out: Path | str) -> tuple[Ready, str]:
    """A process that serves, and its address."""
    pytest.importorskip("uvicorn", reason="persia[serve] is not installed")
    process = Ready(
        *("-m", "persia", "serve", "model", str(out), "--port", "0"),
        *("--poll", "0.1", "--threads", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return process, lines_of(process)[-1].split()[-1]


def test_killed_trainings_and_servers(place: Path, tmp_path: Path) -> None:
    """One of both is killed: the other continues, and what is loaded then is
    whole."""
    rng = random.Random(7)
    out = tmp_path / "out"
    serving: tuple[Ready, str] | None = None
    try:
        for _ in range(4):
            training = Ready(
                *("-m", "persia", *options(place, out), "--epochs", "100000"),
                stdout=subprocess.DEVNULL,
            )
            try:
                end = time.monotonic() + 60
                while training.poll() is None and time.monotonic() < end:
                    if serving is None and (out / "CURRENT").exists():
                        serving = started(out)
                    if serving is not None and packets(serving[1], training):
                        break
                    time.sleep(0.02)
                assert training.poll() is None and serving is not None
                time.sleep(rng.random() * 0.3)
                if rng.random() < 0.4:
                    serving[0].kill()
                    serving[0].wait()
                    serving = None
            finally:
                training.kill()
                training.wait()
            loaded = persia.load_model(out)
            loaded.catch_up()
            loaded.check_rows()
            if serving is not None:
                assert serving[0].poll() is None
                assert stats(serving[1])["version"]
        names = versions_of(out).names()
        assert 1 <= len(names) <= 2
    finally:
        if serving is not None:
            serving[0].send_signal(signal.SIGTERM)
            assert serving[0].wait(60) == 0
    shutil.rmtree(out)


def packets(address: str, training: Ready) -> bool:
    """Whether packets of the training that runs were applied: the model is
    of a moment that is no second ago."""
    found = stats(address)
    return bool(found["packets"]) and found["lag"] < 1.0
