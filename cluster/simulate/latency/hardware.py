"""GPUs and models by name, or from files of the user's own: a TOML file for a GPU, a checkpoint's config.json for a
model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.simulate.latency.shapes import (
    DTYPES,
    GPU_KEYS,
    GPUS,
    MODELS,
    MXFP4,
    SHORT_NAMES,
    Experts,
    Gpu,
    Latent,
    ModelShape,
    gpu_figures,
)
from cluster.simulate.latency.weight_types import stored_type
from protos.errors import BatonError, Misconfigured
from protos.hints import unusable
from protos.model_files.fields import Fields
from workers.models.families.family import Family
from workers.models.families.registry import FAMILIES

GPU_SUFFIX, MODEL_SUFFIX = ".toml", ".json"
MAX_GPU_FIGURE, MAX_MODEL_FIGURE = 1e9, 10**9
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""What checkpoints call the number of routed experts: DeepSeek, Mixtral, Qwen."""


def gpu_of(name: str) -> Gpu:
    """The GPU of this name or file. Raises Misconfigured for an unknown GPU."""
    if name.endswith(GPU_SUFFIX):
        return read_gpu(Path(name))
    if name not in GPUS:
        raise Misconfigured(
            f"hardware.gpu = {name!r}: choose one of {', '.join(GPUS)}, or give a {GPU_SUFFIX} file of your own",
            param="hardware.gpu",
        )
    return GPUS[name]


def model_of(name: str, dtype: str | None = None, *, whole_experts: bool = False) -> ModelShape:
    """The model of this name or file, with weights of `dtype` or of its checkpoint's type. Raises Misconfigured for an
    unknown model, and for a model without experts if `whole_experts` is set."""
    dtype, path = SHORT_NAMES.get(dtype or "", dtype), Path(name)
    if name.endswith(MODEL_SUFFIX) or (name not in MODELS and path.is_dir()):
        model = read_model(path / "config.json" if path.is_dir() else path, dtype)
    elif name in MODELS:
        model = MODELS[name]
    else:
        raise Misconfigured(
            f"hardware.model = {name!r}: choose one of {', '.join(MODELS)}, or give a checkpoint's config.json",
            param="hardware.model",
        )
    if whole_experts and model.experts is None:
        raise Misconfigured(
            f"worker.expert_parallel with hardware.model = {name!r}: it has no experts to share: leave it out, or "
            "choose a mixture of experts",
            param="worker.expert_parallel",
        )
    if dtype is not None and dtype not in DTYPES:
        raise Misconfigured(f"hardware.dtype = {dtype!r}: choose one of {', '.join(DTYPES)}", param="hardware.dtype")
    model = replace(model, whole_experts=whole_experts)
    return model if dtype is None else replace(model, dtype=dtype, expert_dtype=None)


def read_gpu(path: Path) -> Gpu:
    """Reads a GPU's file. `like` names the GPU whose figures replace missing ones, and whose measured shares apply.
    Raises Misconfigured."""
    given = f"gpu {path}"
    try:
        described = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfigured(f"{given}: {unusable(error)}", param="hardware.gpu") from error
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"{given}: it is not TOML: {error}", param="hardware.gpu") from error
    like = described.pop("like", None)
    if like not in GPUS:
        raise Misconfigured(
            f"{given}: like = {like!r}: name the GPU of {', '.join(GPUS)} that is most like it: its kernels reach the "
            "same share of their rates",
            param="hardware.gpu",
        )
    for key, value in described.items():
        if key not in GPU_KEYS:
            raise Misconfigured(f"{given}: {key}: there are like, {', '.join(GPU_KEYS)}", param="hardware.gpu")
        least = 0 if key in ("fp8_tflops", "usd_per_hour") else 1e-3
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MAX_GPU_FIGURE:
            limits = f"a number from {least:g} to {MAX_GPU_FIGURE:,.0f}"
            raise Misconfigured(f"{given}: {key} = {value!r}: give {limits}", param="hardware.gpu")
    return replace(GPUS[like], **gpu_figures(described))


def read_model(path: Path, dtype: str | None = None) -> ModelShape:
    """Reads the config.json of a checkpoint: dense models and mixtures of experts, with grouped or latent attention.
    Weights are of `dtype`, or of the checkpoint's type. Raises Misconfigured."""
    given = f"model {path}"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfigured(f"{given}: {unusable(error)}", param="hardware.model") from error
    except ValueError as error:
        raise Misconfigured(f"{given}: it is not JSON: {error}", param="hardware.model") from error
    if not isinstance(config, dict):
        raise Misconfigured(f"{given}: it is not a checkpoint's config.json", param="hardware.model")
    text = config.get("text_config")  # of a multimodal model
    return _Checkpoint(given, {**config, **text} if isinstance(text, dict) else config, dtype).model()


