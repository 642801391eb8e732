"""What holds for every command."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer.main
import yaml
from pyarrow import parquet
from typer.testing import CliRunner

import persia
from persia import _core
from persia.cli import app as app_module
from persia.cli.app import app, main
from persia.cli.shared import SHARED
from tests.remote import Servers


@dataclass
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


def call(*words: object) -> Done:
    """Runs a command as its process would, in this one."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.excepthook, threading.excepthook
    sys.argv = ["persia", *map(str, words)]
    status: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv, sys.excepthook, threading.excepthook = before
        with contextlib.suppress(AttributeError):
            del sys.last_value
    return Done(status, out.getvalue(), err.getvalue())


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for word, one in getattr(command, "commands", {}).items():
        if getattr(one, "commands", None):
            yield from leaves(one, f"{name}{word} ")
        else:
            yield f"{name}{word}", one


COMMANDS = dict(leaves(typer.main.get_command(app)))

#: What each command cannot do without; none of it is there.
NEEDED: dict[str, list[str]] = {
    "train": [],
    "evaluate": ["/none/root"],
    "predict": ["/none/root", "/none/a.csv"],
    "report": ["/none/root"],
    "export": ["/none/root", "/none/out"],
    "schema": ["/none/a.csv"],
    "prepare": ["avazu:/none/a.csv", "/none/out"],
    "data check": ["/none/a.csv"],
    "checkpoint ls": ["/none/root"],
    "checkpoint inspect": ["/none/root"],
    "checkpoint verify": ["/none/root"],
    "model ls": ["/none/root"],
    "model inspect": ["/none/root"],
    "model verify": ["/none/root"],
    "model diff": ["/none/root", "v-000001", "v-000002"],
    "model use": ["/none/root", "v-000001"],
    "model coverage": ["/none/root", "--data", "/none/a.csv"],
    "rows get": ["user", "7", "--checkpoint", "/none/root"],
    "rows explain": ["user", "7", "--checkpoint", "/none/root"],
    "rows top": ["user", "--checkpoint", "/none/root"],
    "rows near": ["user", "7", "--checkpoint", "/none/root"],
    "rows erase": ["user", "7", "--servers", "127.0.0.1:1"],
    "log inspect": ["/none/log"],
    "log verify": ["/none/log"],
    "serve ps": ["--token-file", "/none/token"],
    "serve worker": ["--token-file", "/none/token", "--servers", "a:1"],
    "serve model": ["/none/root"],
    "serve export": ["s3://bucket/out"],
    "feed": ["/none/a.csv", "--workers", "127.0.0.1:1"],
    "status": ["127.0.0.1:1"],
    "gate": ["--api", "http://127.0.0.1:1", "--namespace", "n"],
    "scale ps": ["--to", "2", "--servers", "127.0.0.1:1"],
    "torture": [],
    "plan": ["--rows", "1000"],
    "tokens add": ["tokens", "a", "--roles", "train"],
    "tokens rotate": ["/none/tokens", "a"],
    "tokens rm": ["/none/tokens", "a"],
    "tokens ls": ["/none/tokens"],
    "certs": ["certs"],
    "doctor": [],
    "launch": ["--ps-config", "/none/ps.yaml", "true"],
}


def words_of(name: str) -> list[str]:
    """The command with what it needs; ``launch`` takes no option after its
    own command."""
    return [*name.split(), *NEEDED[name]]


def with_option(name: str, *option: object) -> list[str]:
    return [*name.split(), *map(str, option), *NEEDED[name]]


