"""What may be shown of a URL: users, passwords, keys and signatures may not.

This is the only module that decides it. Errors of Persia and warnings are
shown by it, a :class:`persia.base.urls.Url` shows itself so, and the command
line passes tracebacks through it.
"""

from __future__ import annotations

import re
import traceback
from urllib.parse import unquote

#: Stands where something was left out.
MARK = "***"

# A URL in a text, or what a path makes of it, which has one slash. A quote
# ends it where nothing of a word follows.
_URL = re.compile(
    r"""([A-Za-z][A-Za-z0-9+.-]*://?)((?:[^\s"'<>]|'(?=[^\s,;:.)\]}]))*)"""
)
# Options begin at a "?" that a name and "=" follow. Another "?" is of a glob,
# as in dt=2024-01-0?/hour=0, but not in the URL of a web server.
_NAME = r"[A-Za-z_&%][^\s\"'/?*\[\]#=]*="
_BEGIN = re.compile(rf"\?(?={_NAME})")
_WEB_BEGIN = re.compile(r"\?")
# The end of a URL, as some libraries name it, and its options.
_PATH = re.compile(rf"""([/.][^\s"'?]*)\?({_NAME}[^\s"']*)""")
# zip://a.csv::https://HOST/z.zip
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?::/|::))")
_SCHEME = re.compile(":/{1,2}")
_HOST = r"(?:[^:@\[\],]*|\[[^\]]*\])(?::(?:\d+|PORT))?"
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
# Those whose "#" is a letter of a name.
_STORES = _USERS | {"s3", "gs", "gcs", "file"}


def shown(text: str) -> str:
    """A text without the secrets of the URLs in it."""
    if "/" not in text:
        return text
    text = _URL.sub(_shown, text)
    return _PATH.sub(lambda found: f"{found[1]}?{_options(found[2])}", text)


def _shown(found: re.Match[str]) -> str:
    url = found[2].rstrip(".,;:)`")  # which end a sentence, or a quotation
    return found[1] + _rest(found[1], url) + found[2][len(url) :]


def shown_url(text: str) -> str:
    """A path or URL without its secrets; it may have blanks in it."""
    found = _SCHEME.search(text)
    if not found:
        return text
    scheme, rest = text[: found.start()], text[found.end() :]
    return f"{scheme}{found[0]}{_rest(scheme, rest)}"


def clean(error: BaseException) -> BaseException | None:
    """The error if neither it nor what caused it shows a secret: what another
    error may be raised from."""
    text = "".join(traceback.format_exception(error))
    return error if shown(text) == text else None


def _rest(scheme: str, rest: str) -> str:
    """What follows ``scheme://``."""
    if found := _CHAIN.search(rest):
        begin, end = found.span()
        return f"{_rest(scheme, rest[:begin])}::{shown_url(rest[end:])}"
    kind = scheme.rstrip(":/").rpartition(":")[2].lower()
    path, query = cut(kind, rest)
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
    path, query = cut(kind, rest[at:])
    path, mark, fragment = path.partition("#")
    if "=" in fragment and kind not in _STORES:
        fragment = MARK
    kept = f"{user}@" if user and kind in _USERS else ""
    asked = f"?{_options(query[1:])}" if query else ""
    return f"{kept}{path}{mark}{fragment}{asked}"


def cut(scheme: str, text: str) -> tuple[str, str]:
    """(what is before the options of a URL, the options with their "?")."""
    begin = _WEB_BEGIN if scheme in ("http", "https") else _BEGIN
    found = begin.search(text)
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
