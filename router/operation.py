"""What the API's description says of one route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from router.http.validation import Body
from router.openai import responses

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`errors` are statuses beside those that every route may answer with. `texts` are other media types of success.
    `parameters` are those outside of the path. `form`: the
    fields of a form, where the body is one. `error` is the body of every error."""

    summary: str
    reply: type[BaseModel] | None = None
    status: int = 200
    body: type[Body] | None = None
    errors: Sequence[int] = ()
    texts: Mapping[str, str] | None = None
    parameters: Sequence[Schema] = ()
    form: Schema | None = None
    error: type[BaseModel] = responses.ErrorReply


def query_parameter(name: str, schema: Schema, *, required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": required, "schema": schema}
