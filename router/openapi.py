"""The API for machines, /openapi.json: every route with its body, its answers and every error it may answer with.

    paths: the application's routes     bodies: router.openai.schema     answers: replies.py of openai/ and admin/

A test holds that every route has its line in OPERATIONS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.routing import Route

from router.admin import replies as admin
from router.admin.adapters import AdapterBody, AdapterOrderReply, AdaptersReply
from router.admin.capacity import CapacityBody
from router.admin.kv import MIN_TIMEOUT_S
from router.admin.ledger_replies import ChargePageReply, CostsReply, UsagePageReply, VectorUsagePageReply
from router.admin.requests import DEFAULT_COUNT, MAX_COUNT
from router.anthropic import replies as anthropic
from router.anthropic.schema import MessagesBody, PromptBody
from router.batches.operations import BATCH_OPERATIONS
from router.conditions import OF_TOOLS
from router.dispatch.lane_probe import PROBE_TIMEOUT_S
from router.http.body import MAX_TTFT_MS
from router.http.size_limits import MAX_PIECES
from router.ledger.organization import COST_GROUPS, LATEST_S, MAX_COST_DAYS, USAGE_GROUPS, VECTOR_GROUPS, WIDTHS
from router.ledger.report import GROUPS
from router.message_batches.operations import MESSAGE_BATCH_OPERATIONS
from router.ollama import replies as ollama
from router.ollama.conversations import OLLAMA_ROLES
from router.ollama.embed import OllamaEmbedBody, OllamaEmbeddingsBody
from router.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from router.openai import responses
from router.openai.embeddings import EmbeddingBody
from router.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from router.operation import Operation, Schema, query_parameter
from router.responses.replies import InputTokensReply, ResponsesReply
from router.responses.schema import InputBody, ResponsesBody
from router.text.model_card import ModelCard
from router.text.sampling_request import MAX_CHOICES, RANGES

_REASONS = {
    400: "The request is wrong: `param` names what to mend",
    401: "No key, or none that is known here",
    403: "The key is not for this",
    404: "There is no such model, request or worker",
    408: "The body did not come to its end in time",
    413: "The body is too large",
    415: "The body is compressed: send plain JSON",
    429: "Too busy, or over the tenant's limits: come again after `Retry-After` seconds",
    431: "The headers and the path are too large",
    500: "A bug of ours: the log has it under `x-baton-request-id`",
    503: "Nothing was wrong with the request: send it again",
    504: "It took too long",
    529: "No room now, or no worker: send it again, after `Retry-After` seconds if given",
}
_ALWAYS = (413, 431, 500)
_READING = (400, 401, 404, 408, 415)
_GENERATING = (*_READING, 429, 503, 504)
_ANTHROPIC = (*_READING, 429, 504, 529)
_ADMIN = (401, 403)

REQUEST_ID_HEADER = {
    "description": "The request's name: the client's own, or its x-request-id, or a new one",
    "required": True,
    "schema": {"type": "string"},
}
RETRY_AFTER = {"description": "Seconds", "schema": {"type": "string", "pattern": "^[1-9][0-9]*$"}}
WWW_AUTHENTICATE = {"required": True, "schema": {"type": "string", "const": "Bearer"}}


_MAX_TTFT = {
    "name": MAX_TTFT_MS,
    "in": "header",
    "description": "max_ttft_ms, for clients that cannot put it into the body, whose word counts",
    "schema": {"type": "number", "minimum": RANGES["max_ttft_ms"][0], "maximum": RANGES["max_ttft_ms"][1]},
}
_LIMIT = {
    "name": "limit",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_COUNT, "default": DEFAULT_COUNT},
}
_STREAM = {"text/event-stream": "With stream = true: an event for each piece, `data: [DONE]` at the end"}
_NAMED = {"text/event-stream": "With stream = true: named events, as the API's clients read them"}
_LINES = {"application/x-ndjson": "Unless stream = false: a line of JSON for each piece"}
# Before OpenAPI 3.2, the schema of a stream of events is taken for that of each.
_EVENT: Schema = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_METRICS = {"text/plain": "Prometheus", "application/openmetrics-text": "OpenMetrics, if it is asked for"}


_SECOND = {"type": "integer", "minimum": 0, "maximum": LATEST_S}
_GROUPED = f"({'|'.join(GROUPS)})"
_COSTS = (
    query_parameter("since", _SECOND),
    query_parameter("until", _SECOND),
    query_parameter("by", {"type": "string", "pattern": f"^({_GROUPED}(,{_GROUPED})*)?$"}),
)


_LEAST_MAX_BUCKETS = min(most for _, _, most in WIDTHS.values())


def _buckets(groups: Sequence[str], *, most: int = _LEAST_MAX_BUCKETS) -> Sequence[Schema]:
    return (
        query_parameter("start_time", _SECOND, required=True),
        query_parameter("end_time", _SECOND),
        query_parameter("page", _SECOND),
        query_parameter("bucket_width", {"type": "string", "enum": list(WIDTHS)}),
        query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": most}),
        query_parameter("group_by", {"type": "array", "items": {"type": "string", "enum": list(groups)}}),
    )


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/"): Operation(summary="The cluster in a browser", texts={"text/html": "It asks the routes below"}),
    ("post", "/v1/chat/completions"): Operation(
        summary="An answer to a conversation, whole or streamed",
        body=ChatBody, reply=responses.ChatReply, errors=_GENERATING, texts=_STREAM, parameters=(_MAX_TTFT,),
    ),
    ("post", "/v1/completions"): Operation(
        summary="Continuations of prompts, whole or streamed",
        body=CompletionBody, reply=responses.CompletionReply, errors=_GENERATING, texts=_STREAM,
        parameters=(_MAX_TTFT,),
    ),
    ("post", "/v1/messages"): Operation(
        summary="An answer to a conversation, as in Anthropic's Messages API",
        body=MessagesBody, reply=anthropic.MessageReply, errors=_ANTHROPIC, texts=_NAMED, parameters=(_MAX_TTFT,),
        error=anthropic.MessagesErrorReply,
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        summary="How many tokens a conversation has, as in Anthropic's Messages API",
        body=PromptBody, reply=anthropic.TokenCountReply, errors=_READING, error=anthropic.MessagesErrorReply,
    ),
    ("post", "/v1/responses"): Operation(
        summary="An answer to items of a conversation, as in OpenAI's Responses API without a store",
        body=ResponsesBody, reply=ResponsesReply, errors=_GENERATING, texts=_NAMED, parameters=(_MAX_TTFT,),
    ),
    ("post", "/v1/responses/input_tokens"): Operation(
        summary="How many tokens an input has, as in OpenAI's Responses API",
        body=InputBody, reply=InputTokensReply, errors=_READING,
    ),
    ("post", "/v1/embeddings"): Operation(
        summary="Vectors of prompts", body=EmbeddingBody, reply=responses.EmbeddingsReply, errors=_GENERATING,
        parameters=(_MAX_TTFT,),
    ),
    ("post", "/api/embed"): Operation(
        summary="Vectors of texts, as in Ollama", body=OllamaEmbedBody, reply=ollama.OllamaEmbedReply,
        errors=_GENERATING, parameters=(_MAX_TTFT,), error=ollama.OllamaErrorReply,
    ),
    ("post", "/api/embeddings"): Operation(
        summary="The vector of a text, as in Ollama's older API", body=OllamaEmbeddingsBody,
        reply=ollama.OllamaEmbeddingsReply, errors=_GENERATING, parameters=(_MAX_TTFT,), error=ollama.OllamaErrorReply,
    ),
    ("get", "/api/ps"): Operation(
        summary="The models loaded, as in Ollama", reply=ollama.OllamaLoadedReply, errors=(401,),
        error=ollama.OllamaErrorReply,
    ),
    ("post", "/api/chat"): Operation(
        summary="An answer to a conversation, as in Ollama", body=OllamaChatBody, reply=ollama.OllamaChatReply,
        errors=_GENERATING, texts=_LINES, parameters=(_MAX_TTFT,), error=ollama.OllamaErrorReply,
    ),
    ("post", "/api/generate"): Operation(
        summary="An answer to a prompt, as in Ollama", body=OllamaGenerateBody, reply=ollama.OllamaGenerateReply,
        errors=_GENERATING, texts=_LINES, parameters=(_MAX_TTFT,), error=ollama.OllamaErrorReply,
    ),
    ("get", "/api/tags"): Operation(
        summary="The models served, as in Ollama", reply=ollama.OllamaTagsReply, errors=(401,),
        error=ollama.OllamaErrorReply,
    ),
    ("post", "/api/show"): Operation(
        summary="One model, as in Ollama", body=OllamaShowBody, reply=ollama.OllamaShowReply, errors=_READING,
        error=ollama.OllamaErrorReply,
    ),
    ("get", "/api/version"): Operation(
        summary="The version of Ollama's API that is spoken", reply=ollama.OllamaVersionReply, errors=(401,),
        error=ollama.OllamaErrorReply,
    ),
    ("get", "/v1/models"): Operation(summary="The models served", reply=responses.ModelsReply, errors=(401,)),
    ("get", "/v1/models/{name}"): Operation(summary="One model", reply=responses.ModelReply, errors=(401, 404)),
    ("post", "/tokenize"): Operation(
        summary="What a prompt or a conversation costs",
        body=TokenizeBody, reply=responses.TokenizeReply, errors=_READING,
    ),
    ("post", "/detokenize"): Operation(
        summary="What tokens say", body=DetokenizeBody, reply=responses.DetokenizeReply, errors=_READING
    ),
    ("get", "/health"): Operation(summary="The process lives", reply=responses.HealthReply),
    ("get", "/ready"): Operation(summary="A request would be served", reply=responses.ReadyReply),
    ("get", "/metrics"): Operation(summary="For Prometheus", texts=_METRICS),
    ("get", "/admin/status"): Operation(summary="The fleet", reply=admin.StatusReply, errors=_ADMIN),
    ("get", "/admin/capacity"): Operation(
        summary="The desired fleet and its latest changes", reply=admin.CapacityReply, errors=(400, *_ADMIN, 503)
    ),
    ("post", "/admin/capacity"): Operation(
        summary="Another number of workers, or another role of a worker",
        body=CapacityBody, reply=admin.ChangeReply, status=202, errors=(*_READING, *_ADMIN, 503),
    ),
    ("get", "/admin/capacity/sights"): Operation(
        summary="What every gateway's clients saw lately", reply=admin.SightsReply, errors=(400, *_ADMIN, 503)
    ),
    ("post", "/admin/lanes/probe"): Operation(
        summary="Moves KV from one worker to another, and compares their answers", reply=admin.LaneReadingReply,
        errors=(400, *_ADMIN, 404, 429, 503, 504),
        parameters=(
            query_parameter("source", {"type": "string"}, required=True),
            query_parameter("destination", {"type": "string"}, required=True),
            query_parameter("num_tokens", {"type": "integer", "minimum": 1, "maximum": 10**6, "default": 64}),
            query_parameter("timeout_s", {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": PROBE_TIMEOUT_S}),
        ),
    ),
    ("get", "/admin/kv"): Operation(summary="Every ticket and lane", reply=admin.KVReply, errors=_ADMIN),
    ("post", "/admin/workers/{worker_id}/drain"): Operation(
        summary="No new work for a worker: what runs moves on or finishes, then it ends",
        reply=admin.DrainReply, status=202, errors=(*_ADMIN, 404, 503),
    ),
    ("get", "/admin/adapters"): Operation(
        summary="LoRA adapters, and the workers that have them", reply=AdaptersReply, errors=_ADMIN
    ),
    ("post", "/admin/adapters"): Operation(
        summary="Every worker loads a LoRA adapter", body=AdapterBody, reply=AdapterOrderReply,
        errors=(400, *_ADMIN, 503),
    ),
    ("delete", "/admin/adapters/{name}"): Operation(
        summary="No worker takes requests for a LoRA adapter", reply=AdapterOrderReply, errors=(*_ADMIN, 404, 503),
    ),
    ("get", "/admin/history"): Operation(
        summary="The last hour, by periods", reply=admin.HistoryReply, errors=(400, *_ADMIN),
        parameters=(query_parameter("since", _SECOND),),
    ),
    ("get", "/admin/requests"): Operation(
        summary="The latest requests", reply=admin.RequestsReply, errors=(400, *_ADMIN), parameters=(_LIMIT,)
    ),
    ("get", "/admin/requests/{name}"): Operation(
        summary="How a request was routed, why, and how it went", reply=admin.RequestReply, errors=(*_ADMIN, 404)
    ),
    ("get", "/admin/requests/{name}/cache"): Operation(
        summary="Why a prompt was not found in a cache", reply=admin.CacheReply, errors=(*_ADMIN, 404)
    ),
    ("post", "/admin/profile"): Operation(
        summary="Every worker records its steps from now on", reply=admin.ProfileReply, errors=_ADMIN
    ),
    ("get", "/admin/profile"): Operation(
        summary="The steps recorded so far", reply=admin.ProfileReply, errors=_ADMIN
    ),
    ("delete", "/admin/profile"): Operation(
        summary="Ends the recording, and tells it", reply=admin.ProfileReply, errors=_ADMIN
    ),
    ("get", "/admin/costs"): Operation(
        summary="What was used, charged and spent, by group", reply=CostsReply, errors=(400, *_ADMIN, 404, 503),
        parameters=_COSTS,
    ),
    ("get", "/v1/organization/usage/completions"): Operation(
        summary="Tokens by buckets of time, as in OpenAI's API", reply=UsagePageReply, errors=(400, *_ADMIN, 404, 503),
        parameters=_buckets(USAGE_GROUPS),
    ),
    ("get", "/v1/organization/usage/embeddings"): Operation(
        summary="Tokens of embeddings by buckets of time, as in OpenAI's API", reply=VectorUsagePageReply,
        errors=(400, *_ADMIN, 404, 503), parameters=_buckets(VECTOR_GROUPS),
    ),
    ("get", "/v1/organization/costs"): Operation(
        summary="Charges by buckets of time, as in OpenAI's API", reply=ChargePageReply,
        errors=(400, *_ADMIN, 404, 503), parameters=_buckets(COST_GROUPS, most=MAX_COST_DAYS),
    ),
    ("get", "/admin/shadows"): Operation(
        summary="What other policies would have done", reply=admin.ShadowsReply, errors=_ADMIN
    ),
    **BATCH_OPERATIONS,
    **MESSAGE_BATCH_OPERATIONS,
}  # fmt: skip


_REQUEST_NAME = "x-baton-request-id of an answer, the answer's own id, or that of a job"
_NAMES = {"/admin/requests/{name}": _REQUEST_NAME, "/admin/requests/{name}/cache": _REQUEST_NAME}

_UNTOLD = Operation(summary="Not described yet")


def describe(
    app: FastAPI,
    cards: Sequence[ModelCard],
    *,
    needs_key: bool,
    needs_admin_key: bool,
    has_tools: bool,
    has_effort: bool,
    roles: Sequence[str],
) -> Schema:
    """The document for a gateway of these models, whose chat templates know the `roles`, and with `has_effort` how
    much a model is to reason. Where no key is needed one may still be sent."""
    document = get_openapi(title=app.title, version=app.version, routes=())
    document["paths"] = _paths(app)
    schemas: Schema = {}
    _schema(responses.ErrorReply, schemas, "serialization")
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            operation = OPERATIONS.get((method, path), _UNTOLD)
            described |= _operation(operation, schemas, path)
            needed = needs_admin_key if path.startswith(("/admin", "/v1/organization/")) else needs_key
            if 401 in operation.errors:
                described["security"] = [{"key": []}] if needed else [{"key": []}, {}]
    cut = (MessagesBody, OllamaChatBody, OllamaGenerateBody)
    for body in {operation.body for operation in OPERATIONS.values() if operation.body is not None}:
        _narrow(schemas[body.__name__], cards, cuts_answers=body in cut)
        if not has_tools and "tools" in schemas[body.__name__]["properties"]:
            _without_tools(schemas[body.__name__])
    if not has_effort:
        schemas["ChatBody"]["properties"]["reasoning_effort"] = {"type": "null"}
    schemas["ChatMessage"]["properties"]["role"]["enum"] = list(roles)
    ollama_roles = {"role": {"enum": [role for role in OLLAMA_ROLES if role in roles]}}
    _with_parts(schemas["OllamaChatBody"]["properties"]["messages"], "items", ollama_roles)
    models = {"model": {"enum": [card.name for card in cards]}}
    _with_parts(schemas["MessageRequest"]["properties"], "params", models)
    document["components"] = {
        "schemas": dict(sorted(schemas.items())),
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    return document


def _with_parts(schemas: Schema, name: str, parts: Schema) -> None:
    """Describes these properties of an object otherwise: in a copy, since the object's schema is a constant."""
    schemas[name] = schemas[name] | {"properties": schemas[name]["properties"] | parts}


