"""TLS and tokens from files and from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia import certs, errors
from persia.security import Security


def test_the_environment_names_files_and_words(tmp_path: Path) -> None:
    certs.write_set(tmp_path, ["localhost"])
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
    with pytest.raises(errors.InvalidArgument, match="go together"):
        Security(cert="x")
    with pytest.raises(errors.InvalidArgument, match="mutual TLS needs"):
        Security(mutual=True)
    with pytest.raises(
        errors.InvalidArgument, match=r"admin token: .*visible"
    ):
        Security(admin_token="two words")
    with pytest.raises(errors.InvalidArgument, match=r"token: .*visible"):
        Security(token="")
    with pytest.raises(errors.StorageError, match=r"TLS CA: .*none"):
        Security.load(ca=tmp_path / "none.pem")
    with pytest.raises(errors.InvalidArgument, match="not both"):
        Security.load(token="a", token_file=tmp_path / "t")
