"""A text file is read on from a byte, not from its beginning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia.data import Files, Schema
from persia.data.formats import lines, read_csv, read_json
from persia.data.formats import read_tfrecord as tfrecord
from persia.datasets import Criteo
from persia.train.config import TrainConfig
from persia.train.run import Run
from persia.train.trainer import Progress
from tests.sources.test_files import example, record
from tests.sources.test_table import same

SCHEMA = Schema.model_validate(
    {"label": "y", "dense": ["x"], "categorical": ["c", "t"]}
)
ROWS = 2000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (read_csv, read_json, lines):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(tfrecord, "PIECE_RECORDS", 100)


def values(i: int) -> tuple[int, int, str, str]:
    text = f'"text, {i}\n with a line ""end"""' if i % 3 == 0 else f"t{i}"
    return i % 2, i, f"c{i % 97}", text


def write_csv(path: Path) -> None:
    out = ["y,x,c,t\n"]
    for i in range(ROWS):
        out.append("bad\n" if i % 131 == 7 else "")
        out.append(",".join(map(str, values(i))) + "\n")
    path.write_bytes("".join(out).encode())


def write_json(path: Path) -> None:
    rows = [dict(zip("yxct", values(i), strict=True)) for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_criteo(path: Path) -> None:
    rng = np.random.default_rng(3)
    text = "".join(
        "\t".join(map(str, [i % 2, *rng.integers(0, 99, 39)])) + "\n"
        for i in range(ROWS)
    )
    path.write_text(text)


def write_tfrecord(path: Path) -> None:
    rows = [[[str(v).encode()] for v in values(i)] for i in range(ROWS)]
    path.write_bytes(
        b"".join(
            record(example(**dict(zip("yxct", row, strict=True))))
            for row in rows
        )
    )


def files(path: Path, size: int) -> Files:
    return Files(path, SCHEMA, size)


@pytest.mark.parametrize(
    ("suffix", "write", "make"),
    [
        ("csv", write_csv, files),
        ("jsonl", write_json, files),
        ("tfrecord", write_tfrecord, files),
        ("txt", write_criteo, Criteo),
    ],
)
def test_the_beginning_is_not_read_again(
    tmp_path: Path,
    suffix: str,
    write: Callable[[Path], None],
    make: Callable[[Path, int], Files],
) -> None:
    path = tmp_path / f"a.{suffix}"
    write(path)
    whole = path.read_bytes()
    data = make(path, 64)
    batches, states = [], []
    for batch in data:
        batches.append(batch)
        states.append(json.loads(json.dumps(data.state_dict())))
    assert len(batches) == 32
    marks = [state["at"]["place"][4] for state in states]
    assert len(set(marks)) > 5
    head = whole.index(b"\n") + 1 if suffix in ("csv", "txt") else 0
    for i in (3, 15, 27, 31):
        # Only what follows the mark, and the header, is as it was.
        rest = make(path, 64)
        begin = max(head, marks[i])
        noise = b"\xff" * (begin - head)
        path.write_bytes(whole[:head] + noise + whole[begin:])
        rest.load_state_dict(states[i])
        for a, b in zip(rest, batches[i + 1 :], strict=True):
            assert same(a, b)
        path.write_bytes(whole)
        states[i]["at"]["place"] = states[i]["at"]["place"][:3]  # no mark
        rest.load_state_dict(states[i])
        for a, b in zip(rest, batches[i + 1 :], strict=True):
            assert same(a, b)


FIELD = st.text(st.sampled_from('ab,"\n\r é'), max_size=6)


@pytest.mark.slow
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(FIELD, min_size=300, max_size=400))
def test_quotes_in_odd_places(tmp_path: Path, lines: list[str]) -> None:
    """A mark is right where pyarrow sees other rows than their quotes say."""
    path = tmp_path / "a.csv"
    body = [f"{i % 2},{i},c,{text}" for i, text in enumerate(lines)]
    path.write_bytes(("y,x,c,t\n" + "\n".join(body * 20)).encode())

    def rest(state: Any) -> list[Any]:
        data = Files(path, SCHEMA, 50, encoding=None, malformed_limit=1)
        if state is not None:
            data.load_state_dict(state)
        out = []
        try:
            for batch in data:
                out.append((batch, data.state_dict()))
        except Exception as error:
            out.append((type(error), None))
        return out

    every = rest(None)
    at = {
        place: i
        for i, (_, state) in enumerate(every)
        if state is not None and (place := tuple(state["at"]["place"][3:]))
    }
    for i in at.values():
        again = rest(every[i][1])
        for (a, _), (b, _) in zip(again, every[i + 1 :], strict=True):
            assert a is b if isinstance(a, type) else same(a, b)


def test_persia_train_goes_on_at_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_csv(path)
    text = path.read_bytes()
    (tmp_path / "a.yaml").write_text(SCHEMA.to_yaml())
    config = TrainConfig(
        data=str(path),
        schema=str(tmp_path / "a.yaml"),
        batch_size=64,
        dim=2,
        staleness=0,
        eval_split=0,
        save=str(tmp_path / "out"),
        threads=1,
    )
    whole = Run(config)
    assert whole.fit(lambda at: None)
    part = Run(config)

    def stop(at: Progress) -> None:
        if at.batch >= 20:
            part.trainer.stop()

    assert not part.trainer.fit(part.train, 1, stop, every=0)
    part.save()
    head = text.index(b"\n") + 1
    path.write_bytes(text[:head] + b"\xff" * 20_000 + text[head + 20_000 :])
    rest = Run(config, tmp_path / "out")
    assert rest.trainer.batch == part.trainer.batch >= 20
    assert rest.fit(lambda at: None)
    assert rest.trainer.samples + part.trainer.samples == whole.trainer.samples
    assert rest.result().rows == whole.result().rows
