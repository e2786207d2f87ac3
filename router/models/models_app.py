"""Several models behind one address: requests that name their model go to it, and each has an application of its own.

/v1/chat/completions {"model": "b"} ─▶ the first model's application ─▶ Gateway.serving("b")
/models/b/...                       ─▶ b's application: its page, /admin, /metrics, and every API
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from protos.errors import Misconfigured, UnknownModel
from protos.hints import listed
from router.app import create_app
from router.gateway import Gateway
from router.http.api import api_of
from router.http.error_responses import error_response

PREFIX = "/models/"


def create_models_app(gateways: Sequence[Gateway], registry: CollectorRegistry | None = None) -> ASGIApp:
    """The first model answers requests that name none. `registry` has the metrics of all. Raises Misconfigured if two
    have one name."""
    if len(gateways) == 1:
        return create_app(gateways[0])
    names = [gateway.card.name for gateway in gateways]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Misconfigured(f"two models are called {twice!r}: give each a name of its own", param="model")
    apps = {gateway.card.name: create_app(gateway) for gateway in beside_each_other(gateways)}
    return ModelsApp(create_app(front_of(gateways, registry)), apps)


def beside_each_other(gateways: Sequence[Gateway]) -> list[Gateway]:
    return [own.among(gateways) for own in gateways]


def front_of(gateways: Sequence[Gateway], registry: CollectorRegistry | None = None) -> Gateway:
    return replace(gateways[0], models=tuple(gateways), scraped=registry) if len(gateways) > 1 else gateways[0]


class ModelsApp:
    """Picks the application by the path: `/models/NAME/` and what is below is the model's own."""

    def __init__(self, front: ASGIApp, apps: Mapping[str, ASGIApp]) -> None:
        self._front = front
        self._names = tuple(apps)
        longest_first = sorted(apps, key=len, reverse=True)  # a name may have a "/" in it
        self._apps = [(f"{PREFIX}{name}", apps[name]) for name in longest_first]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(PREFIX):
            for root, app in self._apps:
                rest = path.removeprefix(root)
                if not rest and path == root:
                    await RedirectResponse(f"{root}/")(scope, receive, send)  # the page's addresses are relative
                    return
                if rest != path and rest.startswith("/"):
                    await app(dict(scope, path=rest, raw_path=rest.encode()), receive, send)
                    return
            name = path.removeprefix(PREFIX).partition("/")[0][:100]
            served = listed([f"'{model}'" for model in self._names])
            missing = UnknownModel(f"The model '{name}' does not exist: this server serves {served}", param="model")
            await error_response(missing, api_of(scope))(scope, receive, send)
            return
        await self._front(scope, receive, send)
