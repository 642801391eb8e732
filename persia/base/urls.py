"""Paths and URLs: the one type of them, for data, checkpoints, exports."""

from __future__ import annotations

import os
import re
from typing import Self
from urllib.parse import parse_qsl, unquote

from persia import errors
from persia.redaction import MARK, cut, shown_url

#: What makes a pattern of a name.
ANY = re.compile(r"[*?\[]")

# simplecache::https://HOST/a.csv and zip://a.csv::https://HOST/z.zip
_URL = re.compile(r"((?:[A-Za-z0-9+.-]+::)*)([A-Za-z][A-Za-z0-9+.-]*)://")
_NEXT = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?:://|::))")
_ESCAPED = re.compile(r"\[([*?\[])\]")
_QUOTED = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
# Without ports, so that a ":" is of a key.
_BUCKETS = {"s3", "gs", "gcs"}


class Url(str):
    """A path of this machine, or a URL.

    It prints itself without users, passwords, keys and signatures; what opens
    it has it :attr:`whole`.

    ``scheme://user@host/path?query``. A path is taken as it is written:
    blanks, ``%``, ``#`` and letters of any language are those of the name.
    Options begin at a ``?`` that ``NAME=`` follows.

    Args:
        text: the path or URL. Of a Url the same.
        whole: what opens it, where that is more than its text.
    """

    __slots__ = ("_whole",)

    _whole: str

    def __new__(
        cls, text: str | os.PathLike[str], whole: str | None = None
    ) -> Self:
        text = os.fspath(text)
        if whole is None:
            whole = text._whole if isinstance(text, Url) else text
        one = super().__new__(cls, str.__str__(text))
        one._whole = whole
        return one

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str.__str__(self), self._whole

    def __str__(self) -> str:
        return shown_url(str.__str__(self))

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    @classmethod
    def to_open(cls, text: str | os.PathLike[str]) -> Self:
        """One that is about to be opened.

        Raises:
            InvalidArgument: it is what a checkpoint has kept of a URL.
        """
        url = cls(text)
        if url.scheme and MARK in url.whole:
            raise errors.InvalidArgument(
                f"{url} is what a checkpoint has kept of a URL, which is "
                "neither key nor signature: give the option with the whole "
                "URL again (`data`, `eval_data`, `save`)"
            )
        return url

    @property
    def whole(self) -> str:
        """All of it."""
        return self._whole

    @property
    def secret(self) -> bool:
        """Whether a part of it is not shown."""
        return shown_url(self._whole) != self._whole

    # ---- its parts

    @property
    def scheme(self) -> str:
        """ "s3" of s3://bucket/a; "" of a path."""
        found = _URL.match(self._whole)
        return found[2].lower() if found else ""

    @property
    def before(self) -> str:
        """What chained schemes have before: "simplecache::"."""
        found = _URL.match(self._whole)
        return found[1] if found else ""

    @property
    def after(self) -> str:
        """What chained URLs have behind: "::https://host/z.zip"."""
        rest = self._rest
        found = _NEXT.search(rest)
        return rest[found.start() :] if found else ""

    @property
    def user(self) -> str:
        """The user, with its password, as it is written."""
        return self._divided[0]

    @property
    def host(self) -> str:
        """The host and port, bucket, or container."""
        return self._divided[1]

    @property
    def path(self) -> str:
        """The path behind the host, with its first slash."""
        return self._divided[2]

    @property
    def query(self) -> str:
        """The options, as they are written."""
        return self._divided[3].removeprefix("?")

    @property
    def options(self) -> dict[str, str]:
        """The options."""
        return dict(parse_qsl(self.query, keep_blank_values=True))

    @property
    def _rest(self) -> str:
        found = _URL.match(self._whole)
        return self._whole[found.end() :] if found else ""

    @property
    def _divided(self) -> tuple[str, str, str, str]:
        """(user, host, path, options with their "?")."""
        if not self.scheme:
            return "", "", self._whole, ""
        rest = self._rest.removesuffix(self.after)
        place, query = cut(self.scheme, rest)
        host = re.split("[/?#]", place)[0]
        at = host.rfind("@") + 1
        if not at and ":" in host and self.scheme in _BUCKETS:
            at = place.rfind("@") + 1  # KEY:SEC/RET@bucket
        user, place = place[: max(0, at - 1)], place[at:]
        if "*" in host or "?" in host:  # no host: memory://*.csv
            return user, "", place, query
        host, slash, path = place.partition("/")
        if self.scheme in ("http", "https"):
            path, mark, fragment = path.partition("#")
            query = mark + fragment + query
        return user, host, slash + path, query

    # ---- others like it

    def at(self, path: str) -> Url:
        """That of another path."""
        if not self.scheme:
            return Url(path)
        user, host, _, query = self._divided
        head = f"{self.before}{self.scheme}://{user}{'@' if user else ''}"
        return Url(f"{head}{host}{path}{query}{self.after}")

    @property
    def named(self) -> Url:
        """The same by its name alone, for lists and messages: without secret
        and options. It opens as the whole does."""
        if not self.scheme:
            return self
        place = cut(self.scheme, self._rest.removesuffix(self.after))[0]
        text = f"{self.before}{self.scheme}://{place}{self.after}"
        return Url(shown_url(text), self._whole)

    @property
    def local(self) -> str | None:
        """The path on this machine; None: it is elsewhere."""
        if not self.scheme:
            return self._whole
        return unquote(self.path) if self.scheme == "file" else None


def pattern_of(name: str, scheme: str = "") -> str:
    """The path of a URL that means a name and no other."""
    if scheme == "file":  # as pathlib writes it
        name = name.replace("%", "%25")
    return ANY.sub(r"[\g<0>]", name)


def literal(pattern: str) -> str | None:
    """The name that a pattern means if it means but one: a[*].csv."""
    if ANY.search(_ESCAPED.sub("", pattern)):
        return None
    return _ESCAPED.sub(r"\1", pattern)


def decoded(pattern: str) -> str:
    """A pattern with what ``%20`` and the like stand for."""
    return _QUOTED.sub(
        lambda found: ANY.sub(r"[\g<0>]", unquote(found[0])), pattern
    )
