"""``persia`` itself, without a command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import persia
from persia import _core, errors
from persia.cli.app import app
from persia.distributed.cluster import Settings
from persia.distributed.server import ServeConfig
from persia.distributed.worker import WorkerConfig
from tests.remote import Servers

ROOT = Path(__file__).parents[2]


def test_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the code which runs, not of what pip knows by the name."""
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output.startswith(f"persia {persia.__version__}")
    assert str(ROOT) in done.output.replace("\n", "")
    monkeypatch.setattr("persia.cli.app.source_tree", lambda: None)
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (
        0,
        f"persia {persia.__version__}\n",
    )


def test_short_help_and_completion() -> None:
    for words in (["-h"], ["train", "-h"], ["serve", "ps", "-h"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and "Usage" in done.output
    done = CliRunner().invoke(
        app,
        [],
        env={
            "_PERSIA_COMPLETE": "complete_bash",
            "COMP_WORDS": "persia ch",
            "COMP_CWORD": "1",
        },
    )
    assert "checkpoint" in done.output


def test_an_option_is_also_a_variable(tmp_path: Path) -> None:
    environment = {
        "PERSIA_CERTS_DAYS": "0",  # out of range
        "PERSIA_VERSION": "1",  # of others: no flag
    }
    words = ["certs", str(tmp_path / "keys")]
    done = CliRunner().invoke(app, words, env=environment)
    assert done.exit_code == 2
    done = CliRunner().invoke(app, [*words, "--days", "1"], env=environment)
    assert done.exit_code == 0
    assert (tmp_path / "keys" / "ca.pem").exists()


def test_errors_have_stable_codes() -> None:
    """That of the C core is the name of a class, also of a user's subclass."""
    for name in errors.__all__:
        assert getattr(errors, name).code == name
    assert set(_core.error_names()) - {"Ok"} <= set(errors.__all__)

    class Own(errors.StorageError):
        pass

    line = errors.line_of(Own("a\nb"))
    assert line == "persia: error[StorageError]: a b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("`save_on_exit` needs `checkpoints`", "--save-on-exit needs --c"),
        ("`save=s3://b/o`: a folder", "--save s3://b/o: a folder"),
        ("`a b` and `C`", "`a b` and `C`"),
    ],
)
def test_options_in_an_error_are_flags_in_its_line(
    text: str, said: str
) -> None:
    """The library, which raises it, knows of no command line."""
    error = errors.InvalidArgument(text)
    assert str(error) == text
    assert said in errors.line_of(error)


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_a_line_or_a_traceback(debug: bool) -> None:
    words = ["--debug"] if debug else []
    words += ["checkpoint", "inspect", "/nowhere"]
    done = subprocess.run(
        [sys.executable, "-m", "persia", *words],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    line = done.stderr.splitlines()[0]
    assert debug or line.startswith("persia: error[StorageError]: ")
    assert debug or len(done.stderr.splitlines()) == 1
    assert "StorageError" in done.stderr
    assert ("Traceback" in done.stderr) == debug


def test_the_namespace_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All parts of a job read it; what is given comes first."""
    monkeypatch.setenv("PERSIA_NAMESPACE", "job7")
    assert Settings().namespace == "job7"
    assert ServeConfig().namespace == WorkerConfig().namespace == "job7"
    assert ServeConfig(namespace="own").namespace == "own"
    wide = {"COLUMNS": "200"}
    for command in (["status"], ["rows", "get"], ["train"], ["feed"]):
        done = CliRunner().invoke(app, [*command, "--help"], env=wide)
        assert "PERSIA_NAMESPACE" in done.output
    with contextlib.closing(Servers(1, "job7")) as servers:
        for given, refused in ((None, False), ("other", True)):
            try:
                persia.Store(servers=servers.text, namespace=given).close()
            except errors.SchemaMismatch:
                assert refused
            else:
                assert not refused
    monkeypatch.delenv("PERSIA_NAMESPACE")
    assert Settings().namespace == ServeConfig().namespace == "default"


def test_servers_take_a_folder_or_a_url() -> None:
    for url in ("hdfs://name:8020/jobs", "s3://bucket/jobs"):
        config = ServeConfig.model_validate({"checkpoints": url})
        assert (config.folder, config.far) == (None, url)
    for folder in ("/a/jobs", "file:///a/jobs", Path("/a/jobs")):
        config = ServeConfig.model_validate({"checkpoints": folder})
        assert (config.folder, config.far) == (Path("/a/jobs"), None)
    with pytest.raises(ValueError, match="//"):  # Path() takes one away
        ServeConfig.model_validate({"checkpoints": Path("s3://bucket/jobs")})
