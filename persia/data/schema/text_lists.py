"""Lists of values as texts, as CSV has them.

One rule: a text in brackets or braces is a list as JSON, Python, DuckDB,
Polars, NumPy or PostgreSQL write it; any other text is divided at the
column's separator. Spaces around values do not count, and neither do empty
values and ``null``.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from persia.data.schema.canonical import digits

_CLOSING = {"[": "]", "{": "}"}
_NULLS = {"", "null", "NULL", "None", "nan", "NaN"}
_TOKEN = re.compile(
    r"""\s*(?:"((?:[^"\\]|\\.|"")*)"|'((?:[^'\\]|\\.|'')*)'|([^,"'\[\]{}]*))"""
    r"""\s*(,|$|(?=["']))""",
    re.DOTALL,
)
_NUMBERS = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?", re.IGNORECASE)
_NUMBER = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?"
)


def any_bracketed(column: pa.Array) -> bool:
    """Whether a text, a string or bytes, may be a list in brackets or
    braces."""
    return any(
        pc.any(pc.starts_with(column, begin)).as_py()
        for begin in ("[", "{", " ")
    )


def list_values(text: str, separator: str) -> list[str] | None:
    """The values of a text; None: it is a list in brackets, and malformed.

    Args:
        text: of a field.
        separator: of texts without brackets.
    """
    text = text.strip()
    close = _CLOSING.get(text[:1])
    if close is None or text[-1] != close or len(text) < 2:
        parts = [part.strip(" \t") for part in text.split(separator)]
        return [part for part in parts if part]
    found: list[tuple[str, bool]] = []
    inner, at = text[1:-1], 0
    if not inner.strip():
        return []
    while True:
        match = _TOKEN.match(inner, at)
        if match is None or (match.end() == at and at < len(inner)):
            return None
        at = match.end()
        double, single, bare = match.group(1, 2, 3)
        if double is not None:
            value = _unescaped(double, '"')
        elif single is not None:
            value = _unescaped(single, "'")
        else:
            value = bare.strip()
        if value is None:
            return None
        found.append((value, bare is not None))
        if match.group(4) != "," and at >= len(inner):
            break
    if len(found) == 1 and found[0][1]:  # as NumPy writes numbers
        parts = found[0][0].split()
        if len(parts) > 1 and all(map(_NUMBERS.fullmatch, parts)):
            found = [(part, True) for part in parts]
    out = [_said(value) if bare else value for value, bare in found]
    return [value for value in out if value]


def _said(value: str) -> str:
    """What a value without quotes is: a number or a boolean has the text of
    its value, null has none."""
    if value in _NULLS:
        return ""
    if value in ("True", "False"):
        return value.lower()
    return digits(Decimal(value)) if _NUMBER.fullmatch(value) else value


def _unescaped(text: str, quote: str) -> str | None:
    """What stands between quotes; None: it is malformed."""
    text = text.replace(2 * quote, quote)
    if "\\" not in text:
        return text
    if quote == '"' or "\\u" in text or "\\x" in text:
        body = text.replace('\\"', '"').replace('"', '\\"')
        body = body.replace("\\'", "'")
        body = re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", body)
        try:
            said = str(json.loads(f'"{body}"', strict=False))
            return said.encode().decode()
        except UnicodeEncodeError:  # half a character
            return None
        except ValueError:
            pass
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
