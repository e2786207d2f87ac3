"""A client's request, over HTTP or gRPC, checked against the model and turned into jobs.

SamplingRequest (every field optional) + prompts + ModelCard ──▶ TextRequest (jobs, seeds drawn, stop strings)
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtransfer.hashing import salted
from protos.codec import Value
from protos.errors import ContextLengthExceeded, InvalidRequest
from protos.values import MAX_DRAFTS, SPECULATION_SOURCES, SamplingParams, SpeculationParams
from router.auth.tenants import NOBODY, Tenant
from router.jobs import Job
from router.text.model_card import OF_TOKENS, RANGES, ModelCard, allowed
from router.text.reasoning import AnswerReasoning

if TYPE_CHECKING:
    from router.text.tools.calls import CallReader

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions; a chat may fill its context
MAX_CHOICES = 2048  # as many inputs as OpenAI's embeddings take
MAX_STOPS = 32
MAX_STOP_CHARS = 512
MAX_BIASES = 1024
MAX_STOP_TOKENS = 128

_AS_THE_WORKER = SpeculationParams()


class SamplingRequest(Value, frozen=True, kw_only=True):
    """None: not given. A `silent` request has no answer: its prompt is computed, for logprobs or a vector.

    `names`: the client's names for fields that differ from ours (`top_logprobs`), and for a prompt ("prompt[2]").
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    silent: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    pooling: str = ""
    label_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: str = ""
    session: str = ""
    priority: int = 0
    max_ttft_ms: float | None = None
    tells_progress: bool = False
    speculation: SpeculationParams = SpeculationParams()
    names: Mapping[str, str] = {}

    def prompt_name(self, index: int, num_prompts: int) -> str:
        param = self.names.get("prompt", "prompt")
        return self.names.get(f"prompt[{index}]", param if num_prompts == 1 else f"{param}[{index}]")


class TextRequest(Value, frozen=True, kw_only=True):
    """Choice i is `jobs[i]`; prompt p has the choices p*n ... p*n + n - 1. A `silent` request shows no token. With
    `reasoning` the answers' reasoning is separated from their text. `visible_tokens` are special ones that are text.
    `new_calls` makes a reader of the calls in one choice's text."""

    request_id: str
    jobs: tuple[Job, ...]
    n: int
    tenant: Tenant = NOBODY
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    silent: bool = False
    reasoning: AnswerReasoning | None = None
    visible_tokens: frozenset[int] = frozenset()
    new_calls: Callable[[], CallReader] | None = None

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(job.prompt_ids for job in self.jobs[:: self.n])


def make_text_request(
    request: SamplingRequest,
    prompts: Sequence[tuple[int, ...]],
    card: ModelCard,
    *,
    request_id: str,
    group_id: str = "",
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
    tenant: Tenant = NOBODY,
    reasoning: AnswerReasoning | None = None,
    visible_tokens: frozenset[int] = frozenset(),
    new_calls: Callable[[], CallReader] | None = None,
) -> TextRequest:
    """Makes the jobs. `default_max_tokens` None: what the context holds. `request_id` names the answer, `group_id` the
    request if it differs. Raises InvalidRequest or ContextLengthExceeded."""
    _check(request, prompts, card)
    tenant.check_priority(request.priority)
    seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
    jobs = tuple(
        Job(
            request_id=f"{request_id}-{number * request.n + choice}",
            group_id=group_id or request_id,
            prompt_ids=prompt,
            sampling=_sampling(
                request,
                card,
                seed=_seed(seed, choice),
                max_tokens=_max_tokens(request, len(prompt), card.max_model_len, default_max_tokens),
            ),
            cache_salt=salted(tenant.cache_salt(request.cache_salt.encode()), card.adapter.encode()),
            adapter=card.adapter,
            revision=card.revision,
            priority=request.priority,
            session=request.session,
            tenant=tenant.name,
            max_ttft_s=None if request.max_ttft_ms is None else request.max_ttft_ms / 1000,
            tells_progress=request.tells_progress and choice == 0,
        )
        for number, prompt in enumerate(prompts)
        for choice in range(request.n)
    )
    return TextRequest(
        request_id=request_id,
        jobs=jobs,
        n=request.n,
        tenant=tenant,
        stop=request.stop,
        stop_token_ids=frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else card.eos_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        silent=request.silent,
        reasoning=reasoning,
        visible_tokens=visible_tokens,
        new_calls=new_calls,
    )


def check_length(
    num_tokens: int,
    card: ModelCard,
    *,
    param: str = "prompt",
    num_asked: int | None = None,
    asked_as: str = "max_tokens",
    is_least: bool = False,
) -> None:
    """Raises ContextLengthExceeded, in OpenAI's words, where prompt and answer do not fit; `asked_as` is to be mended
    where the prompt alone does. With `is_least` the prompt has `num_tokens` or more."""
    longest, fits = card.max_model_len, num_tokens < card.max_model_len
    if num_tokens + (1 if num_asked is None else num_asked) <= longest:
        return
    if num_asked is None:
        least = "at least " if is_least else ""
        message = f"your {param} resulted in {least}{num_tokens} tokens, of which at most {longest - 1} fit"
    else:
        message = f"you requested {num_tokens + num_asked} ({num_tokens} in the {param}, {num_asked} in the completion)"
    raise ContextLengthExceeded(
        f"This model's maximum context length is {longest} tokens. However, {message}. "
        f"Please reduce the length of the {param}{' or completion' if num_asked else ''}.",
        param=asked_as if num_asked and fits else param,
    )


