"""The flags of a command, made from its configuration: each option is written
once, in the class that checks it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import typer
from pydantic.fields import FieldInfo

from persia.errors import InvalidArgument, flagged

Command = TypeVar("Command", bound=Callable[..., None])


def with_flags(
    model: type[pydantic.BaseModel],
    panels: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """A decorator of a command whose last parameter is ``**flags``.

    That parameter becomes an option for each field of ``model``, named by the
    field's alias if it has one; those given arrive in ``flags``. What the
    command line does not check as text is, the model checks.

    The command validates them and calls :func:`persia.cli.shared.begin` with
    all of them.

    Args:
        model: the configuration; descriptions become the help.
        panels: the first field of a group to the group's title in the help.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[:-1]
        panel, options = None, []
        for name, field in model.model_fields.items():
            panel = (panels or {}).get(name, panel)
            options.append(_parameter(field.alias or name, field, panel))
        every = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in (*own, *options)
        ]
        made: Any = command
        made.model = model
        made.fields = [p.name for p in options]
        made.__signature__ = signature.replace(parameters=every)
        made.__annotations__ = {p.name: p.annotation for p in every} | {
            "return": None
        }
        return command

    return decorate


def positional(data: str | None, flags: Mapping[str, Any]) -> dict[str, str]:
    """``data`` as the option it stands for, which is not given besides."""
    if data is None:
        return {}
    if "data" in flags:
        raise InvalidArgument(f"both {data!r} and --data {flags['data']!r}")
    return {"data": data}


def _parameter(
    name: str, field: FieldInfo, panel: str | None
) -> inspect.Parameter:
    required = field.is_required()
    kind = _kind(field)
    default = None if field.default_factory else field.default
    if isinstance(default, pydantic.ByteSize):
        default = default.human_readable().replace(".0", "")
    elif kind is str and default is not None:
        default = str(default)
    text = flagged(field.description or "")
    option = typer.Option(help=text or None, rich_help_panel=panel)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[
            kind if required or kind is bool else kind | None, option
        ],
    )


def _kind(field: FieldInfo) -> Any:
    """What typer makes of the word: a number, a path or one of a few words
    where the field takes nothing else, text else."""
    extra = field.json_schema_extra
    if isinstance(extra, Mapping) and "choices" in extra:
        choices: Any = extra["choices"]
        return Literal[tuple(choices)]
    annotation = field.annotation
    if isinstance(annotation, types.UnionType):
        some = [
            one
            for one in typing.get_args(annotation)
            if one is not types.NoneType
        ]
        # A number that may be None by a word of its own, such as "async".
        required = field.default is not None
        annotation = some[0] if len(some) == 1 and not required else str
    if typing.get_origin(annotation) is Literal:
        return annotation
    for plain in (bool, int, float, Path):
        if annotation is plain:
            return plain
    return str
