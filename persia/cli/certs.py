"""``persia certs``: certificates and tokens to try TLS with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from persia.cli.options import Json, print_json

console = Console(highlight=False)

_TEXTS = {
    "ca.pem": "trusted by both: --tls-ca, PERSIA_TLS_CA",
    "server.pem": "--tls-cert of persia serve",
    "server-key.pem": "--tls-key of persia serve",
    "client.pem": "PERSIA_TLS_CERT of clients, for --mutual-tls",
    "client-key.pem": "PERSIA_TLS_KEY of clients",
    "token": "--token-file, PERSIA_TOKEN_FILE",
    "admin-token": "--admin-token-file, PERSIA_ADMIN_TOKEN_FILE",
}


def command(
    folder: Annotated[Path, typer.Argument(help="Folder for the files.")],
    hosts: Annotated[
        str,
        typer.Option(
            help="Names and IP addresses of the servers, with commas."
        ),
    ] = "localhost,127.0.0.1,::1",
    days: Annotated[
        int, typer.Option(min=1, max=36500, help="Days until they expire.")
    ] = 365,
    client_uri: Annotated[
        str | None,
        typer.Option(
            help="A name in the client's certificate, such as "
            "spiffe://cluster/trainer: see persia tokens add --peer."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that are there.")
    ] = False,
    json: Json = False,
) -> None:
    """Make a set of certificates and tokens for tests.

    The key of the authority is forgotten: what it signed is all that it will
    ever sign. Servers that stay need those of your organisation.

    persia certs certs --hosts ps0,ps1
    """
    from persia.distributed.certs import write_certificates

    names = [host.strip() for host in hosts.split(",") if host.strip()]
    made = write_certificates(folder, names, days, force, client_uri)
    if json:
        print_json({path.name: str(path) for path in made})
        return
    for path in made:
        # Text, as a path may look like markup.
        line = Text.assemble(str(path), "  ", (_TEXTS[path.name], "dim"))
        console.print(line, soft_wrap=True)
