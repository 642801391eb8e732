"""The commands, and how their errors are shown."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from rich.console import Console
from rich.text import Text

import persia
from persia import errors
from persia.base.arguments import hide_secrets
from persia.base.environment import drop_links, variable
from persia.base.logs import error_line
from persia.base.signals import ended
from persia.base.version import source_tree
from persia.cli import (
    certs,
    checkpoint,
    data,
    doctor,
    evaluate,
    feed,
    launch,
    plan,
    predict,
    prepare,
    report,
    rows,
    schema,
    serve,
    status,
    torture,
    train,
)
from persia.cli.shared import Commands
from persia.redaction import shown

__all__ = ["app", "main"]

_DEBUG = "PERSIA_DEBUG"


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """An error of the command line may quote a URL."""
        try:
            return super().invoke(ctx)
        except Exception as e:
            if isinstance(text := getattr(e, "message", None), str):
                e.message = shown(text)  # type: ignore[attr-defined]
            raise


app = Commands(
    name="persia",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # An option of a command also has a variable: PERSIA_TRAIN_DIM.
        "auto_envvar_prefix": "PERSIA",
    },
)


def _print_version(asked: bool) -> None:
    if not asked:
        return
    tree = source_tree()
    where = f", of the source tree {tree}" if tree is not None else ""
    print(f"persia {persia.__version__}{where}")
    raise typer.Exit


@app.callback()
def _persia(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            allow_from_autoenv=False,
            help="Show the version.",
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            envvar=_DEBUG,
            help="Show the traceback of an error.",
        ),
    ] = False,
) -> None:
    """Recommender models with embedding tables without bounds.

    Each option may also be in a file (--config) or a variable of the
    environment: PERSIA_TRAIN_DIM=32 is persia train --dim 32. The command
    line overrides the environment, which overrides the file.

    The exit code is 0; 1 after an error; 2 where an option, an argument or
    the file of --config is wrong; 130 after Ctrl-C and 143 after SIGTERM.
    """
    drop_links()  # before the options of a command look there
    if debug:  # also in the processes that the command starts
        os.environ[_DEBUG] = "1"


app.command("train")(train.command)
app.command("evaluate")(evaluate.command)
app.command("predict")(predict.command)
app.command("report")(report.command)
app.command("schema")(schema.command)
app.command("prepare")(prepare.command)
app.add_typer(checkpoint.commands, name="checkpoint")
app.add_typer(data.commands, name="data")
app.add_typer(rows.commands, name="rows")
app.add_typer(serve.commands, name="serve")
app.command("feed")(feed.command)
app.command("status")(status.command)
app.command("torture")(torture.command)
app.command("plan")(plan.command)
app.command("certs")(certs.command)
app.command("doctor")(doctor.command)
# What follows "--" is another program's.
_REST = {"allow_interspersed_args": False}
app.command("launch", context_settings=_REST)(launch.command)


def _show_traceback(
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(shown(text), end="", file=sys.stderr)


def main() -> None:
    """Runs a command; an error of Persia is one line, not a traceback."""
    sys.excepthook = _show_traceback
    threading.excepthook = lambda e: _show_traceback(*e[:3])
    drop_links()
    hide_secrets()
    try:
        app()
    except BaseException as e:
        number = ended()
        if number is not None:
            sys.last_value = e  # its stores do not wait for other ranks
            sys.exit(128 + number)
        if isinstance(e, errors.PersiaError):
            _fail(e, errors.line_of(e))
        if isinstance(e, ImportError):  # of what commands import themselves
            text = " ".join(str(e).splitlines())
            line = f"persia: error[{type(e).__name__}]: {text}"
            _fail(e, f"{line}; persia doctor examines all parts")
        raise


def _fail(error: Exception, text: str) -> NoReturn:
    if (variable(_DEBUG) or "0") != "0":
        raise error
    status = 2 if isinstance(error, errors.InvalidArgument) else 1
    code = getattr(error, "code", type(error).__name__)
    if line := error_line(code, text):
        print(line, file=sys.stderr, flush=True)
    else:
        console = Console(stderr=True, emoji=False)
        words = Text(text)
        words.highlight_regex(r"^persia: error\[\w+\]:", "bold red")
        console.print(words, soft_wrap=True)  # at once: ranks fail together
    # As an uncaught error: a rank that failed waits for no other one.
    sys.last_value = error
    sys.exit(status)