def _paths(app: FastAPI) -> Schema:
    """Descriptions of the document's routes, by path."""
    paths: Schema = {}
    for route in app.routes:
        if not isinstance(route, Route) or not route.include_in_schema:
            continue
        path = route.path_format
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            | ({"description": _NAMES[path]} if path in _NAMES else {})
            for name in route.param_convertors
        ]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            name = re.sub(r"\W", "_", f"{route.name}{path}_{method.lower()}")
            described: Schema = {"operationId": name} | ({"parameters": parameters} if parameters else {})
            paths.setdefault(path, {})[method.lower()] = described
    return paths


def _operation(operation: Operation, schemas: Schema, path: str) -> Schema:
    described: Schema = {"summary": operation.summary, "responses": _responses(operation, schemas, path)}
    if operation.body is not None:
        reference = _schema(operation.body, schemas, "validation")
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    return described


def _responses(operation: Operation, schemas: Schema, path: str) -> Schema:
    content: Schema = {
        kind: {"schema": (_EVENT if "text/event-stream" in kind else {"type": "string"}) | {"description": description}}
        for kind, description in (operation.texts or {}).items()
    }
    if operation.reply is not None:
        content = {"application/json": {"schema": _schema(operation.reply, schemas, "serialization")}} | content
    named: Schema = {"x-baton-request-id": REQUEST_ID_HEADER}
    responses: Schema = {
        str(operation.status): {"description": operation.summary, "headers": named, "content": content}
    }
    error: Schema = {"application/json": {"schema": _schema(operation.error, schemas, "serialization")}}
    for status in sorted({*operation.errors, *_ALWAYS}):
        headers: Schema = dict(named)
        if status in (429, 503, 529):
            headers["retry-after"] = RETRY_AFTER
        if status == 401:
            headers["www-authenticate"] = WWW_AUTHENTICATE
        responses[str(status)] = {"description": _REASONS[status], "headers": headers, "content": error}
    if path == "/ready":  # the same words, with the status that load balancers look at
        responses["503"] = responses["200"] | {"description": "A request would not be served, for the `reason`"}
    return responses


