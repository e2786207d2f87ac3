"""An adapter's folder: its config, and which matrices of adapter_model.safetensors belong to which module. Every name
and shape is checked before a weight is read. Loads torch only to read one.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight  [r, inputs]       module model.layers.0.self_attn.q_proj
                                                .lora_B.weight  [outputs, r]
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.hints import listed, suggested
from protos.model_files.plain_files import open_plain
from protos.model_files.text_part import text_name
from workers.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from workers.weights.safetensors import open_tensors
from workers.weights.source import FLOATS

if TYPE_CHECKING:
    import torch

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"^(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight$")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """Inputs and outputs of a linear layer of the model, over all ranks."""

    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """One module's matrices by their names in the file. `scale` is that of B A."""

    name: str
    down: str  # A, [rank, inputs]
    up: str  # B, [outputs, rank]
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A checked adapter. `adapter_id` is the digest of its files, so other weights have another id."""

    folder: Path
    adapter_id: str
    config: PeftConfig
    modules: Mapping[str, AdaptedModule]  # by name
    num_bytes: int  # of its matrices as stored

    @contextmanager
    def read(self) -> Iterator[AdapterTensors]:
        with open_tensors(self.folder / WEIGHTS, framework="pt") as tensors:
            yield AdapterTensors(tensors)


class AdapterTensors:
    """The tensors of an open file, each read when it is wanted."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors.get_tensor(name)
        return tensor


def read_adapter(path: str | Path, served: Mapping[str, ModuleShape], *, adapter_id: str = "") -> AdapterFiles:
    """Checks the adapter in the folder `path` against the linear layers of the model that can have one. With an id the
    files are not read for it.

    Raises BadCheckpoint (a file missing, damaged or contradictory) or UnsupportedModel (an option or a target that is
    not served), each naming file, field or tensor, and the fix."""
    folder = Path(path)
    config = check_folder(folder)
    file = folder / WEIGHTS
    if not served:
        raise UnsupportedModel(
            f"{folder}: models that transformers computes take no adapters: merge_and_unload it with PEFT"
        )
    with open_tensors(file, framework="numpy") as tensors:
        modules = _modules(file, list(tensors.keys()), config)
        num_bytes = 0
        for module in modules.values():
            num_bytes += _check_shapes(file, module, served, tensors)
    digest = adapter_id or _digest(folder / CONFIG, file)
    return AdapterFiles(folder=folder, adapter_id=digest, config=config, modules=modules, num_bytes=num_bytes)


def check_folder(folder: Path) -> PeftConfig:
    """Checks what needs no model. Raises what `read_adapter` raises."""
    if not os.path.isdir(folder):  # of a name that is too long Path.is_dir raises OSError
        raise BadCheckpoint(f"the adapter {folder} is no folder: give the one that PEFT's save_pretrained wrote")
    config, file = read_peft_config(folder), folder / WEIGHTS
    if file.is_file():
        return config
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)):
        raise BadCheckpoint(
            f"{folder} holds a pickled adapter only ({pickles[0]}), which can run code: use PEFT's "
            "save_pretrained(folder, safe_serialization=True)"
        )
    raise BadCheckpoint(f"{file} does not exist: give the folder that PEFT's save_pretrained wrote")


def _modules(file: Path, names: list[str], config: PeftConfig) -> dict[str, AdaptedModule]:
    halves: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        matched = _NAME.match(name.removeprefix(_PREFIX))
        if matched is None or not name.startswith(_PREFIX):
            raise UnsupportedModel(f"{file}: tensor {name!r} {_why_refused(name)}", param=name)
        halves[text_name(matched["module"])][matched["half"]] = name
    if not halves:
        raise BadCheckpoint(f"{file} has no tensors: train the adapter, or download it again")
    for module, found in halves.items():
        if missing := {"A", "B"} - found.keys():
            raise BadCheckpoint(f"{file}: {module!r} has no lora_{missing.pop()}.weight: download the file again")
    scales = config.scales(sorted(halves))
    return {
        module: AdaptedModule(name=module, down=halves[module]["A"], up=halves[module]["B"], rank=rank, scale=scale)
        for module, (rank, scale) in scales.items()
    }


def _why_refused(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "is DoRA's: it is not served: merge the adapter into its model with PEFT's merge_and_unload"
    if "lora_embedding_" in name:
        return "adapts an embedding, which is not served: leave embeddings out of target_modules"
    if not name.startswith(_PREFIX):
        return f"is none of a PEFT adapter, whose names begin with {_PREFIX!r}: save it with save_pretrained"
    return (
        "is a whole weight, as modules_to_save or a resized embedding leave behind: it is not served: merge the "
        "adapter into its model with PEFT's merge_and_unload"
    )


def _check_shapes(file: Path, module: AdaptedModule, served: Mapping[str, ModuleShape], tensors: Any) -> int:
    shape = served.get(module.name)
    if shape is None:
        kind, kinds = module.name.rpartition(".")[2], sorted({name.rpartition(".")[2] for name in served})
        reason = f"adapters are served of {listed(kinds)}" if kind not in kinds else suggested(module.name, served)
        raise UnsupportedModel(
            f"{file}: tensor {module.down!r} adapts {module.name!r}, which is not served: {reason}",
            param="target_modules",
        )
    total = 0
    expected = {module.down: (module.rank, shape.num_inputs), module.up: (shape.num_outputs, module.rank)}
    for name, wanted in expected.items():
        stored = tensors.get_slice(name)
        if tuple(stored.get_shape()) != wanted:
            raise BadCheckpoint(
                f"{file}: tensor {name!r} is {tuple(stored.get_shape())}, the model and {CONFIG} make it {wanted}",
                param=name,
            )
        if stored.get_dtype() not in FLOATS:
            raise UnsupportedModel(
                f"{file}: tensor {name!r} is of type {stored.get_dtype()}: save it as {', '.join(sorted(FLOATS))}",
                param=name,
            )
        total += wanted[0] * wanted[1] * (4 if stored.get_dtype() in ("F32", "F64") else 2)
    return total


def _digest(*files: Path) -> str:
    digest = blake2b(digest_size=16, person=b"baton-adapter")
    for path in files:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with open_plain(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
