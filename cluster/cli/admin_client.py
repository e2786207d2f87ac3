"""The client of a running server for the verbs that only query it: status, chat and bench."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from protos.errors import BatonError, Misconfigured, NotFound, Unavailable, error_from_code

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT = httpx.Timeout(10.0)

GatewayUrl = Annotated[str, typer.Option("--url", envvar="BATON_URL", help="URL of a gateway.")]
AdminKey = Annotated[
    str,
    typer.Option("--api-key", envvar="BATON_ADMIN_KEY", help="An administrator's key, where the gateway needs one."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`max_model_len` and `default_sampling` are None if the server does not report them."""

    name: str
    max_model_len: int | None = None
    default_sampling: Mapping[str, float] | None = None


def root_of(url: str) -> str:
    """Parses a server's URL. Raises Misconfigured if it is no HTTP URL. A trailing /v1 is removed."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.scheme not in ("http", "https") or not parts.host or not 0 < (parts.port or 1) < 65536:
        raise Misconfigured(f"--url {url}: give a server's root, such as {DEFAULT_URL}", param="url")
    return url.rstrip("/").removesuffix("/v1")


def open_client(url: str, api_key: str = "") -> httpx.Client:
    """Opens a client for one server. It trusts certificate authorities named in the environment (SSL_CERT_FILE,
    SSL_CERT_DIR) and ignores proxies named there."""
    root = root_of(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    trusted = _authorities() if root.startswith("https:") else True
    return httpx.Client(base_url=root, headers=headers, timeout=_TIMEOUT, trust_env=False, verify=trusted)


def _authorities() -> ssl.SSLContext:
    """Raises Misconfigured for a missing file or folder, which OpenSSL would ignore."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        where = os.environ.get(name, "")
        if where and not any(Path(one).exists() for one in where.split(os.pathsep)):
            raise Misconfigured(f"{name}={where}: that does not exist; name what is there, or unset it", param=name)
    return ssl.create_default_context()


def request_json(client: httpx.Client, path: str, method: str = "GET", body: Mapping[str, Any] | None = None) -> Any:
    """Raises Unavailable if the server does not answer, NotFound if it has no such page, else the error that the server
    sent."""
    try:
        response = client.request(method, path, json=body)
        if response.status_code == 404 and not _is_explained(response):
            fix = "give a Baton gateway's address, with /models/NAME only where it serves several"
            raise NotFound(f"{client.base_url} answers, but has no {path}: {fix}")
        raise_for_error(response)
        return response.json()
    except httpx.HTTPError as error:
        raise no_answer(client, error) from error
    except ValueError as error:
        raise Unavailable(f"{client.base_url} answers {path} with something that is not JSON") from error


def find_model(client: httpx.Client, name: str = "") -> ServedModel:
    """The named model, or the first one served. Raises NotFound."""
    listed = request_json(client, "/v1/models")["data"]
    found = next((one for one in listed if not name or one["id"] == name), None)
    if found is None:
        there = ", ".join(one["id"] for one in listed) or "none"
        raise NotFound(f"--model {name}: {client.base_url} does not serve it; there is {there}", param="model")
    longest = found.get("max_model_len")
    sampling = found.get("default_sampling")
    return ServedModel(
        name=found["id"],
        max_model_len=longest if isinstance(longest, int) else None,
        default_sampling=sampling if isinstance(sampling, dict) else None,
    )


def raise_for_error(response: httpx.Response) -> None:
    """Raises the typed error of a response with an error's status, and adds how to give a key if one is missing or
    wrong. The response must have been read."""
    if response.is_error:
        error = error_of(response.text, response.status_code)
        if lacks_key(response):
            variable = "BATON_ADMIN_KEY" if _is_admin(response) else "BATON_API_KEY"
            raise type(error)(f"{error.message.rstrip('.')}; here: --api-key, or the environment variable {variable}")
        raise error


def _is_explained(response: httpx.Response) -> bool:
    """Does a 404 have an error of Baton's that is about more than the path?"""
    error = error_of(response.text, response.status_code)
    return isinstance(error, NotFound) and not error.message.startswith("There is nothing at ")


def lacks_key(response: httpx.Response) -> bool:
    """Does the server want an API key, or another one?"""
    return response.status_code == 401 or (response.status_code == 403 and _is_admin(response))


def _is_admin(response: httpx.Response) -> bool:
    return response.request.url.path.startswith("/admin")


def error_of(body: str, status: int) -> BatonError:
    """The error of an OpenAI-style body, or one made from the status."""
    try:
        body_error = httpx.Response(status, text=body).json()["error"]
        return error_from_code(str(body_error.get("code")), str(body_error["message"]), param=body_error.get("param"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Unavailable(f"the server answered {status}: {body[:200].strip() or 'nothing'}")


def no_answer(client: httpx.Client, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(": ".join(filter(None, silence(client, error))))


def silence(client: httpx.Client, error: httpx.HTTPError) -> tuple[str, str]:
    """Returns why no answer came, and the fix ("" if none is known)."""
    url = client.base_url
    if isinstance(error, httpx.TimeoutException):
        return f"{url} does not answer in time", ""
    if isinstance(error, httpx.ConnectError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            fix = f"name the file of its authority in the environment variable SSL_CERT_FILE ({error})"
            return f"the certificate of {url} is not trusted", fix
        if "SSL" in str(error):
            return f"{url} answers, but not with TLS", f"write --url http://... ({error})"
        why = "" if "refused" in str(error) else f" ({str(error).partition('] ')[2] or error})"
        return f"no cluster answers at {url}{why}", "start one with `baton up`, or name another with --url"
    hint = ""
    if isinstance(error, httpx.RemoteProtocolError) and url.scheme == "http":
        hint = " (where it speaks TLS, write --url https://...; the port of gRPC is not that of HTTP)"
    return f"{url} broke the answer off: {error}{hint}", ""
