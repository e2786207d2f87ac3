"""A `Generate` that says what it was told to, tokenizers trained in memory, and a live server round them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, cast

import numpy as np
import openai
import tokenizers
import uvicorn
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from uvicorn.server import ServerState

from protos.errors import NotFound, WorkerLost
from protos.values import Adapter, FinishReason, Logprobs, Profile, TokenLogprob, WorkerInfo, WorkerLoad, WorkerStats
from router.app import create_app
from router.auth.auth import AccessControl
from router.gateway import Gateway
from router.http.protocol import HttpProtocol
from router.jobs import AdapterReport, Job, TokenDelta
from router.model_texts import ModelTexts
from router.router_config import HttpConfig, TextConfig
from router.text.chat_template import ChatTemplate
from router.text.model_card import ModelCard
from router.text.tokenizer import Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?", "naïve café 你好 🙂"] * 20
SPECIALS = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Family = Callable[[], Tokenizer]
Step = TokenDelta | BaseException | asyncio.Event
Script = Callable[[Job], Iterable[Step]]


@cache
def byte_level(*, nfc: bool = False) -> Tokenizer:
    """Byte-level BPE as Llama 3 and Qwen have it: bos before every text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC() if nfc else None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return Tokenizer(backend, named_tokens={"bos_token": "<|bos|>", "eos_token": "<|end|>"})


@cache
def sentencepiece() -> Tokenizer:
    """BPE over ▁ words with byte fallback, as Llama 2 and Mistral have it."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "é"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "▁")]
    for word in (*words, *("".join(pair) for pair in merges)):
        vocabulary[word] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    worker_id: str = "decode-0"
    address: str = "127.0.0.1:7000"
    state: str = "ready"
    reason: str = ""
    info: WorkerInfo | None = None
    load: WorkerLoad = field(default_factory=lambda: WorkerLoad(num_running=3, num_blocks=64))
    num_cached_blocks: int = 0
    num_host_blocks: int = 0
    tokens_before: tuple[int, int] = (0, 0)


class Crew:
    """A fleet that is ready when it is told to be."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers or (Worker(),)
        self.is_ready = True
        self.amiss = self.sleeps = ""
        self.stored = ""
        self.loaded_adapters: dict[str, Adapter] = {}
        self.held: dict[str, WorkerStats] = {}
        self.profiles: dict[str, Profile] = {}
        self.recording: list[bool | None] = []
        self.drained: list[str] = []

    def ready(self) -> bool:
        return self.is_ready

    def asleep(self) -> str:
        return self.sleeps

    def degraded(self) -> str:
        return self.amiss

    def adapters(self) -> Mapping[str, Adapter]:
        return self.loaded_adapters

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        self.loaded_adapters[name] = Adapter(adapter_id="cd" * 16, name=name, path=path, rank=8, num_bytes=1)
        return AdapterReport(done={"w0": self.loaded_adapters[name]}, failed={"w1": "its disk is full"})

    async def unload_adapter(self, name: str) -> AdapterReport:
        if self.loaded_adapters.pop(name, None) is None:
            raise NotFound(f"no adapter {name!r} is loaded: there are none", param="name")
        return AdapterReport(done={"w0": None}, failed={})

    def stored_as(self, revision: str) -> str:
        return self.stored

    def status(self) -> Sequence[Worker]:
        return self.workers

    async def stats(self, worker_id: str) -> WorkerStats:
        if worker_id not in self.held:
            raise WorkerLost(f"worker {worker_id} has left")
        return self.held[worker_id]

    async def profile(self, worker_id: str, recording: bool | None = None) -> Profile:
        self.recording.append(recording)
        if worker_id not in self.profiles:
            raise WorkerLost(f"worker {worker_id} has left")
        return self.profiles[worker_id]

    async def drain(self, worker_id: str) -> int:
        if worker_id not in [worker.worker_id for worker in self.workers]:
            raise NotFound(f"there is no worker {worker_id}")
        self.drained.append(worker_id)
        return 3


class Scripted:
    """Plays a script for every job: a delta is given out, an exception raised, an event waited for.

    `started` and `closed` tell which jobs were begun and which ended, however they ended; `idle` is set when all have.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.jobs: list[Job] = []
        self.closed: list[str] = []
        self.began = asyncio.Event()
        self.idle = asyncio.Event()

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        self.jobs.append(job)
        self.began.set()
        try:
            for step in self._script(job):
                match step:
                    case TokenDelta():
                        await asyncio.sleep(0)
                        yield step
                    case BaseException():
                        raise step
                    case asyncio.Event():
                        await step.wait()
        finally:
            self.closed.append(job.request_id)
            if len(self.closed) == len(self.jobs):
                self.idle.set()


def saying(text: str, tokenizer: Tokenizer | None = None, *, at_once: int = 1) -> Script:
    """Says a text, `at_once` tokens a delta, up to the job's max_tokens, then the end token."""
    tokenizer = tokenizer or byte_level()
    ids = ids_of(text, tokenizer)
    return lambda job: token_deltas([*ids, tokenizer_end(tokenizer)], job, at_once=at_once)


