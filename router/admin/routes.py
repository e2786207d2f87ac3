"""Every endpoint that needs an administrator's key.

Adding = Callable[[AdminRoutes, Gateway], None]      a module's `add` adds its endpoints; list it in ADDED
"""

from __future__ import annotations

from collections.abc import Callable

from router.admin import adapters, capacity, drain, history, kv, ledger, profile, requests, status
from router.admin.door import AdminRoutes
from router.endpoint import Face
from router.gateway import Gateway

Adding = Callable[[AdminRoutes, Gateway], None]

ADDED: tuple[Adding, ...] = (
    status.add, capacity.add, kv.add, drain.add, profile.add, requests.add, ledger.add, history.add,
    adapters.add,
)  # fmt: skip


def admin_face(gateway: Gateway) -> Face:
    admin = AdminRoutes()
    for add in ADDED:
        add(admin, gateway)
    return Face(endpoints=admin.endpoints)
