"""The page at /: one self-contained document, which requests /admin and /metrics like any client.

It contains no data of the cluster, so it needs no key: /admin and /metrics check access.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.gateway import Gateway

_HERE = Path(__file__).resolve().parent


def mount_page(app: FastAPI, gateway: Gateway) -> None:
    """Puts the page on the application."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    template = (_HERE / "page.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(style, script),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def page(request: Request) -> Response:
        values = {
            "style": style,
            "script": script,
            "model": escape(gateway.card.name),
            "has_chat": str(gateway.template is not None).lower(),
            "asks_for_keys": str(not gateway.access.roster.is_open).lower(),
        }
        return Response(_filled(template, values), media_type="text/html", headers=headers)

    app.add_route("/", page)


def _filled(template: str, values: dict[str, str]) -> str:
    """Fills in all placeholders in one pass: inserted text is not searched for more."""
    return re.sub(r"{{(\w+)}}", lambda place: values[place[1]], template)


def _policy(style: str, script: str) -> str:
    """Allows these two texts only, data from this origin, no frames, and no strings as HTML."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
