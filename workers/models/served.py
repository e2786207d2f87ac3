"""The two ways in which a checkpoint is served: by Baton's own stack, or, for other architectures, by transformers.
Pure until weights are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from protos.errors import Internal, Misconfigured
from protos.model_files.fields import Fields
from protos.model_files.opening import open_model
from protos.values import ErrorInfo, KVLayout
from protos.wire import raised
from workers.kv.kinds import with_kv_dtype
from workers.models.families.registry import is_ours
from workers.models.interface import ServedConfig, ServedDecoder
from workers.models.model_config import ModelConfig, check_parallel, read_config
from workers.models.transformers.transformers_config import TransformersConfig
from workers.weights.weight_formats import Quantize
from workers.worker_config import KVDtype

if TYPE_CHECKING:
    from workers.models.filling import Progress
    from workers.parallel.group import TensorParallel

_INSPECTION = "workers.models.transformers.inspection"
_INSPECTION_S = 300.0


def read_served(path: str | Path, quantize: Quantize = "off") -> ServedConfig:
    """Reads the model at `path`, weights left alone. For transformers this makes its model without memory, in a process
    of its own where torch is not loaded: a gateway need not be larger for it.

    Raises BadCheckpoint or UnsupportedModel.
    """
    if is_ours(Fields.of_file(open_model(path), "config.json")):
        return read_config(path, quantize)
    if "torch" in sys.modules:
        from workers.models.transformers.reading import read_traced

        return read_traced(path, quantize).config
    config_file = Path(path) / "config.json"
    changed_ns = config_file.stat().st_mtime_ns if config_file.exists() else 0
    return _inspected(str(path), quantize, changed_ns)


def load_served(
    path: str | Path,
    *,
    device: str,
    dtype: str,
    quantize: Quantize,
    parallel: TensorParallel,
    expert_parallel: bool,
    on_progress: Progress | None,
) -> ServedDecoder:
    """`workers.models.loader.load_model`, or transformers' model for what is not ours, packed. Raises as it does."""
    if is_ours(Fields.of_file(open_model(path), "config.json")):
        from workers.models.loader import load_model

        return load_model(
            path,
            device=device,
            dtype=dtype,
            quantize=quantize,
            parallel=parallel,
            expert_parallel=expert_parallel,
            on_progress=on_progress,
            packed=True,
        )
    from workers.models.transformers.transformers_loader import load_transformers

    return load_transformers(
        path, device=device, dtype=dtype, quantize=quantize, parallel=parallel, on_progress=on_progress, packed=True
    )


def check_ranks(model: ServedConfig, tp: int, setting: str = "tp", *, expert_parallel: bool = False) -> None:
    """Raises Misconfigured when `tp` ranks cannot share the model, with what would do."""
    if isinstance(model, TransformersConfig):
        model.check_parallel(tp, setting, expert_parallel=expert_parallel)
    else:
        assert isinstance(model, ModelConfig), f"{model} is no config of a model"
        check_parallel(model, tp, setting, expert_parallel=expert_parallel)


@lru_cache(maxsize=4)
def _inspected(path: str, quantize: Quantize, changed_ns: int) -> TransformersConfig:
    """Takes seconds, once for an unchanged config.json."""
    command = [sys.executable, "-m", _INSPECTION, path, quantize]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_INSPECTION_S, check=False)
    try:
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise Internal(f"{path} could not be inspected: rc {ended.returncode}: {ended.stderr[-2000:]}") from error
    if "error" in answer:
        raise raised(msgspec.convert(answer["error"], ErrorInfo))
    return TransformersConfig.of_json(answer)


def layout_of(model: ServedConfig, kv_dtype: KVDtype, *, block_size: int, dtype: str, tp: int) -> KVLayout:
    """The layout of a model's cache in `kv_dtype`, or in `dtype` for "auto". Raises Misconfigured or UnsupportedModel
    for a model that cannot have it."""
    if kv_dtype == "fp8" and model.qkv_bias:
        raise Misconfigured(
            f"kv_dtype is fp8, and this {model.family} model's keys are too large in a few places for it: give "
            "int8 or auto",
            param="kv_dtype",
        )
    return with_kv_dtype(model.kv_layout(block_size=block_size, dtype=dtype, tp=tp), kv_dtype)
