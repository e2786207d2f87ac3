"""adapter_config.json as PEFT writes it, read strictly: a field that would change what the adapter computes is obeyed
or refused. Pure."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.limited.limited_process import LimitedProcess, LimitedProcessEnded
from protos.model_files.fields import Fields
from protos.model_files.plain_files import read_object
from workers.adapters import pattern_matches
from workers.adapters.pattern_matches import first_matches

log = logging.getLogger("baton.worker")

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
PATTERNS_CPU_S = 0.25  # ten times as long on a busy machine, where the process has the lowest priority
MAX_RANK = 512
_PLAIN = re.compile(r"[\w.\\-]{0,256}")
_MERGE = "merge it into its model with PEFT's merge_and_unload, and serve the merged checkpoint"

_CONVERT = "Save the adapter with PEFT's path_initial_model_for_weight_conversion"

_REFUSED: Mapping[str, tuple[str, str]] = {
    "use_dora": ("DoRA rescales whole columns of the merged weight", _MERGE),
    "modules_to_save": ("whole modules in place of the model's own", _MERGE),
    "trainable_token_indices": ("rows of the embedding in place of the model's own", _MERGE),
    "target_parameters": ("parameters that are no linear layers, such as those of experts", _MERGE),
    "layer_replication": ("layers that the model has not", _MERGE),
    "lora_bias": ("biases of B", _MERGE),
    "use_qalora": ("QALoRA pools the inputs", _MERGE),
    "alora_invocation_tokens": ("an adapter that begins in the middle of a prompt", "train a plain LoRA adapter"),
    "arrow_config": ("Arrow routes between several adapters", "load one plain LoRA adapter for each name"),
    "megatron_config": ("layers of Megatron", "convert it to transformers' layers"),
    "fan_in_fan_out": ("weights stored as [inputs, outputs]", _MERGE),
}
_OF_TRAINING = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_dropout",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights", "inference_mode",
    "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config",
})  # fmt: skip
_KEPT_BASE = ("gaussian", "eva", "orthogonal")  # initialisations that leave the model's own weights as they are
_TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """`rank` and `alpha` of modules that no pattern names (`workers.adapters.pattern_matches`)."""

    where: str
    rank: int
    alpha: float
    rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def scales(self, modules: Sequence[str]) -> Mapping[str, tuple[int, float]]:
        """Each module's rank, and the scale of its B A: alpha / r, or with rank-stabilised scaling alpha / sqrt(r)
        (https://arxiv.org/abs/2312.03732). Raises BadCheckpoint for patterns."""
        ranks = self._matched("rank_pattern", self.rank_pattern, modules)
        alphas = self._matched("alpha_pattern", self.alpha_pattern, modules)
        scales = {}
        for module in modules:
            rank, alpha = int(ranks.get(module, self.rank)), alphas.get(module, self.alpha)
            scales[module] = rank, alpha / (math.sqrt(rank) if self.rank_stabilised else rank)
        return scales

    def _matched(self, field: str, pattern: Mapping[str, float], modules: Sequence[str]) -> Mapping[str, float]:
        try:
            matches = _bounded_matches(tuple(pattern), modules)
        except (ValueError, re.error, LimitedProcessEnded, TimeoutError) as error:
            raise BadCheckpoint(f"{self.where}: {field!r}: {error}", param=field) from error
        values = tuple(pattern.values())
        return {module: values[number] for module, number in matches.items()}


def read_peft_config(folder: Path) -> PeftConfig:
    """Raises BadCheckpoint for a file that is missing or damaged, UnsupportedModel for an option that is not served;
    each names file, field and fix."""
    path = folder / CONFIG
    data = read_object(path, MAX_CONFIG_BYTES)
    if data is None:
        raise BadCheckpoint(f"{path} does not exist: give the folder that PEFT's save_pretrained wrote", param=CONFIG)
    config = Fields(data, str(path))
    _refuse(config)
    ranks, alphas = config.inner("rank_pattern"), config.inner("alpha_pattern")
    found = PeftConfig(
        where=str(path),
        rank=config.integer("r"),
        alpha=config.number("lora_alpha"),
        rank_stabilised=config.flag("use_rslora"),
        rank_pattern={name: ranks.integer(name) for name in ranks.names()},
        alpha_pattern={name: alphas.number(name) for name in alphas.names()},
    )
    for field, rank in (("r", found.rank), *(("rank_pattern", rank) for rank in found.rank_pattern.values())):
        if rank > MAX_RANK:
            raise UnsupportedModel(f"{path}: {field!r} is {rank}, {MAX_RANK} at most are served", param=field)
    return found


def _refuse(config: Fields) -> None:
    kind = config.text_or("peft_type", "LORA")
    if kind != "LORA":
        raise config.unserved("peft_type", "'LORA' is", fix=_MERGE)
    task = config.text_or("task_type", "CAUSAL_LM")
    if task not in _TASKS:
        raise config.unserved("task_type", f"{' or '.join(_TASKS)} is", fix="Train it without a head for a task")
    if config.text_or("bias", "none") != "none":
        raise config.unserved("bias", "'none' is", fix=_MERGE)
    for field, (meaning, fix) in _REFUSED.items():
        if config.raw(field):
            raise config.unserved(field, meaning, fix=fix)
    start = config.raw("init_lora_weights")
    if isinstance(start, str) and start not in _KEPT_BASE:
        raise config.unserved("init_lora_weights", "it trains on changed weights of the model", fix=_CONVERT)
    expected = _OF_TRAINING | _REFUSED.keys()
    if unknown := sorted(name for name in config.names() if name not in expected and config.raw(name)):
        log.warning("%s: fields that this version does not know have no effect: %s", config.where, ", ".join(unknown))


def _bounded_matches(patterns: Sequence[str], modules: Sequence[str]) -> Mapping[str, int]:
    """Patterns with more than names and dots are matched in a process of their own. Raises ValueError, re.error,
    LimitedProcessEnded or TimeoutError."""
    if len(patterns) < 1024 and all(map(_PLAIN.fullmatch, patterns)):
        return first_matches(patterns, modules)
    asked = json.dumps([patterns, modules]).encode()
    try:
        found = json.loads(LimitedProcess(Path(pattern_matches.__file__)).ask(asked, PATTERNS_CPU_S))
    except LimitedProcessEnded as ended:
        if ended.took_too_long:
            raise ValueError(f"matching takes more than {PATTERNS_CPU_S:g} s: make the patterns simpler") from ended
        raise
    if isinstance(found, str):
        raise ValueError(found)
    return dict(found)
