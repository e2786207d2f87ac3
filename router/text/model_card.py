"""The model as the faces see it: its name, its limits and its recommended sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from protos.errors import BadCheckpoint, Misconfigured
from protos.model_files.digests import read_digests
from protos.model_files.ends import end_ids
from protos.model_files.fields import Fields
from protos.model_files.files_seam import ModelFiles
from protos.model_files.hub_name import HubName
from protos.values import ModelDigests

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "n": (1, 128),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "max_ttft_ms": (1, 3_600_000),
}
"""Each range of a request's numbers is defined here, once."""
OF_TOKENS = ("logprobs", "prompt_logprobs")


def allowed(name: str) -> str:
    low, high = RANGES[name]
    note = " (-1, vLLM's word for the whole vocabulary, is not offered)" if name in OF_TOKENS else ""
    return f"between {low} and {high}{note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """`max_model_len` tokens hold a prompt and its answer; token ids are below `vocab_size`.

    Of a LoRA adapter of the model `adapter` is its id, and `parent` the model's name. `revision` names model and
    settings after a roll, "" before the first.

    `temperature` to `repetition_penalty` are the defaults of requests. `fingerprint` is of the
    model's files, and so are `digests`. `vector_size`: numbers in an embedding, 0 if config.json does not tell.
    `hub`: of a model in the cache of the Hugging Face hub, its repository and commit.
    `is_embedder`: sentence-transformers pools its hidden states, as modules.json says.
    `family` is config.json's `model_type`, `num_bytes` the size of the files with weights, 0 where they are not here.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    fingerprint: str = "fp_baton"
    created: int = 0
    adapter: str = ""
    parent: str | None = None
    revision: str = ""
    vector_size: int = 0
    digests: ModelDigests = field(default_factory=ModelDigests)
    family: str = ""
    num_bytes: int = 0
    is_embedder: bool = False
    hub: str = ""
    aliases: tuple[str, ...] = ()  # patterns of further names of the model

    @classmethod
    def load(cls, files: ModelFiles, name: str, *, max_model_len: int | None = None, sampling: str = "") -> ModelCard:
        """Reads config.json and generation_config.json; `max_model_len` shortens the model's own limit, `sampling`
        (`router.text.sampling`) stands before generation_config.json.

        Raises BadCheckpoint if config.json lacks a field that the router needs, Misconfigured for a bad `sampling`.
        """
        config, generation = files.json("config.json") or {}, files.json("generation_config.json") or {}
        longest, vocab_size = config.get("max_position_embeddings"), config.get("vocab_size")
        if not isinstance(longest, int) or not isinstance(vocab_size, int):
            raise BadCheckpoint(
                f"{files.where('config.json')} must give max_position_embeddings and vocab_size as integers"
            )
        defaults = {key: generation[key] for key in _DEFAULTS if generation.get(key) is not None}
        for key, value in defaults.items():
            if not _is_allowed(key, value):
                where = files.where("generation_config.json")
                raise BadCheckpoint(f"{where}: {key!r} is {value!r}: it must be a number {allowed(key)}", param=key)
        defaults |= _sampling_of(sampling)
        return cls(
            name=name,
            max_model_len=max_model_len or longest,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(end_ids(files, Fields(config, files.where("config.json")), vocab_size)),
            fingerprint=f"fp_{files.fingerprint()}",
            created=files.created_s,
            digests=read_digests(files),
            hub=str(HubName.of_cached(files.path) or ""),
            is_embedder='.Pooling"' in (files.text("modules.json") or ""),
            family=str(config.get("model_type", "")),
            num_bytes=sum(file.stat().st_size for file in files.weight_files()),
            vector_size=size if isinstance(size := config.get("hidden_size"), int) else 0,
            **defaults,
        )

    def of_adapter(self, name: str, adapter_id: str) -> ModelCard:
        fingerprint = f"{self.fingerprint}-{adapter_id[:12]}"
        return replace(self, name=name, adapter=adapter_id, parent=self.name, fingerprint=fingerprint)

    def served_fingerprint(self, stored_as: str) -> str:
        """OpenAI's `system_fingerprint`: changes with the model's files, and with how workers keep weights and KV."""
        return f"fp_{blake2b(f'{self.fingerprint}{self.hub} {stored_as}'.encode(), digest_size=6).hexdigest()}"

    @property
    def default_sampling(self) -> dict[str, float]:
        """The defaults that differ from OpenAI's."""
        return {key: getattr(self, key) for key, openai in _DEFAULTS.items() if getattr(self, key) != openai}


_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _is_allowed(key: str, value: object) -> bool:
    low, high = RANGES[key]
    kinds = int if key == "top_k" else int | float
    return not isinstance(value, bool) and isinstance(value, kinds) and low <= value <= high


def _sampling_of(text: str) -> dict[str, float]:
    """Raises Misconfigured."""
    sampling: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _DEFAULTS:
            raise Misconfigured(f"--sampling {text}: {key!r} is none of {', '.join(_DEFAULTS)}", param="sampling")
        try:
            sampling[key] = int(value) if key == "top_k" else float(value)
        except ValueError:
            sampling[key] = float("nan")
        if not _is_allowed(key, sampling[key]):
            raise Misconfigured(f"--sampling {text}: {key} must be a number {allowed(key)}", param="sampling")
    return sampling
