"""GPUs and models by name, a GPU's TOML file, or a checkpoint's config.json."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from cluster.config.settings import read_toml
from cluster.simulate.latency.shapes import (
    BFLOAT16,
    DTYPES,
    FP8,
    FP8_BLOCK,
    GPU_KEYS,
    GPUS,
    INT4,
    INT8,
    MODELS,
    MXFP4,
    SHORT_NAMES,
    Experts,
    Gpu,
    ModelShape,
    gpu_figures,
)
from protos.errors import BatonError, Misconfigured
from protos.model_files.fields import Fields
from protos.model_files.opening import open_model
from workers.models.families.experts_config import ExpertsConfig
from workers.models.model_config import config_of
from workers.weights.weight_formats import WeightFormat

GPU_SUFFIX, MODEL_SUFFIX = ".toml", ".json"
MAX_GPU_FIGURE = 1e9
_MOST_INT4_BITS = 5.0  # of int4, on average: EXL2's bits are no whole number
_BITS = re.compile(r"(?:int|nf|exl2-)(\d+(?:\.\d+)?)")


def gpu_of(name: str) -> Gpu:
    """Raises Misconfigured for an unknown GPU."""
    if name.endswith(GPU_SUFFIX):
        return read_gpu(Path(name))
    if name not in GPUS:
        raise Misconfigured(
            f"hardware.gpu = {name!r}: choose one of {', '.join(GPUS)}, or give a {GPU_SUFFIX} file of your own",
            param="hardware.gpu",
        )
    return GPUS[name]


def model_of(name: str, dtype: str | None = None, *, whole_experts: bool = False) -> ModelShape:
    """Weights are of `dtype`, or of the checkpoint's type. Raises Misconfigured."""
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
    """`like` names the GPU whose figures and measured shares replace missing ones. Raises Misconfigured."""
    subject = f"hardware.gpu = {str(path)!r}"
    described = read_toml(path, "hardware.gpu", "hardware.gpu")
    like = described.pop("like", None)
    if like not in GPUS:
        raise Misconfigured(
            f"{subject}: like = {like!r}: name the GPU of {', '.join(GPUS)} whose kernels reach the same share of "
            "their rates",
            param="hardware.gpu",
        )
    for key, value in described.items():
        if key not in GPU_KEYS:
            raise Misconfigured(f"{subject}: {key}: there are like, {', '.join(GPU_KEYS)}", param="hardware.gpu")
        least = 0 if key in ("fp8_tflops", "usd_per_hour") else 1e-3
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MAX_GPU_FIGURE:
            limits = f"a number from {least:g} to {MAX_GPU_FIGURE:,.0f}"
            raise Misconfigured(f"{subject}: {key} = {value!r}: give {limits}", param="hardware.gpu")
    return replace(GPUS[like], **gpu_figures(described))


def read_model(path: Path, dtype: str | None = None) -> ModelShape:
    """Reads a checkpoint's config.json as the engine does. Raises Misconfigured."""
    try:
        files = open_model(path.parent)
        fields = Fields.of_file(files, path.name)
        inner = fields.inner("text_config")  # of a multimodal model
        fields = fields.replaced(**{name: inner.raw(name) for name in inner.names()})
        config = config_of(fields.replaced(quantization_config=None) if dtype else fields, files)
    except BatonError as error:
        fix = "" if dtype else f", or give the type of its weights as hardware.dtype: {', '.join(DTYPES)}"
        raise Misconfigured(f"hardware.model: {error.message}{fix}", param="hardware.model") from error
    latent, experts, windows = config.latent, config.experts, config.windows
    embedding = float(config.vocab_size * config.hidden_size)
    stored = config.weight_format
    return ModelShape(
        params=config.num_linear_weights + embedding,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        head_dim=config.head_dim if latent is None else latent.query_dim,
        kv_heads=config.num_kv_heads,
        kv_width=config.head_dim if latent is None else latent.width // 2,
        width=config.intermediate_size,
        vocab=config.vocab_size,
        max_len=config.max_position,
        dtype=dtype or _stored_type(stored),
        expert_dtype=MXFP4 if stored is not None and stored.label == MXFP4 else None,
        experts=None if experts is None else _experts(experts, config.num_layers),
        latent=latent,
        windows=tuple(window or 0 for window in windows) if any(windows) else (),
    )


def _stored_type(stored: WeightFormat | None) -> str:
    """Returns one of `DTYPES`; bfloat16 for gpt-oss's layers besides experts. Fewer than 4 bits count as 4."""
    if stored is None or stored.label == MXFP4:
        return BFLOAT16
    if bits := _BITS.search(stored.label):
        return INT4 if float(bits[1]) <= _MOST_INT4_BITS else INT8
    return FP8_BLOCK if "block" in stored.label else FP8


def _experts(config: ExpertsConfig, num_layers: int) -> Experts:
    return Experts(
        num=config.num_experts,
        num_active=config.routing.num_chosen,
        width=config.width,
        num_shared=config.shared_width / config.width,
        num_dense_layers=num_layers - config.num_sparse_layers,
    )
