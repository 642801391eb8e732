"""The commands, and how their errors are shown."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Annotated, Any, NoReturn

import typer
import typer.core

import persia
from persia import errors
from persia.base.arguments import hide_secrets
from persia.base.environment import drop_links, variable
from persia.base.logs import error_line
from persia.base.signals import ended
from persia.base.version import source_tree
from persia.redaction import shown

_DEBUG = "PERSIA_DEBUG"


#: Commands, which are imported when they are needed, in the order of the
#: help, and what they do.
COMMANDS = {
    "train": "Train a click model, then score it on samples it has not seen.",
    "evaluate": "Score a saved model: AUC, log loss, calibration.",
    "predict": "Write the probability of a click for each sample.",
    "report": "Write an HTML file about a saved model.",
    "export": "Make a saved model ready to be served.",
    "schema": "Print a schema, to edit and pass to persia train --schema.",
    "prepare": "Sort a log by its timestamps, in bounded memory.",
    "data": "Check files of samples.",
    "checkpoint": "List, inspect and verify checkpoints, local or remote.",
    "model": "List, inspect, verify and compare exports.",
    "rows": "Look at single rows, or erase them.",
    "log": "Look into the logs of servers, and verify them.",
    "serve": "Serve rows, batches with their embeddings, models, or exports.",
    "feed": "Send the batches of a data set to embedding workers.",
    "status": "Show what servers hold and do.",
    "scale": "Give a job that runs more or fewer processes.",
    "gate": "Make the number of servers in a cluster follow a ScaleGate.",
    "launch": "Start parameter servers here, and a command that uses them.",
    "plan": "Work out how many servers a job needs, and their memory.",
    "tokens": "Make, rotate and list the tokens of servers.",
    "certs": "Make a set of certificates and tokens for tests.",
    "doctor": "Examine this installation and machine.",
    "torture": "Kill processes of jobs on this machine, to test them.",
}


class _Imported(dict[str, Any]):
    """The commands by their names; each is imported when it is asked for."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COMMANDS))

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is None:
            from persia.cli.shared import made

            module = importlib.import_module(f"persia.cli.{name}")
            found = self[name] = made(name, module)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


class _Commands(typer.core.TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Imported()
        self._in_brief = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._in_brief:
            return typer.core.TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._in_brief = True
        super().format_help(ctx, formatter)
        self._in_brief = False

    def invoke(self, ctx: Any) -> Any:
        """An error of the command line may quote a URL."""
        try:
            return super().invoke(ctx)
        except Exception as e:
            if isinstance(text := getattr(e, "message", None), str):
                e.message = shown(text)  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="persia",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "max_content_width": 100,
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
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, emoji=False)
        words = Text(text)
        words.highlight_regex(r"^persia: error\[\w+\]:", "bold red")
        console.print(words, soft_wrap=True)  # at once: ranks fail together
    # As an uncaught error: a rank that failed waits for no other one.
    sys.last_value = error
    sys.exit(status)
