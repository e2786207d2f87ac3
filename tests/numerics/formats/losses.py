"""The loss of the demo model in each format: held-out nats a token, in float32 and as served in bfloat16.

    python -m tests.numerics.formats.losses            the table of docs/quantisation.md

Weights are rounded to nearest by the tests' encoders, without calibration: tools that calibrate lose less
(`baton quantize --method gptq`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from demo.held_out import load
from demo.measure import Logits, loss_of
from tests.gguf_models import convert
from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.bitsandbytes_encoder import int8_rows, nf4
from tests.numerics.formats.byte_encoder import in_bytes
from tests.numerics.formats.exl2_encoder import exl2
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import Encode, Encoded
from tests.numerics.formats.test_demo import AWQ, DEMO, FP8, W8A8, write_demo
from tests.numerics.paged import PagedRun
from workers.models.loader import load_model

NUM_SOURCE, NUM_CHAT = 4, 12  # texts of each kind
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EXL2 = {"quant_method": "exl2", "version": "0.3.2", "bits": 4.25, "head_bits": 16}
MIXED = {"token_embd": "Q6_K", "attn_v": "Q6_K"}


def _written(encode: Encode, config: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_demo(folder, encode, config)
        return folder

    return write


def _nf4(name: str, weight: torch.Tensor) -> Encoded | None:
    """64 does not divide the 688 inputs of `down_proj`."""
    return nf4(64 if weight.shape[1] % 64 == 0 else 16)(name, weight)


def _gguf(kind: str, **others: str) -> Callable[[Path], Path]:
    return lambda folder: convert(DEMO, folder / "demo.gguf", kind, others=others)


FORMATS: dict[str, Callable[[Path], Path]] = {
    "bfloat16": lambda _: DEMO,
    "W8A8 (compressed-tensors)": _written(in_bytes("int8", "channel"), W8A8),
    "LLM.int8()": _written(int8_rows, INT8),
    "FP8, blocks of 128 x 128": _written(
        in_bytes("fp8", "block", block=(128, 128), scale_name="weight_scale_inv"), FP8
    ),
    "GGUF Q8_0": _gguf("Q8_0"),
    "GGUF Q4_K, with Q6_K as Q4_K_M has": _gguf("Q4_K", **MIXED),
    "GGUF Q4_0": _gguf("Q4_0"),
    "GPTQ, 4 bits, act-order, groups of 32": _written(gptq(4, 32, act_order=True), gptq_config(4, 32, desc_act=True)),
    "AWQ, groups of 32": _written(awq(32), AWQ),
    "NF4, blocks of 64 (16 in `down_proj`)": _written(_nf4, NF4),
    "EXL2, 4 bits, 6 for 32 inputs, groups of 32": _written(exl2(), EXL2),
}


def logits_of(path: Path, dtype: str) -> Logits:
    model = load_model(path, dtype=dtype)
    model.pack()

    def logits(ids_1T: torch.Tensor) -> torch.Tensor:
        ids = ids_1T[0].tolist()
        return PagedRun(model, num_blocks=160).step([("only", ids, len(ids))])[0][None]

    return logits


@torch.inference_mode()
def main() -> None:
    texts, tokenizer = load(DEMO), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    held_out = [*texts.source[:NUM_SOURCE], *texts.chat[:NUM_CHAT]]
    first: dict[str, float] = {}
    print("| weights, rounded to nearest | float32 | | as served in bfloat16 | |\n|---|---|---|---|---|")
    for name, write in FORMATS.items():
        with tempfile.TemporaryDirectory() as scratch:
            path, cells = write(Path(scratch)), [name]
            for dtype in ("float32", "bfloat16"):
                loss = loss_of(logits_of(path, dtype), tokenizer, held_out, torch.device("cpu"))
                change = loss.nats / first.setdefault(dtype, loss.nats) - 1
                cells += [f"{loss.nats:.3f}", "" if path == DEMO else f"{change:+.2%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{loss.num_tokens:,} tokens")


if __name__ == "__main__":
    main()