def ids_of(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    [ids] = (tokenizer or byte_level())._encode([text], False)
    return list(ids)


def tokenizer_end(tokenizer: Tokenizer) -> int:
    [end] = ids_of(tokenizer.named_tokens["eos_token"], tokenizer)
    return end


def token_deltas(ids: Sequence[int], job: Job, *, at_once: int = 1) -> list[TokenDelta]:
    """Tokens as an engine gives them: STOP on the last unless max_tokens cuts before."""
    sampling = job.sampling
    tokens = list(ids[: sampling.max_tokens])
    reason = FinishReason.STOP if len(tokens) == len(ids) else FinishReason.LENGTH
    scores = [scored(token_id, sampling.logprobs) for token_id in tokens] if sampling.logprobs is not None else []
    prompt = sampling.prompt_logprobs
    before = [scored(token_id, prompt) for token_id in job.prompt_ids[1:]] if prompt is not None else []
    deltas = [
        TokenDelta(
            token_ids=tuple(tokens[at : at + at_once]),
            logprobs=tuple(scores[at : at + at_once]),
            num_cached_tokens=len(job.prompt_ids) // 2 if at == 0 else 0,
            queue_s=0.01 if at == 0 else 0.0,
        )
        for at in range(0, len(tokens), at_once)
    ]
    vector = np.array([3, 4, *[0] * 6], dtype=np.float32).tobytes() if sampling.pooling else b""
    deltas[-1] = replace(deltas[-1], finish_reason=reason, embedding=vector)
    middle = len(before) // 2  # as a chunked prefill would
    return [TokenDelta(prompt_logprobs=tuple(part)) for part in (before[:middle], before[middle:]) if part] + deltas


def scored(token_id: int, num_top: int) -> Logprobs:
    """A made-up distribution: the chosen token is the second best; logprobs fall by one a rank."""
    ranked = [token_id - 1, token_id, *range(token_id + 1, token_id + num_top)]
    top = tuple(TokenLogprob(token_id=number, logprob=-0.5 - rank) for rank, number in enumerate(ranked[:num_top]))
    return Logprobs(chosen=TokenLogprob(token_id=token_id, logprob=-1.5), top=top, rank=2)


def make_gateway(generate: Any, **changes: Any) -> Gateway:
    """A model of 256 tokens' context that recommends temperature 0.7."""
    tokenizer = changes.pop("tokenizer", None) or byte_level()
    card = ModelCard(
        name="tiny",
        max_model_len=256,
        vocab_size=512,
        eos_token_ids=frozenset({tokenizer_end(tokenizer)}),
        temperature=0.7,
        aliases=changes.pop("model_aliases", ()),
    )
    template = ChatTemplate(TEMPLATE, named_tokens=tokenizer.named_tokens, added_tokens=tokenizer.added_tokens)
    parts: dict[str, Any] = {"card": card, "tokenizer": tokenizer, "template": template} | changes
    http, parts["config"] = _taken(HttpConfig, parts), _taken(TextConfig, parts)
    texts = _taken(ModelTexts, parts)
    access = parts.setdefault("access", AccessControl())
    observers = (access.metrics, parts["ledger"]) if parts.get("ledger") else (access.metrics,)
    given: dict[str, Any] = {"fleet": Crew(), "wall_clock": lambda: 1_700_000_000.5, "observers": observers} | parts
    return Gateway(texts=texts, http=http, generate=generate, **given)


def _taken(kind: type[Any], parts: dict[str, Any]) -> Any:
    return kind(**{field.name: parts.pop(field.name) for field in fields(kind) if field.name in parts})


def with_card(gateway: Gateway, **changes: Any) -> Gateway:
    return replace(gateway, texts=replace(gateway.texts, card=replace(gateway.card, **changes)))


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    """A gateway's application under uvicorn on a free port of this machine; yields its URL."""
    async with serving_app(create_app(gateway)) as url:
        yield url


@asynccontextmanager
async def serving_app(app: Any) -> AsyncIterator[str]:
    config = uvicorn.Config(app, log_level="critical", lifespan="off", http=HttpProtocol)
    config.load()
    state, protocol = ServerState(), cast("Any", config.http_protocol_class)
    # uvicorn's own protocol on the test's loop: its Server would take signals and sleep a tenth of a second to stop.
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), host="127.0.0.1", port=0
    )
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if state.tasks:  # an answer whose client has gone
            await asyncio.wait(state.tasks, timeout=60)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        for _ in range(3):  # the sockets are closed in the loop's next rounds
            await asyncio.sleep(0)
        await server.wait_closed()


@asynccontextmanager
async def talking(
    script: Script | None = None, *, of: str = "naïve café 🙂", **changes: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Scripted]]:
    """OpenAI's client and a server that plays the script, or says `of`. Nothing is tried twice."""
    generate = Scripted(script or saying(of))
    async with (
        serving(make_gateway(generate, **changes)) as url,
        openai.DefaultAsyncHttpxClient(verify=False) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        yield client, generate
