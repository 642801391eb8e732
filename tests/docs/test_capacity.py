"""What the page about capacity shows is what the command prints."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from persia.cli.app import app
from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "howto" / "capacity.md"
ASKED = blocks(PAGE, "sh")
SHOWN = blocks(PAGE, "text")


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_the_output_is_that_of_the_command(number: int) -> None:
    assert len(ASKED) == len(SHOWN) >= 3
    program, *words = shlex.split(ASKED[number].text)
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert program == "persia" and done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.output.strip().splitlines()]
    assert lines == SHOWN[number].text.strip().splitlines()
