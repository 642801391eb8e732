"""Lines of a process as JSON, and its file of audits."""

from __future__ import annotations

import json
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest

import persia
from persia import _core
from persia.base.logs import audit, describe, lines_of_core, said, say
from persia.cli import bars
from persia.errors import PersiaError, StorageError
from tests.remote import Servers


def test_lines_say_what_the_process_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As long as its command runs."""
    for role in ("server", None):
        with said(form="json"):
            if role:
                describe(role=role)
            say("it serves", shard=3)
        line = json.loads(capsys.readouterr().out)
        assert (line["message"], line["shard"]) == ("it serves", 3)
        assert line.get("role") == role


def test_a_warning_is_a_line_without_a_place() -> None:
    given = ("use `rows=4`", UserWarning, "of_python.py", 7)
    with said():
        assert warnings.formatwarning(*given) == "warning: use --rows 4\n"
    assert "of_python.py:7" in warnings.formatwarning(*given)


def test_audits_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "audits"
    audit("nowhere")
    for i in range(2):
        with said(audits=path):
            describe(role="server")
            assert lines_of_core()["audit"] > 2
            audit("moved", shard=i)
        assert lines_of_core()["audit"] == 0
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(f["event"], f["role"], f["shard"]) for f in found] == [
        ("moved", "server", 0),
        ("moved", "server", 1),
    ]
    with (
        pytest.raises(StorageError),
        said(audits=tmp_path / "none" / "audits"),
    ):
        pass


@pytest.mark.skipif(not _core.GRPC[0].isdigit(), reason="without gRPC")
def test_audits_of_a_save_are_written_at_its_end(tmp_path: Path) -> None:
    """A save that fails is none."""
    audits = tmp_path / "audits"
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    with (
        said(audits=audits),
        closing(Servers(1, checkpoints=str(shared), **lines_of_core())) as s,
        closing(persia.Store(persia.optim.SGD(1.0), servers=s.text)) as store,
    ):
        store.add_table(persia.EmbeddingBagConfig("t", 4, ["f"]))
        folder = store.save(shared / "job")
        with pytest.raises(PersiaError):
            store.save(other / "job")
    found = [json.loads(line) for line in audits.read_text().splitlines()]
    assert [one["event"] for one in found] == [
        *("written", "saved"),
        *("not written", "not saved"),
    ]
    assert found[0]["rows"] == 0
    assert found[1]["folder"] == str(folder)


def test_progress_of_work_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "EVERY", 0.0)
    text = ""
    with said(form="json"), bars.watched("sent", lambda: (7, "7 samples")):
        while not text:
            time.sleep(0.01)
            text = capsys.readouterr().err
    assert json.loads(text.splitlines()[0])["done"] == 7
