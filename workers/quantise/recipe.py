"""How a checkpoint is to be quantised, and how compressed-tensors' config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workers.weights.group_rounding import GroupRounding

Method = Literal["rtn", "gptq", "awq"]

_SMALLER_GROUPS = (64, 32)  # group sizes of vLLM's kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseRecipe:
    method: Method
    bits: Literal[4, 8]
    group_size: int

    @property
    def calibrated(self) -> bool:
        return self.method != "rtn"

    def rounding(self, num_inputs: int) -> GroupRounding:
        """The rounding of layers with `num_inputs` inputs: groups that divide them, smaller ones if need be, else one
        group a row, since vLLM and compressed-tensors read no other."""
        sizes = (self.group_size, *(size for size in _SMALLER_GROUPS if size < self.group_size))
        size = next((size for size in sizes if num_inputs % size == 0), num_inputs)
        return GroupRounding(bits=self.bits, group_size=size)

    def config(self, inputs_of: Mapping[str, int]) -> dict[str, Any]:
        """config.json's quantization_config as compressed-tensors 0.20 writes it; `inputs_of` has the number of inputs
        of each kind of layer, such as mlp.down_proj."""
        of_size: dict[tuple[str, int | None], list[str]] = {}
        for kind, num_inputs in inputs_of.items():
            size = self.rounding(num_inputs).group_size
            scheme = ("group", size) if size in (self.group_size, *_SMALLER_GROUPS) else ("channel", None)
            of_size.setdefault(scheme, []).append(kind)
        most, *others = sorted(of_size, key=lambda scheme: -len(of_size[scheme]))
        groups = [
            self._group(*each, [f"re:.*{kind.replace('.', '[.]')}$" for kind in of_size[each]]) for each in others
        ]
        groups.append(self._group(*most, ["Linear"]))
        return {
            "config_groups": {f"group_{place}": group for place, group in enumerate(groups)},
            "format": "pack-quantized",
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.20.0",
        }

    def _group(self, strategy: str, size: int | None, targets: list[str]) -> dict[str, Any]:
        return {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": targets,
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": size,
                "num_bits": self.bits,
                "observer": "minmax",
                "strategy": strategy,
                "symmetric": True,
                "type": "int",
            },
        }
