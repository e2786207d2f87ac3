"""transformers' own model of a checkpoint, without memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from protos.model_files.fields import Fields
from workers.models.transformers.attention_function import SERVED, register
from workers.models.transformers.tracing import refused, takes
from workers.models.transformers.transformers_ropes import rope_parameters

_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATE_FIELDS = (
    "attn_type_list", "conv_L_cache", "linear_attn_config", "linear_conv_kernel_dim", "lru_width", "mamba_d_state",
    "ssm_state_size", "state_size",
)  # fmt: skip
"""Fields of mixers that are no attention, in published configs without `layer_types`."""
_ENCODER, _MORE_THAN_TEXT = "it is an encoder and a decoder", "it reads more than text"


def config_of(folder: Path, fields: Fields) -> tuple[Any, type[Any]]:
    """Returns transformers' config of a checkpoint, and the class of its model. Raises UnsupportedModel for a model
    that is no text decoder."""
    name = named(fields)
    _refuse_fields(name, fields)
    import transformers  # takes seconds, so refusals come first
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        code = " Its code (auto_map) is not run." if "auto_map" in fields else ""
        raise refused(name, f"transformers {transformers.__version__} does not know it.{code}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise refused(name, _ENCODER)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(name, f"transformers {transformers.__version__} has no causal language model of it")
    made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if config.get_text_config() is not config or made.__name__.endswith("ForConditionalGeneration"):
        raise refused(name, _MORE_THAN_TEXT)
    if fields.texts("architectures") == (MODEL_MAPPING[type(config)].__name__,):
        config.tie_word_embeddings = True  # an embedding model: nobody needs its head
    elif fields.texts("architectures") not in ((), (made.__name__,)):
        raise refused(name, f"transformers' causal language model for {config.model_type} is {made.__name__}")
    _refuse_layers(name, config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # Baton reads the weights
    return config, made


def named(fields: Fields) -> str:
    architectures = fields.texts("architectures")
    return ", ".join(architectures) or f"model_type {fields.raw('model_type')!r}"


def _refuse_fields(name: str, fields: Fields) -> None:
    """Refuses by config.json, without transformers."""
    if fields.flag("is_encoder_decoder"):
        raise refused(name, _ENCODER)
    text = fields.inner("text_config")
    for part in (fields, text):
        if "attention_chunk_size" in part:
            raise refused(name, "its layers attend within chunks (attention_chunk_size)")
        if "layer_types" in part:
            _refuse_layer_types(name, part.texts("layer_types"))
        elif state := next((field for field in _STATE_FIELDS if field in part), None):
            raise refused(name, f"it keeps a state other than keys and values ({state})")
    if text.names() or name.endswith("ForConditionalGeneration"):
        raise refused(name, _MORE_THAN_TEXT)


def _refuse_layer_types(name: str, layer_types: Collection[str]) -> None:
    others = sorted(set(layer_types) - _LAYERS)
    if others:
        raise refused(name, f"layer_types has {', '.join(others)}: {', '.join(sorted(_LAYERS))} are served")


def _refuse_layers(name: str, config: Any) -> None:
    """Refuses by the layers, for what a pass on the meta device does not show."""
    _refuse_layer_types(name, getattr(config, "layer_types", None) or ())
    if any(parameters.get("rope_type") == "dynamic" for parameters in rope_parameters(config)):
        raise refused(name, "its rope (dynamic) depends on the length of all sequences of a batch")
    if getattr(config, "alibi", False):
        raise refused(name, "it adds ALiBi's biases to the scores")


def build(config: Any, made: type[Any], name: str, dtype: torch.dtype) -> Any:
    """The model on the meta device. Raises UnsupportedModel."""
    register()
    try:
        with torch.device("meta"):
            model = made._from_config(config, attn_implementation=SERVED, dtype=dtype)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (SERVED,):
            raise refused(name, "its attention is its own code, which does not call the attention interface") from error
        message = str(error).strip().partition("\n")[0][:300]
        raise refused(name, f"transformers cannot make it ({type(error).__name__}: {message})") from error
    if not takes(model, "position_ids"):
        raise refused(name, "its forward pass takes no position_ids")
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _no_warning  # it waits for the device
    return model.eval()


def _no_warning(*_: Any) -> None:
    pass
