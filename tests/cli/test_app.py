"""``persia`` itself, without a command."""

from __future__ import annotations

from importlib import metadata

import pytest
from typer.testing import CliRunner

from persia.cli.app import app


def test_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: f"1.2 of {name}")
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, "persia 1.2 of persia\n")


def test_a_source_tree_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", fail)
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert "source tree" in done.output and "not installed" in done.output
