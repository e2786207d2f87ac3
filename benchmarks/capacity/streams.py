"""A streamed completion, read to its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx


async def whole_text(client: httpx.AsyncClient, body: Mapping[str, Any]) -> str:
    """The text of a stream of `body["max_tokens"]` tokens, which no end-of-sequence token may cut. Raises ValueError
    for one that is refused, fails, breaks off, or has another number of tokens, and httpx.HTTPError."""
    asked = {**body, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    text, finish, num_tokens, is_done = "", "", 0, False
    async with client.stream("POST", "/v1/completions", json=asked, timeout=300.0) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            is_done |= line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(line[:300])
            text += "".join(one["text"] for one in chunk["choices"])
            finish = "".join(str(one["finish_reason"] or "") for one in chunk["choices"]) or finish
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    if (finish, num_tokens, is_done) != ("length", body["max_tokens"], True):
        raise ValueError(
            f"it ended with {finish or 'nothing'} after {num_tokens} tokens{'' if is_done else ', cut off'}"
        )
    return text
