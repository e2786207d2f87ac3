"""Puts the routes of files and batches on the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.batches import batch_routes, file_routes
from router.gateway import Gateway

FILES = "/v1/files"
Answer = Callable[[Gateway, Request], Awaitable[Response]]

_ROUTES: Mapping[str, Mapping[str, Answer]] = {
    FILES: {"POST": file_routes.upload_file, "GET": file_routes.list_files},
    f"{FILES}/{{file_id}}": {"GET": file_routes.retrieve_file, "DELETE": file_routes.delete_file},
    f"{FILES}/{{file_id}}/content": {"GET": file_routes.file_content},
    "/v1/batches": {"POST": batch_routes.create_batch, "GET": batch_routes.list_batches},
    "/v1/batches/{batch_id}": {"GET": batch_routes.retrieve_batch},
    "/v1/batches/{batch_id}/cancel": {"POST": batch_routes.cancel_batch},
}


def mount_batches(app: FastAPI, gateway: Gateway) -> None:
    mount(app, gateway, _ROUTES)


def mount(app: FastAPI, gateway: Gateway, routes: Mapping[str, Mapping[str, Answer]]) -> None:
    """Puts answers by path and method on the application."""
    for path, answers in routes.items():
        app.add_route(path, _route(gateway, answers), methods=list(answers), name="batches")


def _route(gateway: Gateway, answers: Mapping[str, Answer]) -> Callable[[Request], Awaitable[Response]]:
    async def answered(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await answers[method](gateway, request)

    return answered
