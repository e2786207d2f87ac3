"""Heads that draft for the demo model, as they are trained: EAGLE-3 (arXiv 2503.01840) and Medusa (arXiv 2401.10774).

    entry of position p + j      target's layers at p (j = 0), or the entry before it   with token p + j + 1
    predicts                     token p + j + 2

EAGLE-3 is unrolled: step j of base p attends to the entries of step 0 up to p, and to its own of steps 1 to j, as it
does when it drafts. Tensors have the names of the published formats.

Legend: B rows, T bases, S steps, E hidden size, V tokens of a head, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig


class TrainedEagle3(nn.Module):
    """One layer over `aux_layers` of a target. `draft_ids_V`: the target's id of each of its tokens, ascending."""

    def __init__(
        self, config: LlamaConfig, aux_layers: Sequence[int], draft_ids_V: torch.Tensor, *, inner_size: int
    ) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.config, self.aux_layers, self.inner_size = config, tuple(aux_layers), inner_size
        self.draft_ids_V = draft_ids_V
        self.fc = _linear(len(self.aux_layers) * size, size)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": _linear(2 * size, config.num_attention_heads * dim),
                        "k_proj": _linear(2 * size, config.num_key_value_heads * dim),
                        "v_proj": _linear(2 * size, config.num_key_value_heads * dim),
                        "o_proj": _linear(config.num_attention_heads * dim, size),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": _linear(size, inner_size),
                        "up_proj": _linear(size, inner_size),
                        "down_proj": _linear(inner_size, size),
                    }
                ),
                **{
                    name: nn.RMSNorm(size, eps=config.rms_norm_eps)
                    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
                },
            }
        )
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = _linear(size, len(draft_ids_V))

    def unroll(self, states: Sequence[torch.Tensor], embedded_BLE: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
        """[B, T, V] logits of each step, T = L - S. `states` are inputs of the target's layers, and the output of its
        last norm, each [B, L, E]; `embedded_BLE` the embeddings of the same tokens."""
        num_bases = embedded_BLE.shape[1] - num_steps
        feature_BTE = self.fc(torch.cat([states[layer][:, :num_bases] for layer in self.aux_layers], dim=-1))
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits = []
        for step in range(num_steps):
            feature_BTE = self._entry(feature_BTE, embedded_BLE[:, step + 1 : step + 1 + num_bases], keys, values)
            logits.append(self.lm_head(self.norm(feature_BTE)))
        return logits

    def _entry(
        self,
        feature_BTE: torch.Tensor,
        embedded_BTE: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """The features of one step more, whose key and value are appended."""
        layer: Mapping[str, nn.Module] = self.midlayer  # type: ignore[assignment]
        attention: Mapping[str, nn.Module] = layer["self_attn"]  # type: ignore[assignment]
        mlp: Mapping[str, nn.Module] = layer["mlp"]  # type: ignore[assignment]
        read = torch.cat((layer["input_layernorm"](embedded_BTE), layer["hidden_norm"](feature_BTE)), dim=-1)
        num_heads, num_kv = self.config.num_attention_heads, self.config.num_key_value_heads
        rotation = self._rotation(feature_BTE.shape[1], len(keys))
        query = _rotated(_by_heads(attention["q_proj"](read), num_heads), rotation)
        keys.append(
            _rotated(_by_heads(attention["k_proj"](read), num_kv), rotation).repeat_interleave(num_heads // num_kv, 1)
        )
        values.append(_by_heads(attention["v_proj"](read), num_kv).repeat_interleave(num_heads // num_kv, 1))
        attended = _attend(query, keys, values).transpose(1, 2).flatten(2)
        stream = feature_BTE + attention["o_proj"](attended)
        normed = layer["post_attention_layernorm"](stream)
        inner = F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        out: torch.Tensor = stream + mlp["down_proj"](inner)
        return out

    def _rotation(self, num_positions: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.config.head_dim
        turns = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(first, first + num_positions)[:, None] * turns
        return torch.cat((angles, angles), dim=-1).cos(), torch.cat((angles, angles), dim=-1).sin()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under the names of SafeAILab: token i of the head is the target's i + d2t[i]."""
        num_tokens = len(self.draft_ids_V)
        is_drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        is_drafted[self.draft_ids_V] = True
        return {
            **_stored(self),
            "d2t": self.draft_ids_V - torch.arange(num_tokens),
            "t2d": is_drafted,
        }

    def published_config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.config.hidden_size,
            "intermediate_size": self.inner_size,
            "num_attention_heads": self.config.num_attention_heads,
            "num_key_value_heads": self.config.num_key_value_heads,
            "head_dim": self.config.head_dim,
            "max_position_embeddings": self.config.max_position_embeddings,
            "rms_norm_eps": self.config.rms_norm_eps,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "vocab_size": self.config.vocab_size,
            "draft_vocab_size": len(self.draft_ids_V),
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.aux_layers)},
        }


class TrainedMedusa(nn.Module):
    """Head i predicts token p + i + 2 from the target's last norm at p: x + SiLU(W x + b), then a head of its own."""

    def __init__(self, config: LlamaConfig, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(num_heads))
        self.heads = nn.ModuleList(_linear(config.hidden_size, config.vocab_size) for _ in range(num_heads))

    def forward(self, last_BTE: torch.Tensor) -> list[torch.Tensor]:
        """[B, T, V] logits of each head."""
        return [head(last_BTE + F.silu(block(last_BTE))) for block, head in zip(self.blocks, self.heads, strict=True)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under the names of `medusa_lm_head`."""
        stored = _stored(self)
        return {
            name: stored[source]
            for head in range(len(self.heads))
            for name, source in (
                (f"{head}.0.linear.weight", f"blocks.{head}.weight"),
                (f"{head}.0.linear.bias", f"blocks.{head}.bias"),
                (f"{head}.1.weight", f"heads.{head}.weight"),
            )
        }

    def published_config(self) -> dict[str, object]:
        return {
            "medusa_num_heads": len(self.heads),
            "medusa_num_layers": 1,
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "torch_dtype": "bfloat16",
        }


def distillation_loss(logits_BTV: torch.Tensor, target_BTV: torch.Tensor) -> torch.Tensor:
    """Cross entropy with the target's distribution over the same tokens, the mean over positions."""
    wanted = target_BTV.float().softmax(dim=-1)
    return -(wanted * logits_BTV.float().log_softmax(dim=-1)).sum(-1).mean()


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    made = nn.Linear(num_inputs, num_outputs, bias=False)
    nn.init.normal_(made.weight, std=num_inputs**-0.5)
    return made


def _by_heads(x_BTI: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x_BTI.view(*x_BTI.shape[:-1], num_heads, -1).transpose(1, 2)


def _rotated(x_BNTD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos_TD, sin_TD = rotation
    first, second = x_BNTD.chunk(2, dim=-1)
    return x_BNTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD


def _attend(query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, N, T, D]: over the entries of step 0 up to each base, and over the base's own of later steps."""
    first_key, *own_keys = keys
    first_value, *own_values = values
    num_bases = query.shape[2]
    later = torch.ones(num_bases, num_bases, dtype=torch.bool).triu(1)
    scores = (query @ first_key.transpose(-1, -2)).masked_fill(later, -torch.inf)
    own = [(query * key).sum(-1, keepdim=True) for key in own_keys]
    weights = (torch.cat((scores, *own), dim=-1) * query.shape[-1] ** -0.5).softmax(dim=-1)
    out: torch.Tensor = weights[..., :num_bases] @ first_value
    for place, value in enumerate(own_values):
        out = out + weights[..., num_bases + place, None] * value
    return out


def _stored(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()
    }