def test_every_command_is_here() -> None:
    assert COMMANDS.keys() == NEEDED.keys()
    of_help = call("--help").stdout
    for name, text in app_module.COMMANDS.items():
        assert re.search(rf"{name} +{re.escape(text)}", of_help)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "not_imported"),
    [
        ([], {"torch", "numpy", "pyarrow", "pydantic", "yaml", "rich"}),
        (["train"], {"torch", "pyarrow", "rich"}),
        (["serve", "ps"], {"torch", "pyarrow", "rich"}),
    ],
)
def test_help_imports_little(words: list[str], not_imported: set[str]) -> None:
    """So it is there at once."""
    code = (
        f"import sys; sys.argv = ['persia', *{words}, '--help']\n"
        "from persia.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"some = {not_imported} & set(sys.modules)\n"
        "assert not some, some"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str) -> None:
    """What an option does, one style, an example."""
    command = COMMANDS[name]
    own = [p.name for p in command.params]
    assert own[-len(SHARED) :] == list(SHARED)
    examples = re.findall(
        rf"^(?:persia {name}|torchrun .* persia {name})\b", command.help, re.M
    )
    assert examples
    for param in command.params:
        text = " ".join((param.help or "").split())
        assert re.match(r"[A-Z0-9-]|host:port", text), (param.name, text)
        assert text.endswith("."), (param.name, text)
        assert len(text.split()) > 2, (param.name, text)
        assert not re.match(r"(Of|And|That) ", text), (param.name, text)
        assert "(default" not in text, (param.name, text)
        if param.name in ("grace", "timeout", "interval", "start_timeout"):
            assert "Seconds" in text
    done = call(*name.split(), "--help")
    assert done.status == 0 and f"persia {name}" in done.stdout


