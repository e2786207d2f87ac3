"""The API for machines, /openapi.json: every endpoint with its request, its key and the form of its errors. Answers are
described by the APIs in whose form they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from protos.errors import InvalidRequest
from router.faces.endpoint import Endpoint, Face, Schema
from router.http.api import Api
from router.http.body import MAX_TTFT_MS, Body
from router.text.model_card import RANGES

_LOW, _HIGH = RANGES["max_ttft_ms"]
_MAX_TTFT = {
    "name": MAX_TTFT_MS,
    "in": "header",
    "description": "max_ttft_ms, for clients that cannot put it into the body, whose word counts",
    "schema": {"type": "number", "minimum": _LOW, "maximum": _HIGH},
}


def describe(
    app: FastAPI, faces: Sequence[Face], models: Sequence[str], *, needs_key: bool, needs_admin_key: bool
) -> Schema:
    """The document for a gateway of these models. A key may be sent even if none is needed."""
    document = get_openapi(title=app.title, version=app.version, routes=())
    schemas: Schema = {}
    needed = {"client": needs_key, "admin": needs_admin_key}
    for face in faces:
        for endpoint in face.endpoints:
            described = _described(endpoint, face.api, schemas)
            if endpoint.key:
                described["security"] = [{"key": []}] if needed[endpoint.key] else [{"key": []}, {}]
            path = re.sub(r":\w+}", "}", endpoint.path)
            if endpoint.body is not None and endpoint.key == "client":
                _name_models(schemas[endpoint.body.__name__], models)
            document["paths"].setdefault(path, {})[endpoint.method.lower()] = described
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    document["components"] = {"schemas": dict(sorted(schemas.items())), "securitySchemes": keys}
    return document


def _described(endpoint: Endpoint, api: Api, schemas: Schema) -> Schema:
    names = re.findall(r"{(\w+)", endpoint.path)
    inside = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    described: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").strip("_"),
        "summary": endpoint.summary,
        "parameters": [*inside, *_queried(endpoint), *([_MAX_TTFT] if endpoint.track else [])],
        "responses": {"2XX": {"description": endpoint.summary}},
    }
    if endpoint.key:
        schemas[f"{api.name}_error"] = _shape(api.error_body(InvalidRequest("", param="n")))
        failed = {"application/json": {"schema": {"$ref": f"#/components/schemas/{api.name}_error"}}}
        described["responses"]["default"] = {"description": "An error", "content": failed}
    if (request := _request(endpoint, schemas)) is not None:
        described["requestBody"] = {"required": True, "content": request}
    return described


def _queried(endpoint: Endpoint) -> Iterator[Schema]:
    whole = TypeAdapter(endpoint.query).json_schema() if endpoint.query is not None else {"properties": {}}
    for name, schema in whole["properties"].items():
        yield {"name": name, "in": "query", "required": name in whole.get("required", ()), "schema": schema}


def _request(endpoint: Endpoint, schemas: Schema) -> Schema | None:
    if endpoint.form is not None:
        return {"multipart/form-data": {"schema": _reference(endpoint.form, schemas)}}
    return None if endpoint.body is None else {"application/json": {"schema": _reference(endpoint.body, schemas)}}


def _reference(kind: type[Body], schemas: Schema) -> Schema:
    """Adds the schema of `kind`, and those that it refers to, to `schemas`."""
    whole = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
    schemas |= whole.pop("$defs", {})
    schemas[kind.__name__] = whole
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _name_models(schema: Schema, models: Sequence[str]) -> None:
    if "model" in (fields := schema["properties"]):
        fields["model"]["enum"] = [*models, *(() if "model" in schema.get("required", ()) else (None,))]


def _shape(value: Any) -> Schema:
    """Builds the schema of objects like this one. A string may be null."""
    if not isinstance(value, dict):
        return {"type": ["string", "null"]}
    return {"type": "object", "required": list(value), "properties": {name: _shape(one) for name, one in value.items()}}
