"""POST /tokenize and /detokenize, as in vLLM: the tokens of a text or a conversation, and the text of tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest
from router.faces.openai.openai_bodies import DetokenizeBody, TokenizeBody
from router.gateway import Gateway
from router.http.body import read_body
from router.http.error_responses import json_response


async def tokenize(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, TokenizeBody, gateway.widest)
    gateway = gateway.serving(gateway.card.name if body.model is None else body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either 'prompt' or 'messages'", param="prompt")
    if body.messages is not None:
        tools = [tool.function.shown() for tool in body.tools or ()]
        ids = await gateway.texts.encode_chat(
            [message.to_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            tools=tools,
        )
    else:
        [ids] = await gateway.texts.encode(
            [body.prompt or ""],
            add_special_tokens=body.add_special_tokens,
            split_special_tokens=body.split_special_tokens,
        )
    reply = {"count": len(ids), "max_model_len": gateway.card.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        reply["token_strs"] = [gateway.texts.tokenizer.token_text(one) for one in ids]
    return json_response(reply)


async def detokenize(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, DetokenizeBody, gateway.widest)
    gateway = gateway.serving(gateway.card.name if body.model is None else body.model)
    for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token_id < gateway.card.vocab_size:
            allowed = f"token ids between 0 and {gateway.card.vocab_size - 1}"
            raise InvalidRequest(f"'tokens' has the value {token_id}: it must be made of {allowed}", param="tokens")
    return json_response({"prompt": await gateway.texts.tokenizer.text_of(body.tokens)})
