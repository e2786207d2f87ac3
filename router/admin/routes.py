"""Every route under /admin, and the one door in front of them.

Adding = Callable[[APIRouter, Gateway], None]      a module's `add` puts its routes on the router; list it in ADDED
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends, FastAPI
from starlette.requests import Request

from router.admin import drain, kv, profile, requests, status
from router.gateway import Gateway

Adding = Callable[[APIRouter, Gateway], None]

ADDED: tuple[Adding, ...] = (status.add, kv.add, drain.add, profile.add, requests.add)


def mount_admin(app: FastAPI, gateway: Gateway) -> None:
    """Puts the admin routes on the application."""

    async def door(request: Request) -> None:
        """Runs before every admin route. Raises Unauthenticated or Forbidden for whoever has no administrator's key."""
        gateway.reception.check_admin(request.headers.get("authorization"))

    admin = APIRouter(prefix="/admin", dependencies=[Depends(door)])
    for add in ADDED:
        add(admin, gateway)
    app.include_router(admin)
