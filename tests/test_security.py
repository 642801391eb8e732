"""TLS and tokens from files and from the environment."""

from __future__ import annotations

import datetime
import warnings
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from persia import errors
from persia.distributed import certs
from persia.distributed.security import Security


def test_the_environment_names_files_and_words(tmp_path: Path) -> None:
    certs.write_certificates(tmp_path, ["localhost"])
    found = Security.from_environment(
        {
            "PERSIA_TLS_CA": str(tmp_path / "ca.pem"),
            "PERSIA_TLS_CERT": str(tmp_path / "client.pem"),
            "PERSIA_TLS_KEY": str(tmp_path / "client-key.pem"),
            "PERSIA_TLS_SERVER_NAME": "ps",
            "PERSIA_TOKEN": "word",
            "PERSIA_ADMIN_TOKEN_FILE": str(tmp_path / "admin-token"),
            "PERSIA_INSECURE": "0",
        }
    )
    assert found.ca == (tmp_path / "ca.pem").read_text()
    assert found.cert == (tmp_path / "client.pem").read_text()
    assert (found.token, found.server_name) == ("word", "ps")
    assert found.admin_token == (tmp_path / "admin-token").read_text().strip()
    assert not found.insecure and not found.mutual
    assert Security.from_environment({}) == Security()
    assert Security.from_environment({"PERSIA_INSECURE": "1"}).insecure


def test_secrets_are_not_shown() -> None:
    text = repr(certs.one_job())
    job = certs.one_job()
    for secret in (job.key, job.token, job.admin_token):
        assert secret is not None and secret not in repr(job)
    assert "PRIVATE" not in text


def test_wrong_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"cert.*key"):
        Security(cert="x")
    with pytest.raises(errors.InvalidArgument, match="mutual TLS"):
        Security(mutual=True)
    with pytest.raises(errors.InvalidArgument, match="admin token"):
        Security(admin_token="two words")
    with pytest.raises(errors.InvalidArgument, match="token"):
        Security(token="")
    with pytest.raises(errors.StorageError, match=r"TLS CA: .*none"):
        Security.load(ca=tmp_path / "none.pem")
    with pytest.raises(errors.InvalidArgument, match="not both"):
        Security.load(token="a", token_file=tmp_path / "t")


def test_secrets_that_others_may_read_warn(tmp_path: Path) -> None:
    certs.write_certificates(tmp_path, ["localhost"])
    token, key = tmp_path / "token", tmp_path / "client-key.pem"
    given = {"token_file": token, "cert": tmp_path / "client.pem", "key": key}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Security.load(**given)
        token.chmod(0o440)  # of a group: as schedulers mount secrets
        Security.load(**given)
    for file in (token, key):
        for mode in (0o604, 0o620, 0o602):
            file.chmod(mode)
            with pytest.warns(UserWarning, match=f"{file} .* {mode:o}"):
                Security.load(**given)
        file.chmod(0o600)


def test_certificates_out_of_their_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs.write_certificates(tmp_path / "live", ["localhost"])

    class Past(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime(2020, 1, 1, tzinfo=tz)

    with monkeypatch.context() as then:
        then.setattr(certs.datetime, "datetime", Past)
        certs.write_certificates(tmp_path / "dead", ["localhost"], days=3)
    files = ("ca.pem", "server.pem", "server-key.pem")
    live, dead = ([tmp_path / x / f for f in files] for x in ("live", "dead"))
    match = r"TLS CA: .*dead/ca.pem is valid .* 2020-01-04"
    with pytest.raises(errors.InvalidArgument, match=match):
        Security.load(ca=dead[0])
    match = r"TLS certificate: .*dead/server.pem is valid .*persia certs"
    with pytest.raises(errors.InvalidArgument, match=match):
        Security.load(ca=live[0], cert=dead[1], key=dead[2])
    both = tmp_path / "both.pem"
    both.write_text(dead[0].read_text() + live[0].read_text())
    Security.load(ca=both)


def test_files_that_do_not_hold_what_they_should(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        certs.write_certificates(folder, ["localhost"])
    cert, key, ca = one / "server.pem", one / "server-key.pem", one / "ca.pem"
    assert Security.load(ca=ca, cert=cert, key=key).mutual is False
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nno\n")
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        serialization.load_pem_private_key(
            key.read_bytes(), None
        ).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    strange = other / "server-key.pem"
    for parts, words in (
        ((ca, cert, strange), f"{cert} and TLS key {strange} do not belong"),
        ((garbage, None, None), f"TLS CA: {garbage} holds no certificate"),
        ((key, None, None), f"TLS CA: {key} holds no certificate"),
        ((ca, garbage, key), f"TLS certificate: {garbage} holds no"),
        ((ca, cert, garbage), f"TLS key: {garbage} holds no key"),
        ((ca, cert, cert), f"TLS key: {cert} holds no key"),
        ((ca, cert, locked), f"TLS key: {locked} .* without a password"),
    ):
        with pytest.raises(errors.InvalidArgument, match=words):
            Security.load(**dict(zip(("ca", "cert", "key"), parts)))
