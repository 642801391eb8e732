"""Certificates for tests and for one job: an authority that signs a server's
and a client's certificate and is then forgotten, so that no more can be made
in its name.

For servers that live longer use those of your organisation.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from persia.base.output import new_files
from persia.distributed.security import Security
from persia.errors import InvalidArgument, StorageError

#: What :func:`write_certificates` writes.
FILES = (
    "ca.pem",
    "server.pem",
    "server-key.pem",
    "client.pem",
    "client-key.pem",
    "token",
    "admin-token",
)
_PUBLIC = ("ca.pem", "server.pem", "client.pem")

# Clocks of machines differ: a certificate holds from a little before now.
_BEFORE = datetime.timedelta(hours=1)
_JOB_DAYS = 365
# The name in the certificate of a job whose hosts are not known beforehand.
_JOB_NAME = "one-job.persia"


class Authority:
    """A certificate authority whose key is in this object alone.

    Args:
        name: common name of its certificate.
        days: that it and what it signs are valid.
    """

    def __init__(self, name: str = "Persia test CA", days: int = 365) -> None:
        if not 1 <= days <= 36500:
            raise InvalidArgument(f"days is {days}, need 1 to 36500")
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._begin = datetime.datetime.now(datetime.UTC) - _BEFORE
        self._end = self._begin + _BEFORE + datetime.timedelta(days=days)
        public = self._key.public_key()
        self._certificate = (
            self._builder(self._name, public)
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        """Its certificate."""
        return _pem(self._certificate)

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = (),
        *,
        server: bool,
        uris: Sequence[str] = (),
    ) -> tuple[str, str]:
        """A certificate that it signs, for a key that is made here.

        Args:
            name: common name, for people to read.
            hosts: names and IP addresses of a server.
            server: also for servers; a client's is for clients alone.
            uris: names of its own, such as ``spiffe://cluster/trainer``.

        Returns:
            PEM of the certificate and of its key.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if server:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(
            self._key.public_key()
        )
        builder = (
            self._builder(_name(name), key.public_key())
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(issuer, critical=False)
        )
        if hosts or uris:
            names = x509.SubjectAlternativeName(
                [*map(_host, hosts), *map(_uri, uris)]
            )
            builder = builder.add_extension(names, critical=False)
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return _pem(builder.sign(self._key, hashes.SHA256())), text.decode()

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(public),
                critical=False,
            )
        )


def one_job() -> Security:
    """For the servers and clients of one job alike, wherever they run: one
    certificate whose name stands for all hosts, mutual TLS, and tokens."""
    authority = Authority("Persia job CA", _JOB_DAYS)
    cert, key = authority.issue(_JOB_NAME, [_JOB_NAME], server=True)
    return Security(
        ca=authority.pem,
        cert=cert,
        key=key,
        mutual=True,
        token=secrets.token_hex(32),
        admin_token=secrets.token_hex(32),
        server_name=_JOB_NAME,
    )


def write_certificates(
    folder: Path,
    hosts: Sequence[str],
    days: int = 365,
    force: bool = False,
    client_uri: str | None = None,
) -> list[Path]:
    """Writes ``FILES`` into a folder: an authority's certificate, a
    server's and a client's with their keys, a token for each of the two
    rights. Keys and tokens are readable by their owner alone.

    Args:
        folder: is made if it is not there.
        hosts: names and IP addresses of the server.
        days: until the certificates expire.
        force: replaces files that are there.
        client_uri: a name of the client, for a line of ``--tokens-file``.

    Raises:
        InvalidArgument: no host, or one that is none; no URI.
        StorageError: a file is there already (without ``force``), or
            writing failed.
    """
    if not hosts:
        raise InvalidArgument(
            "hosts: need at least one name or IP address of a server"
        )
    # Two of one name cannot be trusted at the same time.
    authority = Authority(f"Persia test CA {secrets.token_hex(4)}", days)
    server, server_key = authority.issue(hosts[0], hosts, server=True)
    client, client_key = authority.issue(
        "persia client", server=False, uris=[client_uri] if client_uri else []
    )
    texts = (
        authority.pem,
        *(server, server_key, client, client_key),
        *(secrets.token_hex(32) + "\n", secrets.token_hex(32) + "\n"),
    )
    there = [name for name in FILES if (folder / name).exists()]
    if there and not force:
        raise StorageError(
            f"{folder} has {', '.join(there)} already: choose another "
            "folder, or `force` to replace them"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"writing {folder} failed: {error}") from error
    modes = (0o644 if name in _PUBLIC else 0o600 for name in FILES)
    paths = [folder / name for name in FILES]
    new_files(list(zip(paths, texts, modes)))
    return paths


def _name(common: str) -> x509.Name:
    # A common name has at most 64 characters; hosts are matched elsewhere.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    try:
        if not text or any(c.isspace() or c in ":/," for c in text):
            raise ValueError
        return x509.DNSName(text)
    except ValueError:
        raise InvalidArgument(
            f"hosts: {text!r} is neither a name nor an IP address (no port)"
        ) from None


def _uri(text: str) -> x509.GeneralName:
    if "://" in text and text.isascii() and text.isprintable():
        return x509.UniformResourceIdentifier(text)
    raise InvalidArgument(
        f"{text!r} is no URI, such as spiffe://cluster/trainer"
    )


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
