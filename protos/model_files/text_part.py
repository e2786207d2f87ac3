"""The text part of a model that reads images too: its config.json as that of a model for text, and its tensors' names.

config.json {text_config: {...}, vision_config: {...}}     the fields of text_config, with its family's class
language_model.model.layers.0...                           model.layers.0...
model.language_model.layers.0...                           model.layers.0...      transformers 5 in memory
vision_tower..., multi_modal_projector...                  are left out
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WRAPPERS = frozenset({"Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"})
_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM", "mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM",
}  # fmt: skip
"""By the model_type of text_config. Of another one the model_type names what is not served."""
_ABSENT = {"gemma3_text": {"max_position_embeddings": 131_072, "vocab_size": 262_208}}
"""Fields that published files leave out, and gateways need."""
_OF_ALL = ("dtype", "quantization_config", "tie_word_embeddings", "torch_dtype")
"""Fields that stand beside text_config, and count unless it has them, too."""
_NAME_LISTS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")
_RENAMED = {"language_model.model.": "model.", "language_model.lm_head": "lm_head", "model.language_model.": "model."}
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    named, text = config.get("architectures"), config.get("text_config")
    if not isinstance(named, list) or not _WRAPPERS.intersection(map(str, named)) or not isinstance(text, dict):
        return config
    kind = str(text.get("model_type"))
    found = _ABSENT.get(kind, {}) | {field: config[field] for field in _OF_ALL if field in config} | text
    found.pop("architectures", None)
    ends = [config.get("eos_token_id"), text.get("eos_token_id")]
    found["eos_token_id"] = [
        end_id for end in ends if end is not None for end_id in (end if isinstance(end, list) else [end])
    ]
    if (name := _CLASSES.get(kind)) is not None:
        found["architectures"] = [name]
    if isinstance(quantised := found.get("quantization_config"), dict):
        found["quantization_config"] = quantised | {
            field: [text_name(str(name)) for name in quantised[field]]
            for field in _NAME_LISTS
            if isinstance(quantised.get(field), list)
        }
    return found


def text_name(name: str) -> str:
    """The name of a tensor or a module in the model for text."""
    for prefix, replaced in _RENAMED.items():
        if name.startswith(prefix):
            return replaced + name.removeprefix(prefix)
    return name


def is_other_part(name: str) -> bool:
    return name.startswith(_OTHER_PARTS)


def has_text_part(names: frozenset[str]) -> bool:
    return any(name.startswith(tuple(_RENAMED)) for name in names)
