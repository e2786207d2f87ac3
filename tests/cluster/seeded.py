"""Sixteen requests of every kind, each with a seed or greedy: their answers are the same whatever happens meanwhile."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.cluster.deployed import LONG

NUM_REQUESTS = 16
WORDS = {"structured_outputs": {"regex": "([a-z]{1,9} ){100}"}}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "logprobs": 1},
    {"temperature": 0.7, "seed": 11, "top_p": 0.9, "top_k": 40, "stream": True},
    {"temperature": 0.8, "seed": 3, "n": 2, "stream": True},
    {"temperature": 0.0, "logprobs": 2, "stream": True},
    {"temperature": 0.6, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 9, "repetition_penalty": 1.2, "stream": True, "ignore_eos": False, **WORDS},
    {"temperature": 0.9, "seed": 13, "stop": ["return", "self"], "ignore_eos": False},
)


def asked(number: int) -> dict[str, Any]:
    """One of 16 requests; half of their prompts use both pools, and half of each kind want token ids."""
    prompt = f"# {number}\n{LONG}" if number % 2 else f"# {number}\ndef read(path):\n"
    body = {"model": "demo", "prompt": prompt, "max_tokens": 64, "ignore_eos": True}
    return body | KINDS[number // 2] | {"return_token_ids": (number + number // 2) % 2 == 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float]

    def check(self, expected: Choice) -> None:
        """Logprobs depend on the batch, a little."""
        assert replace(self, logprobs=[]) == replace(expected, logprobs=[])
        assert self.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def answer(url: str, number: int, **options: Any) -> list[Choice]:
    body = asked(number) | options
    with httpx.Client(timeout=120.0) as client:
        if not body.get("stream"):
            response = client.post(f"{url}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            pieces = response.json()["choices"]
        else:
            pieces = []
            with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        assert "error" not in chunk, chunk
                        pieces += chunk["choices"]
    choices = [whole([piece for piece in pieces if piece["index"] == index]) for index in range(body.get("n", 1))]
    for choice in choices:
        assert bool(choice.token_ids) == body["return_token_ids"]
        assert bool(choice.logprobs) == ("logprobs" in body)
    return choices


def whole(pieces: list[dict[str, Any]]) -> Choice:
    told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    return Choice(
        text="".join(piece["text"] for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.get("token_ids", ())],
        finish_reason=next(piece["finish_reason"] for piece in pieces if piece["finish_reason"]),
        logprobs=[
            value
            for choice in told
            for its, top in zip(choice["token_logprobs"], choice["top_logprobs"], strict=True)
            for value in (its, *sorted(top.values()))
        ],
    )


def check(seen: list[Choice], expected: list[Choice]) -> None:
    for choice, like in zip(seen, expected, strict=True):
        choice.check(like)
