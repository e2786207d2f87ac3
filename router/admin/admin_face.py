"""Every endpoint that needs an administrator's key.

Adding = Callable[[AdminRoutes, Gateway], None]      a module's `add` adds its endpoints; list it in ADDED
"""

from __future__ import annotations

from collections.abc import Callable

from router.admin import (
    adapter_routes,
    capacity_routes,
    cost_routes,
    drain_routes,
    history_routes,
    kv_routes,
    profile_routes,
    requests,
    status_routes,
)
from router.admin.door import AdminRoutes
from router.endpoint import Face
from router.gateway import Gateway

Adding = Callable[[AdminRoutes, Gateway], None]

ADDED: tuple[Adding, ...] = (
    status_routes.add, capacity_routes.add, kv_routes.add, drain_routes.add, profile_routes.add, requests.add,
    cost_routes.add, history_routes.add, adapter_routes.add,
)  # fmt: skip


def admin_face(gateway: Gateway) -> Face:
    admin = AdminRoutes()
    for add in ADDED:
        add(admin, gateway)
    return Face(endpoints=admin.endpoints)
