"""TLS and tokens of a job whose ranks serve its tables to each other."""

from __future__ import annotations

import base64
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from persia import errors
from persia.base.environment import variable
from persia.distributed.security import Security

if TYPE_CHECKING:
    from persia.distributed.cluster import Job
    from persia.distributed.ranks import Keys

JOB_SECRET = "PERSIA_JOB_SECRET"  # environment: known to all ranks

_NONE = "none"  # what rank 0 sends if it has no secret


def secure_job(
    keys: Keys, job: Job, one_machine: bool, given: Security | None
) -> Security:
    """What the ranks of a job show each other. All ranks call it.

    On one machine rank 0 makes a token and leaves it in a file that only its
    user can read. On several it makes certificates and tokens and sends them
    through the key-value store of torch.distributed, which does not encrypt:
    so they are encrypted with ``PERSIA_JOB_SECRET``.

    Args:
        keys: of this job.
        job: this rank.
        one_machine: whether all ranks are on one.
        given: what the user gave to ``Store(security=)``.

    Raises:
        InvalidArgument: what was given is not enough to serve with, or
            ranks on several machines do not know the same secret.
    """
    if given is not None:
        if given.ca and not given.cert:
            raise errors.InvalidArgument(
                "security has a CA and no certificate: the ranks serve the "
                "tables to each other, so give cert= and key=, too"
            )
        return given
    usual = Security.from_environment()
    if usual.cert or (one_machine and usual.token and not usual.ca):
        return usual
    return _by_file(keys, job) if one_machine else _by_keys(keys, job)


def _by_file(keys: Keys, job: Job) -> Security:
    path = None
    if job.rank == 0:
        number, name = tempfile.mkstemp(prefix="persia-token-")  # mode 0600
        path = Path(name)
        with open(number, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        keys.set("token file", name)
    try:
        token = Path(keys.get("token file")).read_text(encoding="ascii")
        keys.gather("token", "read", job)
    finally:
        if path is not None:
            path.unlink()
    return Security(token=token)


def _by_keys(keys: Keys, job: Job) -> Security:
    secret = variable(JOB_SECRET)
    if job.rank == 0:
        from persia.distributed.certs import one_job

        # Without a secret the others get that as an error, and do not wait.
        text = _seal(one_job().to_json(), secret) if secret else _NONE
        keys.set("security", text)
    sealed = keys.get("security") if secret or job.rank else _NONE
    if not secret or sealed == _NONE:
        raise errors.InvalidArgument(
            "the ranks of this job are on several machines, and would send "
            f"keys and tokens to each other in clear: set {JOB_SECRET} to the "
            "same secret words on all ranks, or give certificates and a token "
            "of your own (PERSIA_TLS_CA, PERSIA_TLS_CERT, PERSIA_TLS_KEY and "
            "PERSIA_TOKEN_FILE, or Store(security=))"
        )
    return Security.from_json(_open(sealed, secret))


def _seal(text: str, secret: str) -> str:
    from cryptography.fernet import Fernet

    salt = secrets.token_bytes(16)
    sealed = Fernet(_key(secret, salt)).encrypt(text.encode())
    return f"{salt.hex()} {sealed.decode()}"


def _open(text: str, secret: str) -> str:
    """The reverse."""
    from cryptography.fernet import Fernet, InvalidToken

    try:
        salt, sealed = text.split(" ", 1)
        key = _key(secret, bytes.fromhex(salt))
        return Fernet(key).decrypt(sealed.encode()).decode()
    except (ValueError, InvalidToken):
        raise errors.InvalidArgument(
            f"{JOB_SECRET} is not that of rank 0: set the same value on all "
            "ranks of this job"
        ) from None


def _key(secret: str, salt: bytes) -> bytes:
    """A key of Fernet. Slow to compute, so that short secrets are hard to
    guess."""
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    kdf = Scrypt(salt=salt, length=32, n=2**14, r=8, p=1)
    return base64.urlsafe_b64encode(kdf.derive(secret.encode()))
