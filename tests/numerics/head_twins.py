"""Random heads for tiny targets in their published formats, and what they draft, in plain torch without a cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from tests.numerics.checkpoints import SHAPE, VOCAB_SIZE

HIDDEN, HEADS, KV_HEADS, INNER, DRAFT_VOCAB = 64, 4, 2, 96, 50
DIM = HIDDEN // HEADS
Tensors = Mapping[str, torch.Tensor]


def _random(seed: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name] = 1 + 0.1 * noise if "norm" in name else 0.2 * noise
    return made


def _layer(name: str, num_inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.self_attn.q_proj.weight": (HIDDEN, num_inputs),
        f"{name}.self_attn.k_proj.weight": (KV_HEADS * DIM, num_inputs),
        f"{name}.self_attn.v_proj.weight": (KV_HEADS * DIM, num_inputs),
        f"{name}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{name}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{name}.post_attention_layernorm.weight": (HIDDEN,),
    }


def make_eagle3(folder: Path, *, speculators: bool = False, seed: int = 3) -> Tensors:
    """A head as SafeAILab publishes it, or vLLM's speculators. Returned under the former's names."""
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        **_layer("midlayer", 2 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    tensors = _random(seed, **shapes)
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    layer = {**_sizes(), "draft_vocab_size": DRAFT_VOCAB}
    if speculators:
        config: dict[str, Any] = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        }
        stored = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    else:
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
        stored = dict(tensors)
    return _written(folder, config, stored, tensors)


def make_eagle(folder: Path, seed: int = 5) -> Tensors:
    tensors = _random(seed, **{"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), **_layer("layers.0", HIDDEN)})
    return _written(folder, {"architectures": ["LlamaForCausalLM"], **_sizes()}, dict(tensors), tensors)


def make_medusa(folder: Path, num_heads: int = 3, seed: int = 7, **config: Any) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        shapes |= {f"{head}.0.linear.weight": (HIDDEN, HIDDEN), f"{head}.0.linear.bias": (HIDDEN,)}
        shapes[f"{head}.1.weight"] = (VOCAB_SIZE, HIDDEN)
    tensors = _random(seed, **shapes)
    return _written(folder, {"medusa_num_heads": num_heads, "medusa_num_layers": 1} | config, dict(tensors), tensors)


def add_mtp(folder: Path, seed: int = 9) -> None:
    """Appends a multi-token prediction layer, a copy of the last layer."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((folder / "config.json").read_text())
    number, size = config["num_hidden_layers"], config["hidden_size"]
    last, prefix = f"model.layers.{number - 1}.", f"model.layers.{number}."
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.startswith(last)]:
        noise = 0.1 * torch.randn(tensors[name].shape, generator=generator)
        tensors[name.replace(last, prefix)] = tensors[name] + noise
    shapes = {"enorm.weight": (size,), "hnorm.weight": (size,), "shared_head.norm.weight": (size,)}
    shapes |= {"eh_proj.weight": (size, 2 * size)}  # type: ignore[dict-item]
    tensors |= {f"{prefix}{name}": tensor for name, tensor in _random(seed, **shapes).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


def _sizes() -> dict[str, Any]:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    return {
        "model_type": "llama",
        **{name: SHAPE[name] for name in names},
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def _written(folder: Path, config: dict[str, Any], stored: dict[str, torch.Tensor], tensors: Tensors) -> Tensors:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return tensors


class Target:
    """The target by transformers: what enters its layers, behind a sequence's tokens but the last."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def states(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        out = self.model(torch.tensor([list(token_ids[:-1])]), output_hidden_states=True)
        return [state[0] for state in out.hidden_states]

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(torch.tensor(list(token_ids)))
        return embedded.detach()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def _attention(tensors: Tensors, name: str, read_TI: torch.Tensor) -> torch.Tensor:
    def heads(part: str) -> torch.Tensor:
        return (read_TI @ tensors[f"{name}.self_attn.{part}.weight"].T).view(len(read_TI), -1, DIM).transpose(0, 1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(read_TI))[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    q, k, v = turned(heads("q_proj")), turned(heads("k_proj")), heads("v_proj")
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    return out @ tensors[f"{name}.self_attn.o_proj.weight"].T


def _rest(tensors: Tensors, name: str, stream: torch.Tensor) -> torch.Tensor:
    normed = _norm(stream, tensors[f"{name}.post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return stream + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T


def eagle3_drafts(tensors: Tensors, target: Target, tokens: list[int], count: int, *, before: bool) -> list[int]:
    """Greedy. `before`: norm_before_residual."""
    features = torch.cat(target.states(tokens)[:3], -1) @ tensors["fc.weight"].T
    tokens, drafts = tokens[1:], list[int]()
    for _ in range(count):
        normed = _norm(features, tensors["midlayer.hidden_norm.weight"])
        embedded = _norm(target.embed(tokens), tensors["midlayer.input_layernorm.weight"])
        stream = (normed if before else features) + _attention(tensors, "midlayer", torch.cat((embedded, normed), -1))
        out = _rest(tensors, "midlayer", stream)
        best = int((_norm(out[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T).argmax())
        drafts.append(best + int(tensors["d2t"][best]))
        features, tokens = torch.cat((features, out[-1:])), [*tokens, drafts[-1]]
    return drafts


class MTPTwin:
    """The layer for multi-token prediction as the last decoder layer of a model of transformers."""

    def __init__(self, folder: Path, copy: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        number = config["num_hidden_layers"]
        longer = {**config, "num_hidden_layers": number + 1, "num_nextn_predict_layers": 0}
        if kinds := config.get("mlp_layer_types"):
            longer["mlp_layer_types"] = [*kinds, kinds[-1]]
        copy.mkdir()
        (copy / "config.json").write_text(json.dumps(longer))
        (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
        self._model: Any = Target(copy).model.model
        stored, prefix = load_file(folder / "model.safetensors"), f"model.layers.{number}."
        self._tensors = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}

    @torch.no_grad()
    def drafts(self, target: Target, tokens: list[int], count: int) -> list[int]:
        tensors, features = self._tensors, target.states(tokens)[-1]
        tokens, drafts = tokens[1:], list[int]()
        for _ in range(count):
            embedded = self._norm(target.embed(tokens), "enorm.weight")
            read = torch.cat((embedded, self._norm(features, "hnorm.weight")), -1) @ tensors["eh_proj.weight"].T
            places = torch.arange(len(read))[None]
            turned = self._model.rotary_emb(read[None], places)
            out = self._model.layers[-1](read[None], position_embeddings=turned, position_ids=places)[0]
            normed = self._norm(out[-1], "shared_head.norm.weight")
            drafts.append(int(target.model.get_output_embeddings()(normed).argmax()))
            features, tokens = torch.cat((features, out[-1:])), [*tokens, drafts[-1]]
        return drafts

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self._model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self._tensors[name]


def eagle_drafts(tensors: Tensors, target: Target, tokens: list[int], count: int) -> list[int]:
    features = target.states(tokens)[-1]
    tokens, drafts = tokens[1:], list[int]()
    for _ in range(count):
        read = torch.cat((target.embed(tokens), features), -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
        out = _rest(tensors, "layers.0", read + _attention(tensors, "layers.0", read))
        drafts.append(int(target.model.get_output_embeddings()(out[-1]).argmax()))
        features, tokens = torch.cat((features, out[-1:])), [*tokens, drafts[-1]]
    return drafts


def medusa_drafts(tensors: Tensors, target: Target, tokens: list[int], count: int) -> list[int]:
    hidden = target.states(tokens)[-1][-1]
    drafts = []
    for head in range(count):
        inner = hidden @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"]
        drafts.append(int(((hidden + F.silu(inner)) @ tensors[f"{head}.1.weight"].T).argmax()))
    return drafts
