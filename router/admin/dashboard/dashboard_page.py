"""The page at /: one self-contained document, which requests /admin and /metrics like any client."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from router.gateway import Gateway

_HERE = Path(__file__).resolve().parent
SCRIPTS = ("nodes.js", "charts.js", "timeline.js", "playground.js", "lanes.js", "money.js", "capacity.js", "script.js")
"""Parts of the page's one script, each after those that it uses: a part is a constant with its functions."""


@cache
def _parts() -> tuple[str, dict[str, str], dict[str, str]]:
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    script = "".join((_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    template = (_HERE / "page.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(style, script),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    return template, {"style": style, "script": script}, headers


async def page(gateway: Gateway, request: Request) -> Response:
    ports = gateway.replica_ports
    if ports and request.scope["server"][1] not in ports:  # another process would answer each request
        return RedirectResponse(request.url.replace(port=ports[0]))
    template, texts, headers = _parts()
    values = texts | {
        "model": escape(gateway.card.name),
        "others": _links([one.card.name for one in gateway.models[1:]]),
        "has_chat": str(gateway.texts.template is not None).lower(),
        "has_ledger": str(gateway.ledger is not None).lower(),
        "asks_for_keys": str(not gateway.access.roster.is_open).lower(),
    }
    return Response(_filled(template, values), media_type="text/html", headers=headers)


def _links(models: Sequence[str]) -> str:
    links = [f'<a href="models/{quote(name)}/">{escape(name)}</a>' for name in models]
    return f'\n  <nav class="dim" aria-label="Other models">beside it: {", ".join(links)}</nav>' if links else ""


def _filled(template: str, values: dict[str, str]) -> str:
    """Fills in all placeholders in one pass, so that inserted text is not searched."""
    return re.sub(r"{{(\w+)}}", lambda place: values[place[1]], template)


def _policy(style: str, script: str) -> str:
    """Allows only these two texts, data from this origin, no frames, and no strings as HTML."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
