"""Every route under /admin, and the one door in front of them.

Adding = Callable[[AdminRoutes, Gateway], None]      a module's `add` adds its routes; list it in ADDED
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from router.admin import adapters, capacity, drain, history, kv, ledger, profile, requests, status
from router.admin.door import AdminRoutes
from router.gateway import Gateway

Adding = Callable[[AdminRoutes, Gateway], None]

ADDED: tuple[Adding, ...] = (
    status.add, capacity.add, kv.add, drain.add, profile.add, requests.add, ledger.add, history.add,
    adapters.add,
)  # fmt: skip


def mount_admin(app: FastAPI, gateway: Gateway) -> None:
    """Puts the admin routes on the application."""
    admin = AdminRoutes(app, gateway)
    for add in ADDED:
        add(admin, gateway)
