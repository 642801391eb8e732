"""Options from YAML files, checked by a configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from persia import errors

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

# Names of options whose values are shown to no one.
_SECRET = re.compile("token|key|secret|password")

Model = TypeVar("Model", bound=pydantic.BaseModel)


def read_yaml(path: Path, option: str = "--config") -> dict[str, Any]:
    """The options in a YAML file, ``batch-size`` or ``batch_size``.

    Args:
        path: of the file.
        option: that names it, for errors.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise errors.StorageError(f"{option} {path}: {e.strerror or e}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        # The rest of what it says shows lines of the file.
        raise errors.InvalidArgument(
            f"{option} {path}: no YAML: {_problem(e)}"
        ) from None
    if not isinstance(content, dict):
        raise errors.InvalidArgument(
            f"{option} {path}: need lines 'option: value', such as 'dim: 16'"
        )
    return {str(k).replace("-", "_"): value for k, value in content.items()}


def validated(model: type[Model], options: dict[str, Any]) -> Model:
    """The options as a configuration: InvalidArgument names the wrong ones."""
    try:
        return model.model_validate(options)
    except pydantic.ValidationError as e:
        raise errors.InvalidArgument(
            "; ".join(_explain(error, model) for error in e.errors())
        ) from None


def secret(name: str) -> bool:
    """Whether the value of an option of this name is shown to no one."""
    return _SECRET.search(name) is not None


def _problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return "it is no text in UTF-8"
    mark = error.problem_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    # It may quote a word of the file.
    return where + re.sub("'[^']{2,}'", "'...'", error.problem or "")


def _explain(error: Any, model: type[pydantic.BaseModel]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = (
            field.alias or key for key, field in model.model_fields.items()
        )
        return f"{name}: no such option; there are {', '.join(known)}"
    message = error["msg"].removeprefix("Value error, ")
    if secret(name):
        return f"{name}: {message}"
    return f"{name}: {message}, not {error['input']!r}" if name else message


def seconds_of(span: str) -> float:
    """The seconds of "1d", "6h", "30m", "90s" or "2w".

    Raises:
        ValueError: it is none of them.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([smhdw])", span)
    if found is None or not float(found[1]):
        raise ValueError(
            f"{span!r}: need a number and s, m, h, d or w, such as 1d"
        )
    return float(found[1]) * _UNITS[found[2]]
