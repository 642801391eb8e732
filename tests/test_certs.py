"""Certificates, judged by Python's ssl (OpenSSL)."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from persia import errors
from persia.cli.app import app
from persia.distributed import certs
from persia.distributed.security import Security


def context(folder: Path, *, server: bool, pair: str | None) -> ssl.SSLContext:
    side = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    made = ssl.SSLContext(side)
    made.load_verify_locations(folder / "ca.pem")
    if pair is not None:
        made.load_cert_chain(
            folder / f"{pair}.pem", folder / f"{pair}-key.pem"
        )
    if server:
        made.verify_mode = ssl.CERT_REQUIRED
    return made


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str
) -> None:
    """Both sides in memory, until both are done or one refuses."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        server.wrap_bio(up, down, server_side=True),
        client.wrap_bio(down, up, server_hostname=name),
    ]
    waiting = list(sides)
    for _ in range(20):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
        if not waiting:
            break
    assert not waiting
    sides[1].write(b"hello")  # TLS 1.3: a refusal comes with the first bytes
    assert sides[0].read() == b"hello"


def test_a_set_serves_mutual_tls(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    result = CliRunner().invoke(
        app, ["certs", str(folder), "--hosts", "ps-0.example,10.1.2.3"]
    )
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == set(certs.FILES)
    server = context(folder, server=True, pair="server")
    client = context(folder, server=False, pair="client")
    handshake(server, client, "ps-0.example")
    handshake(server, client, "10.1.2.3")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(server, client, "ps-1.example")
    nobody = context(folder, server=False, pair=None)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        handshake(server, nobody, "ps-0.example")
    # A client's certificate does not make a server.
    fraud = context(folder, server=True, pair="client")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(fraud, client, "ps-0.example")


def test_folders_are_named_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]a[" / "b]:ant:"  # as markup it would be wrong
    result = CliRunner().invoke(app, ["certs", str(folder)])
    assert result.exit_code == 0, result.output
    assert f"{folder}/token  --token-file" in result.output


def test_another_authority_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        certs.write_certificates(tmp_path / name, ["localhost"])
    server = context(tmp_path / "a", server=True, pair="server")
    client = context(tmp_path / "b", server=False, pair="client")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "localhost")


def test_secrets_are_the_owners(tmp_path: Path) -> None:
    for path in certs.write_certificates(tmp_path, ["localhost"]):
        secret = "key" in path.name or "token" in path.name
        mode = stat.S_IMODE(path.stat().st_mode)
        assert bool(mode & 0o077) != secret, path
    tokens = [(tmp_path / t).read_text() for t in ("token", "admin-token")]
    assert len(set(tokens)) == 2


def test_files_are_replaced_only_by_force(tmp_path: Path) -> None:
    certs.write_certificates(tmp_path, ["localhost"])
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(errors.StorageError, match=r"ca\.pem.*force"):
        certs.write_certificates(tmp_path, ["localhost"])
    assert (tmp_path / "ca.pem").read_bytes() == before
    certs.write_certificates(tmp_path, ["localhost"], force=True)
    assert (tmp_path / "ca.pem").read_bytes() != before


@pytest.mark.parametrize("host", ["ps0:8888", "http://ps0", "a b", "ümlaut"])
def test_what_is_no_host_is_named(tmp_path: Path, host: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="hosts: "):
        certs.write_certificates(tmp_path, [host])
    with pytest.raises(errors.InvalidArgument, match="at least one"):
        certs.write_certificates(tmp_path, [])
    assert not list(tmp_path.iterdir())


def test_one_job_needs_no_hosts(tmp_path: Path) -> None:
    job = certs.one_job()
    again = Security.from_json(job.to_json())
    assert again == job
    assert job.token != job.admin_token
    assert job.mutual and not job.insecure
    (tmp_path / "ca.pem").write_text(job.ca or "")
    (tmp_path / "all.pem").write_text(job.cert or "")
    (tmp_path / "all-key.pem").write_text(job.key or "")
    server = context(tmp_path, server=True, pair="all")
    client = context(tmp_path, server=False, pair="all")
    handshake(server, client, job.server_name or "")
