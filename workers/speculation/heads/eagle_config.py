"""Reads an EAGLE head's form from its config.json and the names of its tensors. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from protos.model_files.fields import Fields
from protos.model_files.opening import open_model
from workers.models.model_config import ModelConfig, config_of
from workers.weights.source import WeightSource

LAYER = "layers.0"
OTHER_HEAD = "choose a head that was trained for this model"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """`model` has the sizes of the head's layer, its `vocab_size` the tokens of the head's own vocabulary."""

    model: ModelConfig
    target: ModelConfig
    is_eagle3: bool
    hidden_layers: tuple[int, ...]
    norm_before_residual: bool
    fc_bias: bool
    own_embedding: bool
    maps_ids: bool

    @property
    def num_features(self) -> int:
        if self.is_eagle3:
            return self.target.hidden_size * len(self.hidden_layers)
        return self.model.hidden_size + self.target.hidden_size


def read_eagle(path: str, target: ModelConfig, source: WeightSource) -> EagleConfig:
    """Raises BadCheckpoint or UnsupportedModel for a head that cannot be read, Misconfigured for one of another
    target."""
    files = open_model(path)
    fields = Fields.of_file(files, "config.json")
    layer = fields.inner("transformer_layer_config") if "transformer_layer_config" in fields else fields
    names = frozenset(source.names())
    is_eagle3 = f"{LAYER}.hidden_norm.weight" in names
    num_layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    if num_layers != 1:
        raise UnsupportedModel(f"{path} has {num_layers} layers: an EAGLE head has one (midlayer or layers.0)")
    vocab_size = layer.integer_or("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise Misconfigured(
            f"the head {path} has {vocab_size} tokens, the model {target.vocab_size}: {OTHER_HEAD}", param="speculate"
        )
    own_size = source.describe("lm_head.weight").shape[0] if "lm_head.weight" in names else vocab_size
    model = config_of(
        layer.replaced(architectures=["LlamaForCausalLM"], num_hidden_layers=1, tie_word_embeddings=False).over(
            {"vocab_size": vocab_size, "max_position_embeddings": target.max_position}
        ),
        files,
    )
    if model.weight_format is not None:
        raise UnsupportedModel(f"{path}: quantised heads are not served: choose one in bfloat16, float16 or float32")
    config = EagleConfig(
        model=replace(model, vocab_size=own_size),
        target=target,
        is_eagle3=is_eagle3,
        hidden_layers=_hidden_layers(fields, target) if is_eagle3 else (target.num_layers,),
        norm_before_residual=fields.flag("norm_before_residual", default=layer.flag("norm_before_residual")),
        fc_bias="fc.bias" in names,
        own_embedding="embed_tokens.weight" in names,
        maps_ids="d2t" in names,
    )
    _check(path, config, names)
    return config


def _hidden_layers(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """By default those of the paper, which count from 0: 2, the middle, and the third from the end."""
    key, count = "eagle_aux_hidden_state_layer_ids", target.num_layers
    listed = fields.raw(key) or fields.inner("eagle_config").raw(key)
    layers = listed if listed is not None else [2, count // 2, count - 3]
    if not isinstance(layers, list) or len(layers) != 3 or not all(isinstance(layer, int) for layer in layers):
        raise BadCheckpoint(f"{fields.where}: {key} is {layers!r}: it must be a list of 3 layers")
    if not all(0 <= layer <= count for layer in layers):
        raise BadCheckpoint(f"{fields.where}: {key} is {layers}: name 3 layers from 0 to {count}")
    return tuple(layers)


def _check(path: str, eagle: EagleConfig, names: frozenset[str]) -> None:
    if not eagle.own_embedding and eagle.model.hidden_size != eagle.target.hidden_size:
        raise Misconfigured(
            f"the head {path} has no embedding and hidden_size {eagle.model.hidden_size}, the model "
            f"{eagle.target.hidden_size}: {OTHER_HEAD}",
            param="speculate",
        )
    if eagle.is_eagle3 and "lm_head.weight" not in names:
        raise BadCheckpoint(f"{path} lacks 'lm_head.weight': an EAGLE-3 head has a head of its own")
    if eagle.is_eagle3 and not eagle.maps_ids and eagle.model.vocab_size != eagle.target.vocab_size:
        raise BadCheckpoint(
            f"{path} lacks 'd2t': it has {eagle.model.vocab_size} tokens, the model {eagle.target.vocab_size}"
        )


def eagle_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("midlayer.", f"{LAYER}.", 1) if name.startswith("midlayer.") else name