class _Checkpoint:
    """The figures of a config.json. Raises Misconfigured for missing or impossible ones."""

    def __init__(self, given: str, config: Mapping[str, Any], dtype: str | None) -> None:
        self._given = given
        self._config = config
        self._dtype = dtype

    def model(self) -> ModelShape:
        heads, hidden, latent = self._number("num_attention_heads"), self._number("hidden_size"), self._latent()
        head_dim = self._number("head_dim", hidden // heads)
        kv_heads, kv_width = self._number("num_key_value_heads", heads), head_dim
        if latent is not None:
            head_dim = latent.nope_dim + latent.rope_dim
            kv_heads, kv_width = 1, (latent.kv_rank + latent.rope_dim) // 2
        model = ModelShape(
            params=1.0,
            layers=self._number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            head_dim=head_dim,
            kv_heads=kv_heads,
            kv_width=kv_width,
            width=self._number("intermediate_size"),
            vocab=self._number("vocab_size"),
            max_len=self._number("max_position_embeddings"),
            dtype=self._dtype or stored_type(self._config.get("quantization_config"), self._given),
            expert_dtype=MXFP4 if self._method() == MXFP4 else None,
            experts=self._experts(),
            latent=latent,
            windows=self._windows(),
        )
        return replace(model, params=_num_params(model, tied=bool(self._config.get("tie_word_embeddings"))))

    def _number(self, name: str, otherwise: int | None = None, least: int = 1) -> int:
        value = self._config.get(name)
        if value is None and otherwise is not None:
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_MODEL_FIGURE:
            found = "is missing" if value is None else f"= {value!r}"
            raise Misconfigured(
                f"{self._given}: {name} {found}: give a checkpoint's config.json, in which it is a whole number from "
                f"{least} to {MAX_MODEL_FIGURE:,}",
                param="hardware.model",
            )
        return value

    def _latent(self) -> Latent | None:
        if self._config.get("kv_lora_rank") is None:
            return None
        return Latent(
            query_rank=self._number("q_lora_rank", 0, least=0),
            kv_rank=self._number("kv_lora_rank"),
            nope_dim=self._number("qk_nope_head_dim"),
            rope_dim=self._number("qk_rope_head_dim"),
            value_dim=self._number("v_head_dim"),
        )

    def _experts(self) -> Experts | None:
        if (served := self._served_experts()) is not None:
            return served
        name = next((one for one in EXPERTS if self._config.get(one)), None)
        if name is None:
            return None
        shared = self._number("n_shared_experts", 0, least=0)
        return Experts(
            num=self._number(name),
            num_active=self._number("num_experts_per_tok"),
            width=self._number("moe_intermediate_size", self._number("intermediate_size")),
            num_shared=shared,
            num_dense_layers=self._number("first_k_dense_replace", 0, least=0),
        )

    def _served_experts(self) -> Experts | None:
        """As the engine reads them, of a family that it serves."""
        family = self._family()
        if family is None or family.experts is None:
            return None
        layers = self._number("num_hidden_layers")
        try:
            found = family.experts(Fields(self._config, self._given).over(family.defaults), layers)
        except BatonError as error:
            raise Misconfigured(error.message, param="hardware.model") from error
        if found is None:
            return None
        return Experts(
            num=found.num_experts,
            num_active=found.routing.num_chosen,
            width=found.width,
            num_shared=found.shared_width / found.width,
            num_dense_layers=layers - found.num_sparse_layers,
        )

    def _windows(self) -> tuple[int, ...]:
        """As the engine reads them, of a family that it serves."""
        family = self._family()
        if family is None:
            return ()
        try:
            config = Fields(self._config, self._given).over(family.defaults)
            windows = family.windows(config, self._number("num_hidden_layers"))
        except BatonError as error:
            raise Misconfigured(error.message, param="hardware.model") from error
        return tuple(window or 0 for window in windows) if any(windows) else ()

    def _family(self) -> Family | None:
        architectures = self._config.get("architectures")
        return next((one for one in FAMILIES if architectures == [one.architecture]), None)

    def _method(self) -> object:
        quantization = self._config.get("quantization_config")
        return quantization.get("quant_method") if isinstance(quantization, dict) else quantization


def _num_params(model: ModelShape, *, tied: bool) -> float:
    """The number of parameters in all matrices, without norms and biases."""
    experts, latent, heads = model.experts, model.latent, model.heads
    if latent is None:
        attention = (2 * heads + 2 * model.kv_heads) * model.head_dim * model.hidden
    else:
        queries = heads * model.head_dim
        attention = queries * model.hidden
        if latent.query_rank:
            attention = latent.query_rank * (model.hidden + queries)
        attention += (latent.kv_rank + latent.rope_dim) * model.hidden
        attention += heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
        attention += heads * latent.value_dim * model.hidden
    num_dense = model.layers if experts is None else experts.num_dense_layers
    found = attention * model.layers + 3.0 * model.width * model.hidden * num_dense
    if experts is not None:
        shared = 3.0 * experts.num_shared * experts.width * model.hidden + experts.num * model.hidden
        found += model.expert_params + shared * (model.layers - num_dense)
    return found + model.vocab * model.hidden * (1 if tied else 2)