def complete(words: str) -> list[str]:
    environment = {
        "_PERSIA_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return CliRunner().invoke(app, [], env=environment).output.split()


def test_choices_are_completed() -> None:
    assert complete("persia train --model d") == [
        *("dlrm", "deepfm", "dcn"),
    ]
    assert "rowwise_adam" in complete("persia plan --optimizer r")
    assert complete("persia rows top --by a") == ["age"]
    assert complete("persia schema x --log-format j") == ["json"]
    assert "erase" in complete("persia rows e")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_printed_configuration_is_one(name: str, tmp_path: Path) -> None:
    """It names what was given, and prints itself again."""
    file = tmp_path / "options.yaml"
    done = call(*with_option(name, "--print-config"))
    assert done.status == 0, done
    options = yaml.safe_load(done.stdout)
    for word in NEEDED[name]:
        if not word.startswith("--"):
            assert word in json.dumps(options)
    file.write_text(done.stdout)
    again = call(*name.split(), "--config", file, "--print-config")
    assert again.status == 0, again
    assert again.stdout == done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_options_are_2(name: str, tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    for text in ("nothing: 1", "log-level: loud"):
        file.write_text(text)
        done = call(*with_option(name, "--config", file))
        assert done.status == 2, (text, done)
        said, name_ = (re.sub(r"\s", "", x) for x in (done.stderr, str(file)))
        assert not done.stdout and name_ in said  # lines are folded
    done = call(*with_option(name, "--no-such-option"))
    assert done.status == 2 and "no-such-option" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_path_is_1(name: str) -> None:
    words = words_of(name)
    if "/none" not in " ".join(words):
        words = with_option(name, "--config", "/none/options.yaml")
    done = call(*words)
    assert done.status == 1 and not done.stdout, done
    assert "error[StorageError]" in done.stderr and "/none" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "ps", "--port", 99999),
        ("serve", "ps", "--shard", "3/2"),
        ("feed", "synthetic", "--loader", "3/2"),
        ("train", "--dim", 0),
        ("train", "--model", "mlp"),
        ("train", "synthetic", "--data", "synthetic"),
        ("plan", "--rows", -1),
        ("certs", "keys", "--days", 0),
        ("rows", "get", "user", 7),
        ("status", "--interval", "nan"),
    ],
)
def test_wrong_values_are_2(
    words: Sequence[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERSIA_SERVERS", raising=False)
    done = call(*words)
    assert done.status == 2, done
    assert not done.stdout and done.stderr


def test_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM has tests with processes, which it ends."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("persia.train.load", interrupt)
    assert call("evaluate", "out").status == 130


def test_the_line_before_the_environment_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "o.yaml"
    for name, option, values in (
        ("certs x", "days", (5, 6, 7)),  # of typer
        ("plan --rows 9", "dim", (5, 6, 7)),  # of a configuration
        ("train", "batch-size", (5, 6, 7)),
        ("rows top t --checkpoint c", "by", ("age", "state", "norm")),
    ):
        words = [*name.split(), "--print-config", "--config", str(file)]
        key = option.replace("-", "_")
        prefix = "_".join(name.split(" --")[0].split()[:2]).upper()
        prefix = {"CERTS_X": "CERTS"}.get(prefix, prefix)
        file.write_text(f"{option}: {values[0]}")
        assert yaml.safe_load(call(*words).stdout)[key] == values[0]
        with monkeypatch.context() as patch:
            patch.setenv(f"PERSIA_{prefix}_{key.upper()}", str(values[1]))
            assert yaml.safe_load(call(*words).stdout)[key] == values[1]
            line = call(*words, f"--{option}", values[2])
            assert yaml.safe_load(line.stdout)[key] == values[2]
    # Of two that exclude each other the later source has its way.
    file.write_text("eval-split: 0.2")
    monkeypatch.setenv("PERSIA_TRAIN_EVAL_DATA", "x")
    words = ["train", "a.csv", "--config", str(file), "--print-config"]
    printed = yaml.safe_load(call(*words).stdout)
    assert "eval_split" not in printed and printed["eval_data"] == "x"


@pytest.mark.parametrize("name", COMMANDS)
def test_names_that_nothing_has_are_reported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of another version may be left over; a file is the user's
    own."""
    variable = f"PERSIA_{name.replace(' ', '_').upper()}_CONFIGG"
    monkeypatch.setenv(variable, "x")
    done = call(*with_option(name, "--print-config"))
    assert done.status == 0 and variable in done.stderr
    assert f"persia {name}" in done.stderr
    monkeypatch.delenv(variable)
    assert variable not in call(*with_option(name, "--print-config")).stderr
    file = tmp_path / "o.yaml"
    file.write_text("log-levle: info")
    done = call(*with_option(name, "--config", file))
    assert done.status == 2 and "log_level" in done.stderr


def test_secrets_are_not_printed() -> None:
    done = call("serve", "ps", "--token", "s3same", "--print-config")
    assert done.status == 0 and "s3same" not in done.stdout
    url = "s3://user:s3same@b/x?secret_key=s3same"
    for words in (("schema", url), ("train", url)):
        done = call(*words, "--print-config")
        assert done.status == 0 and "s3same" not in done.stdout + done.stderr


# ---- results ----------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """clicks.csv, and out: a model of it."""
    made = tmp_path_factory.mktemp("commands")
    at = np.arange(2000)
    frame = pd.DataFrame(
        {
            "user": [f"u{i % 40}" for i in at],
            "item": at * 7 % 50,
            "time": at + 1_600_000_000,
            "click": (at * at % 3 == 1).astype(int),
        }
    )
    frame.to_csv(made / "clicks.csv", index=False)
    (made / "s.yaml").write_text(
        "{label: click, categorical: [user, item], timestamp: time}"
    )
    done = call(
        *("train", made / "clicks.csv", "--schema", made / "s.yaml"),
        *("--batch-size", 256, "--dim", 4, "--threads", 1),
        *("--save", made / "out"),
    )
    assert done.status == 0, done
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


NO_RESULT = {
    *("serve ps", "serve worker", "serve model", "serve export"),
    *("gate", "launch"),
}


def test_results_are_json(folder: Path, tmp_path: Path) -> None:
    """One value on stdout, whatever else is said."""
    assert {
        name
        for name, command in COMMANDS.items()
        if "json" not in [p.name for p in command.params]
    } == NO_RESULT
    log, root = folder / "clicks.csv", folder / "out"
    schema = ("--schema", folder / "s.yaml")
    for words in (
        ("train", log, *schema, "--dim", 2, "--threads", 1),
        ("evaluate", root),
        ("predict", root, log, "--out", tmp_path / "p.txt"),
        ("report", root, "--out", tmp_path / "r.html"),
        ("schema", log),
        ("prepare", log, tmp_path / "sorted", *schema),
        ("data", "check", log, *schema),
        ("checkpoint", "ls", root),
        ("checkpoint", "inspect", root),
        ("checkpoint", "verify", root),
        ("rows", "get", "item", 7, "--checkpoint", root),
        ("rows", "explain", "item", 7, "--checkpoint", root),
        ("rows", "top", "item", "--checkpoint", root),
        ("plan", "--rows", 1e9, "--qps", 1e5),
        ("certs", tmp_path / "certs"),
    ):
        done = call(*words, "--json")
        assert done.status == 0, done
        assert done.stdout.count("\n") == 1
        assert json.loads(done.stdout), words


def test_lines_are_json(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "guessed.csv"
    log.write_bytes((folder / "clicks.csv").read_bytes())
    words = ["train", log, "--dim", 2, "--threads", 1]
    done = call(*words, "--log-format", "json", "--json")
    assert done.status == 0, done
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"info", "warning"} == {line["level"] for line in lines}
    for line in lines:
        pd.Timestamp(line["time"])
        assert line["message"]
    assert lines[-1]["role"] == "trainer"
    assert json.loads(done.stdout)["scores"]["samples"] > 0
    quiet = call(*words, "--log-level", "error", "--json")
    assert quiet.status == 0 and not quiet.stderr
    wrong = call("schema", "/none", "--log-format", "json")
    line = json.loads(wrong.stderr)
    assert (line["level"], line["code"]) == ("error", "StorageError")
    assert wrong.status == 1


def test_a_dry_run_changes_nothing(folder: Path, tmp_path: Path) -> None:
    log, root = folder / "clicks.csv", folder / "out"
    schema = ("--schema", folder / "s.yaml")
    before = contents(folder)
    for words, wrong in (
        (
            (
                "train",
                log,
                *schema,
                "--save",
                tmp_path / "a",
                "--servers",
                "x",
            ),
            ("--eval-data", folder / "s.yaml"),
        ),
        (
            ("train", log, *schema, "--publish-to", tmp_path / "v"),
            ("--publish-to", log),
        ),
        (
            ("train", log, *schema, "--save", tmp_path / "a"),
            ("--export-to", tmp_path / "a"),
        ),
        (
            ("predict", root, log, "--out", tmp_path / "p"),
            ("--columns", "none"),
        ),
        (
            ("prepare", log, tmp_path / "sorted", *schema),
            ("--chunk-samples", 0),
        ),
        (
            ("feed", log, *schema, "--workers", "127.0.0.1:1"),
            ("--label", "none"),
        ),
        (
            ("serve", "ps", "--checkpoints", tmp_path / "c"),
            ("--shard", "2/2"),
        ),
        (
            ("serve", "worker", "--servers", "127.0.0.1:1"),
            ("--token-file", tmp_path / "none"),
        ),
        (("serve", "export", tmp_path / "e"), ("s3://bucket/out",)),
    ):
        done = call(*words, "--dry-run")
        assert done.status == 0, done
        assert "would" in done.stdout
        if words[0] != "serve":  # which has no result
            done = call(*words, "--dry-run", "--json")
            assert done.status == 0 and json.loads(done.stdout)["would"]
        done = call(*words, "--dry-run", *wrong)
        assert done.status in (1, 2) and "would" not in done.stdout
    done = call("launch", "--ps", 2, "--dry-run", "--", "true", "--flag")
    assert done.status == 0 and done.stdout.count("would start") == 3
    assert contents(folder) == before
    assert not list(tmp_path.iterdir())


def test_predictions_with_columns(folder: Path, tmp_path: Path) -> None:
    """Rows of the data, in its order, whatever the format."""
    log, root = folder / "clicks.csv", folder / "out"
    frame = pd.read_csv(log)
    frame.to_parquet(tmp_path / "clicks.parquet", row_group_size=300)
    plain = call("predict", root, log, "--batch-size", 999)
    expected = [float(line) for line in plain.stdout.split()]
    for data in (log, tmp_path / "clicks.parquet"):
        for suffix in ("parquet", "csv"):
            out = tmp_path / f"p.{suffix}"
            done = call(
                *("predict", root, data, "--out", out, "--batch-size", 256),
                *("--columns", "user,time"),
            )
            assert done.status == 0, done
            read = pd.read_parquet if suffix == "parquet" else pd.read_csv
            found = read(out)
            assert list(found) == ["user", "time", "probability"]
            assert found["user"].tolist() == frame["user"].tolist()
            assert found["time"].astype(int).tolist() == frame["time"].tolist()
            np.testing.assert_allclose(
                found["probability"], expected, rtol=1e-5
            )
    assert parquet.read_table(tmp_path / "p.parquet").num_rows == len(frame)
    for wrong in (
        ("--out", tmp_path / "q.txt", "--columns", "user"),
        ("--columns", "user"),
        ("--json",),
    ):
        assert call("predict", root, log, *wrong).status == 2
    wrong = ("--out", tmp_path / "q.csv", "--columns", "nothing")
    assert call("predict", root, log, *wrong).status == 1
    assert not (tmp_path / "q.csv").exists()


def test_data_are_checked(folder: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(folder / "clicks.csv")
    schema = ("--schema", folder / "s.yaml")
    done = call("data", "check", folder / "clicks.csv", *schema, "--json")
    found = json.loads(done.stdout)
    assert found["samples"] == len(frame) and found["malformed"] == 0
    assert found["positive"] == {"click": int(frame["click"].sum())}
    lines = (folder / "clicks.csv").read_text().splitlines()
    lines[7] = "broken"
    (tmp_path / "a.csv").write_text("\n".join(lines))
    done = call("data", "check", tmp_path / "a.csv", *schema)
    assert done.status == 0 and "a.csv:8" in done.stdout
    lines[10:200] = ["broken"] * 190
    (tmp_path / "a.csv").write_text("\n".join(lines))
    done = call("data", "check", tmp_path / "a.csv", *schema)
    assert done.status == 1 and "LimitReached" in done.stderr
    (tmp_path / "a.csv").write_text(lines[0] + "\n")
    done = call("data", "check", tmp_path / "a.csv", *schema)
    assert done.status == 1 and "MalformedData" in done.stderr
    assert call("data", "check", "synthetic").status == 2


# ---- servers ----------------------------------------------------------------


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    if not _core.GRPC[0].isdigit():
        pytest.skip("built without gRPC")
    made = Servers(2, checkpoints=str(tmp_path))
    with contextlib.closing(made):
        yield made


def test_rows_are_erased(servers: Servers) -> None:
    where = ("--servers", servers.text)

    def erased(was: bool) -> dict[str, Any]:
        return {"table": "t", "rows": 2, "erased": was}

    with persia.Store(servers=servers.text) as store:
        store.add_table(persia.EmbeddingBagConfig("t", 2))
        store.set_rows("t", [1, -2, 3], np.ones((3, 2), np.float32))
    words = ("rows", "erase", "t", *where)
    done = call(*words, "--dry-run", "--json", "--", 1, -2, 1, 9)
    assert json.loads(done.stdout) == erased(False)
    done = call(*words, "--json", "--", 1, -2, 1, 9)
    assert json.loads(done.stdout) == erased(True)
    rows = json.loads(call("rows", "get", "t", 1, 3, *where, "--json").stdout)
    assert [row["present"] for row in rows] == [False, True]
    assert call("rows", "erase", "none", 1, *where).status == 2


def test_a_model_whose_rows_are_on_servers(
    servers: Servers, folder: Path, tmp_path: Path
) -> None:
    """Scores, predictions and report are those of the same rows here."""
    log, root = folder / "clicks.csv", tmp_path / "out"
    where = ("--servers", servers.text)
    done = call(
        *("train", log, "--schema", folder / "s.yaml", "--batch-size", 256),
        *("--dim", 4, "--threads", 1, "--save", root, *where),
    )
    assert done.status == 0, done
    for words in (("evaluate", root, log, "--json"), ("predict", root, log)):
        here, there = call(*words), call(*words, *where)
        assert here.status == there.status == 0, there
        assert here.stdout == there.stdout
    done = call("report", root, "--out", tmp_path / "r.html", *where)
    assert done.status == 0, done
    # They are the rows of the servers that count.
    ids = [str(one) for one in persia.hash_ids(["u1"]).tolist()]
    erased = call("rows", "erase", "user", *where, "--", *ids)
    assert erased.status == 0, erased
    there = call("predict", root, log, *where)
    assert there.stdout != call("predict", root, log).stdout


def test_nothing_is_waited_for_in_no_time() -> None:
    where = ("--servers", "127.0.0.1:1", "--timeout", 0)
    assert call("scale", "ps", "--to", 1, *where).status == 2


def test_decisions_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    """Before anything starts."""
    words = ("--autoscale", "--ps", "1:2", "--", "touch", tmp_path / "begun")
    done = call("launch", "--scale-log", tmp_path / "no" / "log", *words)
    assert done.status == 2 and "no/log" in done.stderr, done
    assert not list(tmp_path.iterdir())


def test_status_of_a_log_of_decisions_alone(tmp_path: Path) -> None:
    log = tmp_path / "scale.jsonl"
    done = call("status", "--scale-log", log)
    assert done.status == 1 and str(log) in done.stderr, done
    log.touch()  # as persia launch makes it
    done = call("status", "--scale-log", log)
    assert done.status == 0 and done.stdout, done
    line = {"at": 0, "text": "scale: servers 1 -> 2"}
    log.write_text(json.dumps(line) + "\n")
    done = call("status", "--scale-log", log)
    assert done.status == 0 and "servers 1 -> 2" in done.stdout, done
