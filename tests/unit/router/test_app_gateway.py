"""A gateway opened on a checkpoint folder: the card, the prompt of a conversation, and what folders may lack."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from protos.errors import BadCheckpoint, Misconfigured
from protos.model_files.folder import FolderFiles
from router.gateway import Gateway, open_gateway
from router.text.bounded_template import BoundedTemplate
from router.text.model_card import ModelCard
from tests.unit.router.fake_cluster import Cluster, router_config
from tests.unit.router.scripted import Crew, Scripted, saying, serving

DEMO = Path(__file__).parents[3] / "demo" / "model"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does os.path.join do? 🙂"},
    {"role": "assistant", "content": "It joins paths."},
    {"role": "user", "content": "And naïve ones?"},
]


def opened(**changes: Any) -> Gateway:
    config = router_config(DEMO, "demo", **changes)
    return open_gateway(config, generate=Scripted(saying("hi")), fleet=Crew(), max_model_len=512)


async def test_a_conversation_has_transformers_tokens() -> None:
    gateway, theirs = opened(), PreTrainedTokenizerFast.from_pretrained(DEMO)
    expected = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert list(await gateway.texts.encode_chat(TALK)) == expected
    assert (await gateway.texts.encode(["def f(x):"], add_special_tokens=True))[0] == tuple(
        theirs("def f(x):").input_ids
    )


async def test_the_demo_models_template_shows_tools_and_their_calls() -> None:
    gateway, theirs = opened(), PreTrainedTokenizerFast.from_pretrained(DEMO)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    expected = theirs.apply_chat_template(asked, tools=tools, add_generation_prompt=True, return_dict=False)
    assert list(await gateway.texts.encode_chat(asked, tools=tools)) == expected
    gateway.texts.check_tools()
    assert gateway.texts.tool_format is not None
    assert BoundedTemplate(json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]).is_quick


async def test_the_card_tells_the_models_limits_and_defaults() -> None:
    gateway = opened(max_body_bytes=2000)
    card, generation = gateway.card, json.loads((DEMO / "generation_config.json").read_text())
    config = json.loads((DEMO / "config.json").read_text())
    assert (card.name, card.max_model_len, card.vocab_size) == ("demo", 512, config["vocab_size"])
    assert (card.temperature, card.top_p) == (generation["temperature"], generation["top_p"])
    assert card.eos_token_ids == set(generation["eos_token_id"])
    assert card.fingerprint == opened().card.fingerprint
    assert gateway.http.max_body_bytes == 2000


def write(folder: Path, **files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_a_card_without_recommendations_is_neutral(tmp_path: Path) -> None:
    write(tmp_path, config={"max_position_embeddings": 64, "vocab_size": 10, "eos_token_id": 2})
    card = ModelCard.load(FolderFiles(tmp_path), "m")
    assert (card.max_model_len, card.vocab_size, card.eos_token_ids) == (64, 10, frozenset({2}))
    assert (card.temperature, card.top_p, card.top_k, card.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def test_the_fingerprint_changes_with_the_model(tmp_path: Path) -> None:
    write(tmp_path, config={"max_position_embeddings": 64, "vocab_size": 10})
    before = ModelCard.load(FolderFiles(tmp_path), "m").fingerprint
    write(tmp_path, generation_config={"temperature": 0.5})
    assert ModelCard.load(FolderFiles(tmp_path), "m").fingerprint != before


def test_a_config_that_says_too_little_is_refused(tmp_path: Path) -> None:
    write(tmp_path, config={"vocab_size": 10})
    with pytest.raises(BadCheckpoint, match="max_position_embeddings"):
        ModelCard.load(FolderFiles(tmp_path), "m")


@pytest.mark.parametrize("name", ["chat_template.jinja", "model.safetensors"])
def test_a_folder_in_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    write(tmp_path, config={"max_position_embeddings": 64, "vocab_size": 10})
    (tmp_path / name).mkdir()
    with pytest.raises(BadCheckpoint, match=re.escape(str(tmp_path / name))):
        ModelCard.load(FolderFiles(tmp_path), "m")


def test_the_servers_sampling_stands_before_the_models(tmp_path: Path) -> None:
    write(
        tmp_path, config={"max_position_embeddings": 64, "vocab_size": 10}, generation_config={"top_p": 0.5, "top_k": 7}
    )
    card = ModelCard.load(FolderFiles(tmp_path), "m", sampling="temperature=0.7, top_p=0.95")
    assert card.default_sampling == {"temperature": 0.7, "top_p": 0.95, "top_k": 7}
    assert ModelCard.load(FolderFiles(tmp_path), "m", sampling="top_p=1,top_k=0").default_sampling == {}


@pytest.mark.parametrize("sampling", ["heat=1", "temperature", "temperature=3", "top_k=1.5", "top_p=nan"])
def test_a_sampling_that_no_request_may_have_is_refused(sampling: str, tmp_path: Path) -> None:
    write(tmp_path, config={"max_position_embeddings": 64, "vocab_size": 10})
    with pytest.raises(Misconfigured) as refused:
        ModelCard.load(FolderFiles(tmp_path), "m", sampling=sampling)
    assert refused.value.param == "sampling"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", math.nan), ("top_p", -5), ("top_k", 1.5), ("min_p", True)],
)
def test_a_recommendation_that_no_request_may_have_is_refused(name: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, config={"max_position_embeddings": 64, "vocab_size": 10}, generation_config={name: value})
    with pytest.raises(BadCheckpoint) as refused:
        ModelCard.load(FolderFiles(tmp_path), "m")
    assert refused.value.param == name


@pytest.mark.parametrize("max_queued", [0, 2])
async def test_prompts_of_one_request_do_not_fill_the_queue(max_queued: int) -> None:
    cluster = Cluster(max_queued=max_queued, max_backlog=1)
    config = replace(cluster.config, model_path=DEMO, model_name="demo")
    gateway = open_gateway(config, generate=cluster.router.admission, fleet=cluster.fleet, max_model_len=512)
    try:
        await cluster.add("p0", "d0")
        async with serving(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
            reply = await http.post("/v1/embeddings", json={"model": "demo", "input": ["hello"] * 20})
    finally:
        await cluster.close()
    assert (reply.status_code, len(reply.json().get("data", ()))) == (200, 20)
