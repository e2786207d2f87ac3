"""A checkpoint's tensors under the names of a transformers model's parameters.

transformers renames old names, and converts some tensors, such as the weights of experts, which it stacks. Its own
rules are applied here, first to tensors without memory, so that names and shapes are checked before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from protos.errors import BadCheckpoint
from workers.weights.source import StoredTensor, WeightSource

Read = Callable[[str], torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Conversion:
    """How tensors of the checkpoint become parameters: `sources` by the pattern that they match. Without a `rule` the
    only source is the parameter `target`."""

    target: str
    rule: Any = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def made(self, model: Any, read: Read) -> dict[str, torch.Tensor]:
        """The parameters by name. Raises what transformers does for tensors that do not fit."""
        if self.rule is None:
            return {self.target: read(self.names[0])}
        rule = deepcopy(self.rule)
        for pattern, names in self.sources.items():
            for name in names:
                rule.add_tensor(self.target, name, pattern, lambda name=name: read(name))
        made = rule.convert(self.target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


class ConvertedSource:
    """A `WeightSource` whose names are those of `model`, on the meta device. A converted tensor is kept until all its
    parameters are read.

    Raises BadCheckpoint for tensors from which transformers cannot make the parameters."""

    def __init__(self, model: Any, source: WeightSource, where: str) -> None:
        self._model, self._source, self._where = model, source, where
        conversions, self.unused = _conversions_of(model, source.names())
        self._renamed: dict[str, str] = {}
        self._converted: dict[str, tuple[Conversion, StoredTensor]] = {}
        self._made: dict[str, torch.Tensor] = {}
        for one in conversions:
            if one.rule is None:
                self._renamed[one.target] = one.names[0]
            else:
                self._converted.update({name: (one, stored) for name, stored in self._described(one)})
        self._renamed.update(self._quantised())

    def names(self) -> Collection[str]:
        return {*self._renamed, *self._converted}

    def describe(self, name: str) -> StoredTensor:
        if name in self._renamed:
            return self._source.describe(self._renamed[name])
        return self._converted[name][1]

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        if name in self._renamed:
            return self._source.read(self._renamed[name], dim, part)
        if name not in self._made:
            one = self._converted[name][0]
            self._made.update(self._convert(one, lambda old: self._source.read(old, 0, slice(None))))
        whole = self._made.pop(name)
        return whole[(slice(None),) * dim + (part,)]

    def rename(self, old: str, new: str) -> None:
        """Renames a tensor that is not converted."""
        self._renamed[new] = self._renamed.pop(old)

    def unnamed(self) -> list[str]:
        return sorted(set(self.unused) - set(self._renamed.values()))

    def _described(self, one: Conversion) -> list[tuple[str, StoredTensor]]:
        stored = [self._source.describe(name) for name in one.names]
        shapes = dict(zip(one.names, stored, strict=True))
        made = self._convert(one, lambda name: torch.empty(shapes[name].shape, device="meta"))
        width = stored[0].num_bytes / max(1, prod(stored[0].shape))
        return [
            (name, replace(stored[0], shape=tuple(part.shape), num_bytes=int(part.numel() * width)))
            for name, part in made.items()
        ]

    def _convert(self, one: Conversion, read: Read) -> dict[str, torch.Tensor]:
        try:
            return one.made(self._model, read)
        except Exception as error:
            raise BadCheckpoint(
                f"{self._where}: transformers cannot make {one.target!r} of {one.names[0]!r} and others: {error}"
            ) from error

    def _quantised(self) -> dict[str, str]:
        layers = {name.rpartition(".")[0] for name in self.unused}
        found, _ = _conversions_of(self._model, [f"{layer}.weight" for layer in layers])
        modules = {
            one.names[0].removesuffix(".weight"): one.target.removesuffix(".weight")
            for one in found
            if one.rule is None and one.target not in self._renamed
        }
        split = [(name, *name.rpartition(".")[::2]) for name in self.unused]
        return {f"{modules[layer]}.{part}": name for name, layer, part in split if layer in modules}


def _conversions_of(model: Any, names: Collection[str]) -> tuple[list[Conversion], list[str]]:
    """Returns the conversions, in the order of transformers, whose rules depend on it, and the names without one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern: Mapping[str, Any] = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Conversion] = {}
    unused: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
        if target not in wanted:
            unused.append(name)
            continue
        one = found.setdefault(target, Conversion(target=target, rule=by_pattern[pattern] if pattern else None))
        one.sources.setdefault(pattern or name, []).append(name)
    return list(found.values()), unused
