"""Stores of one process with a log: what was applied is there again, after
``kill -9`` and in whatever process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import persia
from persia import _core, errors
from persia.distributed.durable import described, logs_in, verified
from persia.distributed.server import ServeConfig, Server
from tests.system.processes import environment

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

IDS = 64


def opened(
    log: Path, optimizer: Any = None, **more: Any
) -> tuple[persia.Store, persia.nn.Embedding]:
    """A store with a log, and its table."""
    store = persia.Store(
        optimizer or persia.optim.SGD(lr=1.0),
        threads=1,
        **{"durable": "process", "log": log} | more,
    )
    return store, counting(store)


def counting(store: persia.Store, **more: Any) -> persia.nn.Embedding:
    """Rows that count how often their ids were in a batch."""
    return persia.nn.Embedding(
        IDS, 4, store=store, name="count", init=0.0, **more
    )


def step(rows: persia.nn.Embedding, ids: Any = range(IDS)) -> None:
    (-rows(torch.tensor(list(ids))).sum()).backward()


def counts(rows: persia.nn.Embedding) -> torch.Tensor:
    with torch.no_grad():
        return rows(torch.arange(IDS))[:, 0].clone()


JOB = """
import sys, torch, persia
store = persia.Store(
    persia.optim.SGD(lr=1.0), threads=1,
    durable=sys.argv[1], log=sys.argv[2], log_limit=1 << 16,
)
rows = persia.nn.Embedding(64, 4, store=store, name="count", init=0.0)
with torch.no_grad():
    done = int(rows(torch.arange(64))[0, 0])
while True:
    (-rows(torch.arange(64)).sum()).backward()
    store.flush()
    done += 1
    print("done", done, flush=True)
"""


@pytest.mark.parametrize(
    ("level", "lives"),
    [("process", 2), pytest.param("disk", 5, marks=pytest.mark.long)],
)
def test_a_killed_process_loses_nothing(
    tmp_path: Path, level: str, lives: int
) -> None:
    """With cuts; an update that was not acknowledged may be in."""
    log, done, cut = tmp_path / "log", 0, None
    for _ in range(lives):
        child = subprocess.Popen(
            [sys.executable, "-c", JOB, level, str(log)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith("done"):
                continue
            done = int(line.split()[1])
            if done % 20 == 0:
                before, cut = cut, described(log / "default-0-of-1")["cut"]
                if cut != before:
                    break
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:
            if line.startswith("done") and line.endswith("\n"):
                done = int(line.split()[1])
        child.wait()
        store, rows = opened(log)
        got = counts(rows)
        assert bool((got == got[0]).all())
        assert done <= int(got[0]) <= done + 1
        done = int(got[0])
        store.close()


@pytest.mark.parametrize(
    ("optimizer", "data_type"),
    [
        (persia.optim.SGD(lr=0.1), "fp32"),
        (persia.optim.Adagrad(lr=0.1), "bf16"),
        (persia.optim.Adam(lr=0.1), "int8"),
        (persia.optim.RowWiseAdagrad(lr=0.1), "fp32"),
    ],
)
def test_bits_are_those_of_a_store_without_a_log(
    tmp_path: Path, optimizer: Any, data_type: str
) -> None:
    """Whatever lies between: closing, cuts, and another process's turn."""
    plain = persia.Store(copy.copy(optimizer), threads=1)
    want = persia.nn.Embedding(
        IDS, 4, store=plain, name="t", data_type=data_type
    )
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        store = persia.Store(
            copy.copy(optimizer),
            threads=1,
            durable="process",
            log=tmp_path,
            log_limit=1 << 16,
        )
        rows = persia.nn.Embedding(
            IDS, 4, store=store, name="t", data_type=data_type
        )
        for _ in range(30):
            ids = torch.randint(0, IDS, (40,), generator=generator)
            scale = torch.randn(40, 4, generator=generator)
            for one in (want, rows):
                (one(ids) * scale).sum().backward()
        for found, expected in zip(
            store.rows_and_state("t", range(IDS)),
            plain.rows_and_state("t", range(IDS)),
            strict=True,
        ):
            assert torch.equal(found, expected)
        store.close()
    plain.close()


def test_writes_of_rows_are_in_the_log(tmp_path: Path) -> None:
    store, rows = opened(tmp_path)
    other = persia.nn.Embedding(IDS, 4, store=store, name="other", init=0.0)
    third = persia.nn.Embedding(IDS, 4, store=store, name="third", init=0.0)
    for one in (rows, other, third):
        step(one)
    store.flush()
    store.set_rows("count", [3, 4], torch.full((2, 4), 7.0))
    assert store.erase("count", [5]) == 1
    store.clear("other")
    store.drop("third")
    step(other, [1])
    store.close()
    store, rows = opened(tmp_path)
    values, _, there = store.rows_and_state("count", range(IDS))
    want = torch.ones(IDS)
    want[[3, 4]] = 7.0
    assert not there[5]
    assert torch.equal(values[:, 0][there], want[there])
    persia.nn.Embedding(IDS, 4, store=store, name="other", init=0.0)
    _, _, there = store.rows_and_state("other", range(IDS))
    assert there.nonzero().flatten().tolist() == [1]
    # Another table may have the name of the one that was dropped.
    third = persia.nn.Embedding(IDS, 8, store=store, name="third", init=0.0)
    assert not store.rows_and_state("third", range(IDS))[2].any()
    store.close()


