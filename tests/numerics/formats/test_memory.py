"""The memory of a quantised model while it is loaded and afterwards, by `/proc/self/status`."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.numerics.formats.gptq_encoder import gptq_config
from workers.models.loader import load_model
from workers.models.model_config import weight_bytes

STATUS = Path("/proc/self/status")
HIDDEN, INNER, LAYERS, VOCAB = 1024, 4096, 4, 256
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="the system has no /proc/self/status")


def anonymous_bytes() -> int:
    """Without what is mapped from files."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@contextmanager
def peak() -> Iterator[list[int]]:
    seen, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen[0] = max(seen[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def random_gptq(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    groups = inputs // 128
    return {
        f"{name}.qweight": torch.randint(-(1 << 31), (1 << 31) - 1, (inputs // 8, outputs), dtype=torch.int32),
        f"{name}.qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.rand(groups, outputs).half() * 1e-3,
        f"{name}.g_idx": torch.randperm(inputs).div(128, rounding_mode="floor").int(),
    }


def random_nf4(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [outputs, inputs]}).encode()
    return {
        f"{name}.weight": torch.randint(256, (outputs * inputs // 2, 1)).to(torch.uint8),
        f"{name}.weight.absmax": torch.rand(outputs * inputs // 64),
        f"{name}.weight.quant_map": torch.linspace(-1, 1, 16),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def write(folder: Path, layer_of: Any, config: dict[str, object], vocab: int = VOCAB) -> int:
    """The bytes of the weights."""
    tensors = {"model.embed_tokens.weight": torch.randn(vocab, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        tensors |= {f"{layer}.{norm}_layernorm.weight": torch.ones(HIDDEN) for norm in ("input", "post_attention")}
        for name in "qkvo":
            tensors |= layer_of(f"{layer}.self_attn.{name}_proj", HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            tensors |= layer_of(f"{layer}.mlp.{name}_proj", INNER, HIDDEN)
        tensors |= layer_of(f"{layer}.mlp.down_proj", HIDDEN, INNER)
    save_file(tensors, folder / "model.safetensors")
    sizes = {"vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    fields = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(sizes | heads | fields))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("layer_of", "config"),
    [(random_gptq, gptq_config(group_size=128, desc_act=True)), (random_nf4, NF4)],
    ids=["gptq-act-order", "nf4"],
)
def test_loading_takes_packed_bytes_and_one_dequantised_tensor(
    layer_of: Any, config: dict[str, object], tmp_path: Path
) -> None:
    num_bytes = write(tmp_path, layer_of, config)
    load_model(tmp_path, packed=True)  # what is loaded and kept only once
    gc.collect()
    gc.disable()  # nothing may wait for the collector, which workers turn off
    before = anonymous_bytes()
    try:
        with peak() as highest:
            decoder = load_model(tmp_path, packed=True)
    finally:
        gc.enable()
    assert highest[0] - before <= num_bytes + 4 * 2 * INNER * HIDDEN + 64 * MIB
    assert anonymous_bytes() - before <= 1.1 * num_bytes + 16 * MIB
    del decoder


def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    """A head that is packed for products gives the embedding its rows."""
    num_bytes = write(tmp_path, random_gptq, gptq_config(group_size=128), vocab=16 * VOCAB)
    load_model(tmp_path, packed=True)  # what is loaded and kept only once
    gc.collect()
    before = anonymous_bytes()
    decoder = load_model(tmp_path, packed=True)
    gc.collect()
    assert anonymous_bytes() - before <= num_bytes + 12 * MIB, "a second embedding would be 16 MiB more"
    del decoder


def test_memory_checks_count_packed_bytes(tmp_path: Path) -> None:
    num_bytes = write(tmp_path, random_gptq, gptq_config(group_size=128, desc_act=True))
    floats = 4 * (VOCAB * HIDDEN + HIDDEN * (2 * LAYERS + 1))
    assert weight_bytes(tmp_path, "float32") == num_bytes
    assert weight_bytes(tmp_path, "bfloat16") == num_bytes - floats // 2
