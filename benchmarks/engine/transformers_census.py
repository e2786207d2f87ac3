"""Which causal language models of the installed transformers Baton serves: by itself, through transformers, or not.

    python -m benchmarks.engine.transformers_census [MODEL_TYPE ...]

Each one that is not Baton's own gets a tiny random checkpoint, whose logits, in chunks over the paged cache and beside
another row, are compared with those of transformers: within 1e-4 of the largest, or twice what its own two kinds of
attention differ by. Prints a line for each and the counts.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers

from protos.errors import BatonError
from tests.numerics.conftest import RELATIVE_TOLERANCE, random_tokens
from tests.numerics.paged import PagedRun, in_chunks
from workers.models.families.registry import FAMILIES
from workers.models.served import read_served
from workers.models.transformers.transformers_loader import load_transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 9,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "tie_word_embeddings": False,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 8},
}
"""Fields that an architecture needs besides."""
_SECONDS = 60


def tiny(config_class: type[Any]) -> Any:
    """A config with as many of the sizes as the architecture has."""
    default = config_class()
    sizes = {name: value for name, value in _SIZES.items() if vars(default).get(name) is not None}
    sizes |= {name: _SIZES[name] for name in ("num_key_value_heads", "head_dim") if name in vars(default)}
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    others = _OTHERS.get(config_class.model_type, {})
    return config_class(**{**sizes, **others})


def checkpoint(config: Any, model_class: type[Any], folder: Path) -> Any:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def compare(model: Any, folder: Path) -> str:
    """How it runs. Raises BatonError if it is refused, AssertionError if its logits differ."""
    decoder = load_transformers(folder)
    decoder.pack()
    tokens = random_tokens(53, seed=1)
    theirs = model(torch.tensor([tokens]), use_cache=False).logits[0]
    unlike = distance(eager_logits(model, folder, tokens), theirs)
    first, second = PagedRun(decoder).step([("a", tokens[:20], 20), ("b", tokens, 53)])
    chunks = in_chunks(PagedRun(decoder), tokens, [16, 1, 24, 5], prompt_len=46)
    furthest = max(distance(first, theirs[:20]), distance(second, theirs), distance(chunks, theirs))
    assert furthest <= max(RELATIVE_TOLERANCE, 2 * unlike), f"logits differ by {furthest:.2g}"
    config = decoder.config
    windows = sorted({call.window for call in config.calls if call.window})
    return f"tp {config.tp_unit}" + (f", windows {windows}" if windows else "")


def eager_logits(model: Any, folder: Path, tokens: list[int]) -> torch.Tensor:
    """By transformers' other attention: how far that is from its first is how far any other may be."""
    other = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    logits: torch.Tensor = other(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """In parts of the largest logit."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def census(config_class: type[Any], model_class: type[Any]) -> tuple[str, str]:
    """(kind, detail)"""
    if model_class.__name__ in {family.architecture for family in FAMILIES}:
        return "own", ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = checkpoint(tiny(config_class), model_class, folder)
        except Exception as error:
            return unmade(config_class, model_class, folder, error)
        try:
            return "runs", compare(model, folder)
        except BatonError as refusal:
            return "refused", reason(refusal)
        except Exception as error:
            return "FAILS", first_line(error)


def unmade(config_class: type[Any], model_class: type[Any], folder: Path, error: Exception) -> tuple[str, str]:
    """Of a model for which this program knows no small sizes: by transformers' own."""
    given = {"model_type": config_class.model_type, "architectures": [model_class.__name__]}
    (folder / "config.json").write_text(json.dumps(given))
    try:
        read_served(folder)
    except BatonError as refusal:
        return "refused", reason(refusal)
    return "unmade", first_line(error)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def reason(error: BatonError) -> str:
    return error.message.partition("through transformers: ")[2].partition(". Give")[0] or error.message


def main(chosen: list[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts: Counter[str] = Counter()

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    for config_class in list(MODEL_FOR_CAUSAL_LM_MAPPING.keys()):
        if chosen and config_class.model_type not in chosen:
            continue
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        signal.alarm(_SECONDS)
        try:
            kind, detail = census(config_class, model_class)
        except TimeoutError as error:
            kind, detail = "late", str(error)
        finally:
            signal.alarm(0)
        counts[kind] += 1
        print(f"{kind:8} {config_class.model_type:26} {model_class.__name__:32} {detail}", flush=True)
    print(f"transformers {transformers.__version__}:", dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
