"""The page at /: one document without anything from elsewhere, which asks /admin and /metrics as any client does.

It says nothing of the cluster by itself, so it needs no key: who may see the data is decided where the data are.
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
        told = {
            "style": style,
            "script": script,
            "model": escape(gateway.card.name),
            "has_chat": str(gateway.template is not None).lower(),
            "asks_for_keys": str(not gateway.access.roster.is_open).lower(),
        }
        return Response(_filled(template, told), media_type="text/html", headers=headers)

    app.add_route("/", page)


def _filled(template: str, told: dict[str, str]) -> str:
    """In one pass: what has been filled in is no place for more."""
    return re.sub(r"{{(\w+)}}", lambda place: told[place[1]], template)


def _policy(style: str, script: str) -> str:
    """These two texts and no others, data from this origin alone, in nobody's frame; and no string becomes HTML."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