def _sampling(request: SamplingRequest, card: ModelCard, *, seed: int, max_tokens: int) -> SamplingParams:
    """Chooses the client's value, else the model's default, else a neutral one."""
    values = {name: getattr(request, name) for name in SamplingParams.__struct_fields__}
    missing = [name for name, value in values.items() if value is None and name not in OF_TOKENS]
    values |= {name: getattr(card, name, 0.0) for name in missing} | {"seed": seed, "max_tokens": max_tokens}
    values["top_k"] = max(values["top_k"], 0)
    if values["top_p"] == 0:  # top_p 0 keeps the likeliest token only
        values |= {"top_p": 1.0, "top_k": 1}
    return SamplingParams(**values)


def _max_tokens(request: SamplingRequest, num_prompt: int, longest: int, default: int | None) -> int:
    """A silent request runs for one token, which is thrown away: the prompt's logprobs need a pass."""
    if request.silent:
        return 1
    if request.max_tokens is not None:
        return request.max_tokens
    room = longest - num_prompt
    return room if default is None else min(default, room)


def _seed(seed: int, choice: int) -> int:
    """Derives a choice's seed. Choice 0 has the request's seed, so it equals n = 1."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _check(request: SamplingRequest, prompts: Sequence[tuple[int, ...]], card: ModelCard) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise _outside(request.names.get(name, name), value, allowed(name))
    _check_stops(request)
    _check_tokens(request, card)
    _check_speculation(request.speculation, card)
    if request.grammar:
        _check_grammar(request, card)
    param = request.names.get("prompt", "prompt")
    if not prompts:
        raise InvalidRequest(f"'{param}' is an empty list: give at least one prompt", param=param)
    if len(prompts) * request.n > MAX_CHOICES:
        problem = f"{len(prompts)} prompts with n = {request.n} make {len(prompts) * request.n} choices"
        raise InvalidRequest(f"{problem}: one request may ask for 1 to {MAX_CHOICES}", param=param)
    for index, prompt in enumerate(prompts):
        param = request.prompt_name(index, len(prompts))
        if not prompt:
            raise InvalidRequest(f"'{param}' is empty and this model has no start token: give it text", param=param)
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < card.vocab_size:
                raise _outside(param, token_id, f"made of token ids between 0 and {card.vocab_size - 1}")
        asked_as = request.names.get("max_tokens", "max_tokens")
        check_length(len(prompt), card, param=param, num_asked=request.max_tokens, asked_as=asked_as)
        left = card.max_model_len - len(prompt) if request.max_tokens is None else request.max_tokens
        room = 0 if request.silent else left
        if request.min_tokens > room:
            raise _outside("min_tokens", request.min_tokens, f"at most max_tokens, which is {room}")


def _check_stops(request: SamplingRequest) -> None:
    param = request.names.get("stop", "stop")
    if len(request.stop) > MAX_STOPS:
        problem = f"'{param}' has {len(request.stop)} strings"
        raise InvalidRequest(f"{problem}: it must have at most {MAX_STOPS}", param=param)
    for stop in request.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            problem = f"'{param}' has a string of {len(stop)} characters"
            raise InvalidRequest(f"{problem}: each must have 1 to {MAX_STOP_CHARS}", param=param)


def _check_speculation(speculation: SpeculationParams, card: ModelCard) -> None:
    if speculation == _AS_THE_WORKER:
        return
    if not 0 <= speculation.max_drafts <= MAX_DRAFTS:
        raise _outside("speculation.max_drafts", max(speculation.max_drafts, 0), f"between 1 and {MAX_DRAFTS}")
    for source in speculation.sources:
        if source not in SPECULATION_SOURCES:
            raise _outside("speculation.sources", source[:60], f"made of {', '.join(SPECULATION_SOURCES)}")
    for token_id in (min(speculation.prediction_ids, default=0), max(speculation.prediction_ids, default=0)):
        if not 0 <= token_id < card.vocab_size:
            raise _outside("prediction", token_id, f"made of token ids between 0 and {card.vocab_size - 1}")
    if len(speculation.prediction_ids) > card.max_model_len:
        problem = f"'prediction' has {len(speculation.prediction_ids)} tokens"
        raise InvalidRequest(
            f"{problem}: it must have at most {card.max_model_len}, which the model's context holds", param="prediction"
        )


def _check_grammar(request: SamplingRequest, card: ModelCard) -> None:
    if request.ignore_eos:
        problem = (
            "'ignore_eos' is true and the answer's form is asked for, which says where it ends: leave one of them out"
        )
        raise InvalidRequest(problem, param="ignore_eos")
    if not card.eos_token_ids:
        problem = f"The model '{card.name}' has no end-of-sequence token: no form can be asked of its answers"
        raise InvalidRequest(problem, param=request.names.get("grammar", "grammar"))


def _check_tokens(request: SamplingRequest, card: ModelCard) -> None:
    highest = card.vocab_size - 1
    if len(request.logit_bias) > MAX_BIASES:
        raise _outside("logit_bias", f"{len(request.logit_bias)} entries", f"at most {MAX_BIASES} entries")
    for token_id, bias in request.logit_bias:
        if not 0 <= token_id <= highest:
            raise _outside("logit_bias", token_id, f"keyed by token ids between 0 and {highest}")
        if not -100 <= bias <= 100:
            raise _outside("logit_bias", bias, "made of values between -100 and 100")
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise _outside("stop_token_ids", f"{len(request.stop_token_ids)} entries", f"at most {MAX_STOP_TOKENS} entries")
    for token_id in request.stop_token_ids:
        if not 0 <= token_id <= highest:
            raise _outside("stop_token_ids", token_id, f"made of token ids between 0 and {highest}")


def _outside(param: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' has the value {value}: it must be {allowed}", param=param)
