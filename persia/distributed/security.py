"""Who may speak with whom: TLS and tokens of servers and clients."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import ssl
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from persia.base.environment import variable
from persia.base.warning import warn
from persia.distributed.renewal import State, renewal, seen
from persia.distributed.tokens import check
from persia.errors import InvalidArgument, StorageError

# Environment variable -> keyword of Security.load(), for clients.
VARIABLES = {
    "PERSIA_TLS_CA": "ca",
    "PERSIA_TLS_CERT": "cert",
    "PERSIA_TLS_KEY": "key",
    "PERSIA_TLS_SERVER_NAME": "server_name",
    "PERSIA_TOKEN": "token",
    "PERSIA_TOKEN_FILE": "token_file",
    "PERSIA_ADMIN_TOKEN": "admin_token",
    "PERSIA_ADMIN_TOKEN_FILE": "admin_token_file",
}


_FILES = (
    "ca",
    "cert",
    "key",
    "token_file",
    "admin_token_file",
    "tokens_file",
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whence a :class:`Security` was loaded, to load it again.

    Attributes:
        given: the keywords of :meth:`Security.load` that were given.
        seen: its files, as they were before they were read.
        ends: of its certificates, in seconds since 1970.
        rest: whose tokens it has, where it had none.
    """

    given: tuple[Any, ...] = dataclasses.field(repr=False)
    seen: tuple[State, ...] = ()
    ends: tuple[tuple[str, float], ...] = ()
    rest: Origin | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Of the same files, and words beside them."""
        return self.given, None if self.rest is None else self.rest.key

    @property
    def paths(self) -> tuple[str, ...]:
        """All its files."""
        own = _paths(dict(self.given))
        return own + (self.rest.paths if self.rest is not None else ())

    def load(self) -> Security:
        """The files as they are now."""
        found = Security.load(**dict(self.given))
        return found if self.rest is None else found.or_of(self.rest.load())


@dataclasses.dataclass(frozen=True)
class Security:
    """TLS and tokens, as texts: PEM and words without spaces.

    What :meth:`load` has read from files is renewed when these change.

    Attributes:
        ca: the certificates that are trusted; with it a client uses TLS.
        cert: the own chain: servers always, clients for mutual TLS.
        key: of ``cert``.
        mutual: servers ask clients for a certificate of ``ca``.
        token: servers ask for it, clients show it.
        admin_token: the same for administration (snapshots, whole rows).
        server_name: clients: the name in the server's certificate, where it
            is not the host of its address.
        insecure: allow other addresses than loopback without TLS and token.
        tokens: servers: lines of further tokens, each with its roles.
        origin: whence it was loaded; None: it is never renewed.
    """

    ca: str | None = None
    cert: str | None = dataclasses.field(default=None, repr=False)
    key: str | None = dataclasses.field(default=None, repr=False)
    mutual: bool = False
    token: str | None = dataclasses.field(default=None, repr=False)
    admin_token: str | None = dataclasses.field(default=None, repr=False)
    server_name: str | None = None
    insecure: bool = False
    tokens: str | None = dataclasses.field(default=None, repr=False)
    origin: Origin | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument(
                "a certificate and its key go together; give both or none"
            )
        if self.mutual and (self.ca is None or self.cert is None):
            raise InvalidArgument(
                "mutual TLS needs the CA of the clients' certificates and a "
                "certificate of the server's own"
            )
        if self.tokens is not None:
            check(self.tokens)
        for name in ("token", "admin_token"):
            text = getattr(self, name)
            if text is not None and (
                not text
                or not text.isascii()
                or not text.isprintable()
                or " " in text
            ):
                raise InvalidArgument(
                    f"{name.replace('_', ' ')}: need visible ASCII characters "
                    "without spaces, at least one"
                )

    @classmethod
    def load(
        cls,
        *,
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        mutual: bool = False,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        admin_token: str | None = None,
        admin_token_file: str | os.PathLike[str] | None = None,
        tokens_file: str | os.PathLike[str] | None = None,
        server_name: str | None = None,
        insecure: bool = False,
    ) -> Security:
        """From files of PEM and of tokens. It warns of a key or token that
        other users may read or change.

        Raises:
            InvalidArgument: parts that do not go together, or a file without
                what it should hold.
            StorageError: a file cannot be read.
        """
        words = locals()
        given = {
            name: value if isinstance(value, bool) else os.fspath(value)
            for name, value in words.items()
            if name != "cls" and value
        }
        before = seen(_paths(given))
        made = cls(
            ca=_read("TLS CA", ca),
            cert=_read("TLS certificate", cert),
            key=_read("TLS key", key),
            mutual=mutual,
            token=_token("token", token, token_file),
            admin_token=_token("admin token", admin_token, admin_token_file),
            server_name=server_name,
            insecure=insecure,
            tokens=_read("tokens", tokens_file),
        )
        ends = _check_files(ca, cert, key)
        _check_mode("TLS key", key)
        _check_mode("token", token_file)
        _check_mode("admin token", admin_token_file)
        _check_mode("tokens", tokens_file)
        origin = Origin(tuple(sorted(given.items())), before, ends)
        return dataclasses.replace(made, origin=origin)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None
    ) -> Security:
        """What a client finds in ``PERSIA_TLS_CA``, ``PERSIA_TLS_CERT``,
        ``PERSIA_TLS_KEY`` (files), ``PERSIA_TLS_SERVER_NAME``,
        ``PERSIA_TOKEN``, ``PERSIA_ADMIN_TOKEN`` or, with ``_FILE``, the files
        of these, and ``PERSIA_INSECURE`` (1: addresses other than loopback
        without TLS and token)."""
        given: dict[str, Any] = {
            keyword: value
            for name, keyword in VARIABLES.items()
            if (value := variable(name, environment))
        }
        insecure = variable("PERSIA_INSECURE", environment) not in (None, "0")
        return cls.load(**given, insecure=insecure)

    def values(self) -> dict[str, Any]:
        """All but whence they are."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "origin"
        }

    def arguments(
        self, renewed: Callable[[Security], object] | None = None
    ) -> dict[str, Any]:
        """For ``_core``, which renews it when its files change.

        Args:
            renewed: is called then, too.
        """
        origin = self.origin
        source = 0 if origin is None else renewal.number(origin, renewed)
        return self.values() | {"source": source}

    def or_of(self, other: Security) -> Security:
        """The same, with the tokens of another one where it has none."""
        origin = self.origin
        if origin is not None and other.origin is not None:
            origin = dataclasses.replace(
                origin,
                seen=origin.seen + other.origin.seen,
                ends=origin.ends + other.origin.ends,
                rest=other.origin,
            )
        return dataclasses.replace(
            self,
            token=self.token or other.token,
            admin_token=self.admin_token or other.admin_token,
            origin=origin,
        )

    def to_json(self) -> str:
        """With its secrets: for the other ranks of a job, not for a log."""
        return json.dumps(self.values())

    @classmethod
    def from_json(cls, text: str) -> Security:
        """The reverse of :meth:`to_json`."""
        return cls(**json.loads(text))


