"""What may be shown of a URL: users, passwords, keys and signatures may not.

This is the only module that decides it. Errors of Persia and warnings are
shown by it, a :class:`Location` shows itself so, and the command line passes
tracebacks through it.
"""

from __future__ import annotations

import re
import traceback
from typing import Self
from urllib.parse import unquote

__all__ = ["MARK", "Location", "clean", "shown"]

#: Stands where something was left out.
MARK = "***"

# A URL in a text. A quote ends it where nothing of a word follows.
_URL = re.compile(
    r"""([A-Za-z][A-Za-z0-9+.-]*://)((?:[^\s"'<>]|'(?=[^\s,;:.)\]}]))*)"""
)
# The path of a URL alone, as some libraries name it, and its options.
_PATH = re.compile(r"""(/[^\s"'?]*)\?([^\s"'?]*=[^\s"']*)""")
_HOST = r"(?:[^:@\[\],]*|\[[^\]]*\])(?::\d+)?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")

# Options of URLs that are no secret, as far as their values have no user.
_OPTIONS = {
    # of pyarrow's file systems
    *("allow_bucket_creation", "allow_bucket_deletion", "background_writes"),
    *("connect_timeout", "endpoint_override", "force_virtual_addressing"),
    *("region", "request_timeout", "retry_limit_seconds", "scheme"),
    *("buffer_size", "default_block_size", "replication"),
    # of topics
    *("config", "dead_letter", "group", "since", "strict", "timeout"),
    *("value", "value_message", "value_registry", "value_schema"),
}


# URLs whose user is a name, of a container or of a person.
_USERS = {"abfs", "abfss", "hdfs", "sftp", "viewfs", "webhdfs"}


def shown(text: str) -> str:
    """A text without the secrets of the URLs in it."""
    if "/" not in text:
        return text
    text = _URL.sub(lambda found: found[1] + _rest(found[1], found[2]), text)
    return _PATH.sub(lambda found: f"{found[1]}?{_options(found[2])}", text)


class Location(str):
    """A path or URL of the user, maybe with a key in it. What prints it
    leaves that out; what opens it has it whole."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Of a Location the whole."""
        given = text.whole if isinstance(text, Location) else text
        return super().__new__(cls, given)

    def __str__(self) -> str:
        scheme, mark, rest = self.whole.partition("://")
        return f"{scheme}://{_rest(scheme, rest)}" if mark else self.whole

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    @property
    def whole(self) -> str:
        """All of it."""
        return str.__str__(self)


def clean(error: BaseException) -> BaseException | None:
    """The error if neither it nor what caused it shows a secret: what another
    error may be raised from."""
    text = "".join(traceback.format_exception(error))
    return error if shown(text) == text else None


def _rest(scheme: str, rest: str) -> str:
    """What follows ``scheme://``."""
    kind = scheme.removesuffix("://").rpartition(":")[2].lower()
    # A "?" may be of a glob, but not in the URL of a web server.
    begin = r"\?" if kind in ("http", "https") else r"\?(?=[^?]*=)"
    path, query = _cut(begin, rest)
    host = re.split("[/?#]", rest)[0]
    # A key may have a "/" that is not quoted: KEY:SEC/RET@bucket.
    at = (path if ":" in host else host).rfind("@") + 1
    if not at and not _HOSTS.fullmatch(host):
        at = rest.rfind("@") + 1  # or another sign
        if not at:
            return MARK
    elif not at and ":" in host and "@" in query and kind != "kafka":
        return MARK  # a port, or a password with a "?"
    user = rest[: at - 1].partition(":")[0] if at else ""
    path, query = _cut(begin, rest[at:])
    path, mark, fragment = path.partition("#")
    if "=" in fragment:
        fragment = MARK
    kept = f"{user}@" if user and kind in _USERS else ""
    asked = f"?{_options(query[1:])}" if query else ""
    return f"{kept}{path}{mark}{fragment}{asked}"


def _cut(begin: str, text: str) -> tuple[str, str]:
    """(before, the rest with it)."""
    found = re.search(begin, text)
    at = found.start() if found else len(text)
    return text[:at], text[at:]


def _options(query: str) -> str:
    kept, left_out = [], False
    for option in query.split("&"):
        name, _, value = option.partition("=")
        plain = unquote(value)
        if name in _OPTIONS and not re.search("[@?#]", plain):
            kept.append(option)
        else:
            left_out = True
    return "&".join([*kept, MARK] if left_out else kept)