def _schema(kind: type[BaseModel], schemas: Schema, mode: JsonSchemaMode) -> Schema:
    """A reference to the schema of `kind`, which is put to `schemas` with all it is made of."""
    whole = TypeAdapter(kind).json_schema(mode=mode, ref_template="#/components/schemas/{model}")
    schemas |= whole.pop("$defs", {})
    schemas[kind.__name__] = whole
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _without_tools(schema: Schema) -> None:
    """For a body of a model without it. (More is accepted than is described here.)"""
    known = schema["properties"]
    known["tools"] = {"type": ["array", "null"], "maxItems": 0}
    if any(one in OF_TOOLS for one in schema.get("allOf", ())):  # the others' conditions hold without tools, too
        known["tool_choice"] = {"enum": ["none", "auto", None]}
        schema["allOf"] = [one for one in schema["allOf"] if one not in OF_TOOLS]


def _up_to(number: int) -> str:
    """A regular expression for 0 to the number, in decimals and with no more digits."""
    digits = str(number)
    shorter = [f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    less = [
        f"{digits[:place]}[0-{int(digit) - 1}]" + f"[0-9]{{{len(digits) - place - 1}}}" * (place < len(digits) - 1)
        for place, digit in enumerate(digits)
        if digit != "0"
    ]
    return "|".join([*shorter, *less, digits])


def _narrow(schema: Schema, cards: Sequence[ModelCard], *, cuts_answers: bool) -> None:
    """Adapts a body's schema to the served models: their names, and the token ids and the context that each of them
    has. `cuts_answers`: max_tokens may be more than the context holds."""
    longest, vocab_size = min(card.max_model_len for card in cards), min(card.vocab_size for card in cards)
    known, token_id = schema["properties"], {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    required = schema.get("required", ())
    if "model" in known:
        known["model"]["enum"] = [*(card.name for card in cards), *(() if "model" in required else (None,))]
    for name in {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"} & known.keys():
        if not cuts_answers:
            known[name]["maximum"] = longest - 1  # after the shortest prompt
    if "logit_bias" in known:
        known["logit_bias"]["propertyNames"] = {"pattern": f"^({_up_to(vocab_size - 1)})$"}
    if "dimensions" in known and (sizes := [card.vector_size for card in cards if card.vector_size]):
        size = {"type": "integer", "minimum": 1, "maximum": min(sizes)}
        known["dimensions"] = known["dimensions"] | {"anyOf": [size, {"type": "null"}]}
    if "tokens" in known:
        known["tokens"] |= {"items": token_id, "maxItems": longest}
    if "stop_token_ids" in known:
        known["stop_token_ids"]["items"] = token_id
    if "messages" in known:
        known["messages"] = known["messages"] | {"maxItems": min(longest, MAX_PIECES)}
    prompts = "input" if "encoding_format" in known and "input" in known else "prompt"
    if prompts in required:
        ids = {"type": "array", "items": token_id, "minItems": 1, "maxItems": longest - 1}
        many = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES}
        texts = many | {"items": {"type": "string"}}
        known[prompts]["anyOf"] = [{"type": "string"}, texts, ids, many | {"items": ids}]