def _paths(given: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(given[name] for name in _FILES if name in given)


def _read(what: str, path: str | os.PathLike[str] | None) -> str | None:
    if path is None:
        return None
    if "-----BEGIN" in os.fspath(path):
        raise InvalidArgument(
            f"{what}: need the path of a PEM file, not what it holds"
        )
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError:
        why = "it is no text"
    # A secret may stand where its file should.
    is_path = os.path.isabs(path) or os.path.isdir(os.path.dirname(path))
    shown = path if is_path else "the file named"
    raise StorageError(f"{what}: {shown} cannot be read: {why}")


def _check_mode(what: str, path: str | os.PathLike[str] | None) -> None:
    """A group may read a secret: schedulers mount them so."""
    mode = 0 if path is None else stat.S_IMODE(os.stat(path).st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        warn(
            f"{what}: {path} may be read or changed by other users (mode "
            f"{mode:o}); take that from them (chmod 600), and make a new "
            "secret"
        )


def _check_files(
    ca: str | os.PathLike[str] | None,
    cert: str | os.PathLike[str] | None,
    key: str | os.PathLike[str] | None,
) -> tuple[tuple[str, float], ...]:
    """When they end. gRPC would only say that a port cannot be served, or no
    peer reached."""
    if ca is None and cert is None:
        return ()
    ends = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how strong is gRPC's affair
    for what, path in (("TLS CA", ca), ("TLS certificate", cert)):
        if path is None:
            continue
        try:
            context.load_verify_locations(path)
        except ssl.SSLError:
            raise InvalidArgument(
                f"{what}: {path} holds no certificate; need PEM, which begins "
                "with -----BEGIN CERTIFICATE-----"
            ) from None
        if (end := _check_dates(what, path)) is not None:
            ends.append((os.fspath(path), end))
    if cert is None or key is None:
        return tuple(ends)
    try:
        context.load_cert_chain(cert, key, password="")  # asks for none
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise InvalidArgument(
                f"TLS certificate {cert} and TLS key {key} do not belong "
                "together: give the key that the certificate was made for"
            ) from None
        raise InvalidArgument(
            f"TLS key: {key} holds no key that can be used; need PEM without "
            "a password, which begins with -----BEGIN PRIVATE KEY-----"
        ) from None
    return tuple(ends)


def _check_dates(what: str, path: str | os.PathLike[str]) -> float | None:
    """When it ends, in seconds since 1970; None: it does not say. The other
    side would only say that the handshake failed."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except ValueError:  # stricter than OpenSSL, which can use them
        return None
    now = datetime.datetime.now(datetime.UTC)
    # Of a chain the first is one's own; of many that are trusted one will do.
    if what == "TLS certificate":
        found = found[:1]
    begin = min(one.not_valid_before_utc for one in found)
    end = max(one.not_valid_after_utc for one in found)
    if not begin <= now <= end:
        raise InvalidArgument(
            f"{what}: {path} is valid from {begin:%Y-%m-%d %H:%M} to "
            f"{end:%Y-%m-%d %H:%M} UTC, now it is {now:%Y-%m-%d %H:%M}; give "
            "a new one (persia certs makes a test set), or set the clock"
        )
    return end.timestamp()


def _token(
    what: str, text: str | None, path: str | os.PathLike[str] | None
) -> str | None:
    if text is not None and path is not None:
        raise InvalidArgument(f"{what}: give the word or its file, not both")
    read = _read(what, path)
    return text if read is None else read.strip()