def test_restores_are_in_the_log(tmp_path: Path) -> None:
    """Of checkpoints in two folders, the first of which is gone."""
    store, rows = opened(tmp_path / "log")
    places = [tmp_path / name / "out" for name in ("a", "b")]
    for place in places:
        step(rows)
        store.save(place)
    for place, count in zip(places, (1, 2)):
        step(rows)
        store.load(place)
        assert counts(rows).unique().tolist() == [count]
    shutil.rmtree(places[0].parent)
    step(rows, [1])
    store.close()
    store, rows = opened(tmp_path / "log")
    assert counts(rows)[:3].tolist() == [2, 3, 2]
    store.close()


def test_one_store_has_a_log_at_a_time(tmp_path: Path) -> None:
    store, rows = opened(tmp_path)
    step(rows)
    with pytest.raises(errors.Unavailable):
        opened(tmp_path)
    step(rows)
    assert counts(rows).unique().tolist() == [2]
    del store, rows  # without close()
    gc.collect()
    store, rows = opened(tmp_path)
    assert counts(rows).unique().tolist() == [2]
    store.close()


FORKS = """
import os, sys, time, torch, persia
store = persia.Store(
    persia.optim.SGD(lr=1.0), threads=1, durable="process", log=sys.argv[1]
)
rows = persia.nn.Embedding(64, 4, store=store, name="count", init=0.0)
(-rows(torch.arange(64)).sum()).backward()
store.flush()
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("forked", flush=True)
time.sleep(60)
"""


def test_a_forked_child_does_not_hold_the_log(tmp_path: Path) -> None:
    """As the workers of a torch DataLoader, which outlive a killed process
    for some seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any(line == "forked\n" for line in process.stdout)
        with pytest.raises(errors.Unavailable):
            opened(tmp_path)
        process.kill()
        process.wait()
        store, rows = opened(tmp_path)
        assert counts(rows).unique().tolist() == [1]
        store.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_copies_have_no_log(tmp_path: Path) -> None:
    store, rows = opened(tmp_path)
    step(rows)
    copied = copy.deepcopy(rows)
    step(copied)
    assert counts(rows).unique().tolist() == [1]
    assert counts(copied).unique().tolist() == [2]
    with pytest.warns(UserWarning, match="pickle"):
        raw = pickle.dumps(rows)
    assert counts(pickle.loads(raw)).unique().tolist() == [0]
    store.close()


def test_a_server_continues_the_log_of_a_store(tmp_path: Path) -> None:
    from tests.system.test_serve import serving

    store, rows = opened(tmp_path)
    step(rows)
    store.close()
    with serving("--durable", "process", "--log", str(tmp_path)) as server:
        remote = persia.Store(persia.optim.SGD(lr=1.0), servers=server.address)
        rows = counting(remote)
        step(rows)
        assert counts(rows).unique().tolist() == [2]
        remote.close()
    store, rows = opened(tmp_path)
    assert counts(rows).unique().tolist() == [2]
    store.close()


def _removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _altered(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "what", "from_cut"),
    [
        (_removed, "log-*", True),
        (_removed, "rows", True),
        (_removed, "rows/*table-0*", False),
        (_altered, "rows/*table-0*", False),
        (_altered, "rows/shard.json", False),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, harm: Callable[[Path], None], what: str, from_cut: bool
) -> None:
    """Files of the log, or of the rows beside it, that are gone or altered:
    nothing begins with the rest in silence, and `persia log verify` says the
    same."""
    store, rows = opened(tmp_path / "run", log_limit=1 << 16)
    folder = tmp_path / "run" / "default-0-of-1"
    while not (folder / "rows").exists():
        step(rows)
    store.close()
    store, rows = opened(tmp_path / "run")
    for _ in range(2):
        step(rows)
    store.close()
    (log,) = logs_in(tmp_path / "run")
    assert verified(log) == IDS and described(log)["cut"] > 0
    for path in folder.glob(what):
        harm(path)
    refused = (errors.CorruptFile, errors.StorageError)
    (log,) = logs_in(tmp_path / "run")
    with pytest.raises(errors.CorruptFile):
        _ = described(log), verified(log)
    with pytest.raises(refused, match=re.escape(str(folder))):
        opened(tmp_path / "run")
    config = ServeConfig(
        durable="process", log=str(tmp_path / "run"), log_from="cut"
    )
    if from_cut:
        server = Server(config)
        server.recover()
        server.close()
        store, rows = opened(tmp_path / "run")
        step(rows)
        store.close()
    else:
        with pytest.raises(refused, match=re.escape(str(folder))):
            Server(config).recover()


def test_a_bad_setting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: list[dict[str, Any]] = [
        {"durable": "ever", "log": tmp_path},
        {"durable": "process"},
        {"log": tmp_path},
        {"log_limit": 1 << 20},
        {"durable": "process", "log": ""},
        {"durable": "process", "log": 7},
        {"durable": "process", "log": tmp_path, "log_limit": 5},
        {"durable": "process", "log": tmp_path, "servers": "host:1"},
    ]
    for settings in bad:
        with pytest.raises(errors.InvalidArgument):
            persia.Store(**settings)
    monkeypatch.setenv("PERSIA_SERVERS", "host:1")
    with pytest.raises(errors.InvalidArgument):
        persia.Store(durable="process", log=tmp_path)
    monkeypatch.delenv("PERSIA_SERVERS")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(errors.StorageError):
        persia.Store(durable="process", log=file)
    assert os.listdir(tmp_path) == ["file"]
