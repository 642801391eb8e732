"""What all commands share: options from files and from the environment, logs,
and the options that show what would be done.

An option is that of the command line, else that of the environment, else that
of the file of ``--config``, else its default.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
import typer
import typer.core
import typer.main
import yaml
from typer.models import ArgumentInfo, OptionInfo

from persia.base.logs import Format, Level, said, say
from persia.base.options import read_yaml, secret
from persia.errors import InvalidArgument
from persia.redaction import shown

PANEL = "All commands"


def _read(ctx: typer.Context, value: Path | None) -> Path | None:
    """The file becomes the defaults of the command."""
    if value is not None and not ctx.resilient_parsing:
        ctx.default_map = _defaults(ctx, value)
    return value


_Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        show_envvar=False,
        metavar="<file>",
        is_eager=True,
        callback=_read,
        rich_help_panel=PANEL,
        help="YAML file of these options; the environment and the command "
        "line override it.",
    ),
]
_Print = Annotated[
    bool,
    typer.Option(
        "--print-config",
        allow_from_autoenv=False,
        show_envvar=False,
        rich_help_panel=PANEL,
        help="Print the options that would be used, as a file for --config, "
        "and end.",
    ),
]
_Level = Annotated[
    Level,
    typer.Option(
        "--log-level",
        envvar="PERSIA_LOG_LEVEL",
        rich_help_panel=PANEL,
        help="The least important lines to write.",
    ),
]
_Format = Annotated[
    Format,
    typer.Option(
        "--log-format",
        envvar="PERSIA_LOG_FORMAT",
        rich_help_panel=PANEL,
        help="How lines that are no results are written: text, or json, an "
        "object a line.",
    ),
]

_Audits = Annotated[
    Path | None,
    typer.Option(
        "--audit-log",
        envvar="PERSIA_AUDIT_LOG",
        metavar="<file>",
        rich_help_panel=PANEL,
        help="Append who changed what to this file, as JSON: administration, "
        "denied calls, erased rows, tokens, decisions of scaling.",
    ),
]

SHARED: Mapping[str, tuple[Any, Any]] = {
    "config": (_Config, None),
    "print_config": (_Print, False),
    "log_level": (_Level, "info"),
    "log_format": (_Format, "text"),
    "audit_log": (_Audits, None),
}
"""The options of every command, with types and defaults."""


class Commands(typer.Typer):
    """Commands of which each has the options of all. Help and errors of the
    command line are plain text: what draws frames takes 0.2 s to import."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(rich_markup_mode=None, **settings)

    def command(  # type: ignore[override]
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        add = super().command

        def decorate(command: Callable[..., None]) -> Callable[..., None]:
            first = inspect.cleandoc(command.__doc__ or "").split("\n\n")[0]
            brief = " ".join(first.split())  # a list of commands has it whole
            made = add(name, cls=_Command, short_help=brief, **settings)
            made(_shared(command))
            return command

        return decorate


def made(name: str, module: Any) -> Any:
    """The command that a module of this package has, by its ``command``, or a
    group of them, by its ``commands``."""
    commands = getattr(module, "commands", None)
    if commands is None:
        commands = Commands(add_completion=False)
        settings = getattr(module, "SETTINGS", {})
        commands.command(name, context_settings=settings)(module.command)
        return typer.main.get_command(commands)
    group = typer.main.get_group(commands)
    group.name = name
    return group


class _Command(typer.core.TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        """In groups, those of all commands last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = getattr(param, "rich_help_panel", None) or (
                    "Options" if record[0].startswith("-") else "Arguments"
                )
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """A wrong value is shown with the file or variable that has it."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            param: Any = error.param
            source = param and _source(ctx, param.name)
            if source == "file":
                where = str(ctx.params.get("config"))
            elif source == "environment":
                where = _variable(ctx, param)
            else:
                raise
            error.message = f"{error.message.rstrip('.')}; it is in {where}."
            raise


def _variable(ctx: Any, param: Any) -> str:
    if param.envvar:
        return str(param.envvar)
    return f"{ctx.auto_envvar_prefix}_{param.name.upper()}"


def _warn_of_variables(ctx: Any) -> None:
    """Names variables that look like options of this command and are none."""
    prefix = f"{ctx.auto_envvar_prefix}_"
    known = sorted(_variable(ctx, p) for p in ctx.command.params)
    for name in sorted(os.environ.keys() - {*known}):
        if name.startswith(prefix):
            program = ctx.find_root().command_path
            command = ctx.command_path.removeprefix(f"{program} ")
            say(
                f"{name} is no option of persia {command}"
                + _meant(name, known),
                "warning",
            )


def _meant(name: str, known: Iterable[str]) -> str:
    """What follows the complaint about a name: one like it, else all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, 0.8)
    if close:
        return f"; is {close[0]} meant?"
    return f"; there are {', '.join(known)}"


_SOURCES = {
    "COMMANDLINE": "line",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "file",
}


class _Now(NamedTuple):
    """The command that runs: where its options are from, and those of all."""

    sources: Mapping[str, str | None]
    config: Path | None = None
    print_config: bool = False
    log_level: Level = "info"
    log_format: Format = "text"
    audit_log: Path | None = None


_NONE = _Now({})
_now: ContextVar[_Now] = ContextVar("now")


def _source(ctx: Any, name: str) -> str | None:
    """Where an option is from; None: it has its default."""
    found = ctx.get_parameter_source(name)
    return None if found is None else _SOURCES.get(found.name)


def log_variables() -> dict[str, str]:
    """The variables with which processes that a command starts write their
    lines as it does."""
    now = _now.get(_NONE)
    found: dict[str, str] = {
        "PERSIA_LOG_LEVEL": now.log_level,
        "PERSIA_LOG_FORMAT": now.log_format,
    }
    if now.audit_log is not None:
        found["PERSIA_AUDIT_LOG"] = str(now.audit_log.absolute())
    return found


def layers(flags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Options of the command that runs, by their source: those of its file,
    of the environment and of the command line."""
    sources = _now.get(_NONE).sources
    found: dict[str, dict[str, Any]] = {
        source: {} for source in ("file", "environment", "line")
    }
    for name, value in flags.items():
        found[sources.get(name) or "line"][name] = value
    return list(found.values())


def begin(options: Mapping[str, Any]) -> None:
    """Is called where work would begin: with ``--print-config`` it prints the
    options, and the command ends."""
    if _now.get(_NONE).print_config:
        print(_as_yaml(options), end="")
        raise typer.Exit


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of all."""
    signature = inspect.signature(command, eval_str=True)
    own = [_tidy(p) for p in signature.parameters.values()]
    model = getattr(command, "model", None)
    fields = set(getattr(command, "fields", ()))

    @functools.wraps(command)
    def run(ctx: typer.Context, **given: Any) -> None:
        sources = {p.name: _source(ctx, p.name) for p in own}
        of_all = {name: given.pop(name) for name in SHARED}
        options = {
            name: value
            for name, value in given.items()
            if name not in fields or sources[name] is not None
        }
        with said(
            of_all["log_level"],
            of_all["log_format"],
            results=bool(given.get("json")),
            audits=of_all["audit_log"],
        ):
            _warn_of_variables(ctx)
            token = _now.set(_Now(sources, **of_all))
            try:
                if model is None:  # else it calls begin() with all of them
                    begin(options)
                command(**options)
            finally:
                _now.reset(token)

    every = [
        inspect.Parameter(
            "ctx",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=typer.Context,
        ),
        *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own),
        *(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=kind,
                default=default,
            )
            for name, (kind, default) in SHARED.items()
        ),
    ]
    made: Any = run
    made.__signature__ = signature.replace(parameters=every)
    made.__annotations__ = {p.name: p.annotation for p in every} | {
        "return": None
    }
    return run


def _tidy(parameter: inspect.Parameter) -> inspect.Parameter:
    """One style of help: "(default: ...)" in it becomes that of others. The
    variable of each option is not shown, as all follow from one rule."""
    for info in typing.get_args(parameter.annotation):
        if isinstance(info, OptionInfo | ArgumentInfo):
            text = info.help or ""
            found = re.fullmatch(r"(.*?)\s*\(default: (.*)\)(\.?)", text, re.S)
            if found is not None:
                info.help = found[1] + found[3]
                info.show_default = found[2]
            info.show_envvar = info.envvar is not None
    return parameter


# ---- files of options -------------------------------------------------------


def _defaults(ctx: typer.Context, path: Path) -> dict[str, Any]:
    """The options in a file, by the names of the parameters."""
    known: dict[str, Any] = {}
    for param in ctx.command.params:
        is_option = param.opts[0].startswith("-")
        name = param.opts[0].lstrip("-").replace("-", "_")
        if not is_option:  # "data" of train is "file" here
            given = getattr(param, "metavar", None) or ""
            name = given if given.isidentifier() else str(param.name)
        wanted = param.name not in ("config", "help")
        if wanted and (is_option or name not in known):
            known[name] = param
    found = {}
    for name, value in read_yaml(path).items():
        if name not in known:
            raise InvalidArgument(
                f"--config {path}: {name}: no such option"
                + _meant(name, known)
            )
        if value is not None:
            where = f"--config {path}: {name}"
            found[known[name].name] = _word(where, known[name], value)
    return found


def _word(where: str, param: Any, value: Any) -> Any:
    """A value of YAML as the command line would have it."""
    if getattr(param, "multiple", False) or param.nargs == -1:
        some = value if isinstance(value, list) else [value]
        return [_text(where, one) for one in some]
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{where} is not true or false")
        return value
    return _text(where, value)


def _text(where: str, value: Any) -> str:
    scalar = str | int | float | datetime.date
    if not isinstance(value, scalar) or isinstance(value, bool):
        raise InvalidArgument(
            f"{where} is no text or number: put quotes around it"
        )
    return str(value)


def _as_yaml(options: Mapping[str, Any]) -> str:
    """A file of options, without secrets."""
    found = {
        name: _plain(value)
        for name, value in options.items()
        if value is not None
        and not isinstance(value, pydantic.SecretStr)
        and not (secret(name) and not isinstance(value, Path))
    }
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bool | int | float):
        return value
    return shown(str(value))
