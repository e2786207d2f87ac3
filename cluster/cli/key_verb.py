"""`baton key`: prints a new API key on stdout, and its entry for the file of tenants on stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from protos.errors import Misconfigured
from router.auth.tenants import hash_of, is_name, new_key


def key(
    tenant: Annotated[str, typer.Argument(metavar="[TENANT]", help="Whose key it will be.")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="A key for /admin, of no tenant.")] = False,
) -> None:
    """Make an API key. stdout gets the key, stderr its entry with the hash for the file of tenants. Baton stores no
    key: it is shown only this once."""
    if admin == bool(tenant):
        raise Misconfigured("key: give either a tenant, or --admin", param="tenant")
    if tenant and not is_name(tenant):
        raise Misconfigured(
            f"key: the name {tenant[:80]!r}: give 1 to 64 letters, digits, '_', '.', '@' or '-'", param="tenant"
        )
    made = new_key()
    typer.echo(made)
    table = f'"{tenant}"' if "." in tenant or "@" in tenant else tenant
    line = f'admin_keys = ["{hash_of(made)}"]' if admin else f'[tenants.{table}]\nkeys = ["{hash_of(made)}"]'
    where = "at the top of" if admin else "in"
    typer.echo(f"# {where} the file that router.tenants names; further keys go into the same list\n{line}", err=True)
