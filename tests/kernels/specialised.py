"""Counts the kernels that requests would wait for: those compiled by steps of a warm model, for a GPU that need not be
there.

    python -m tests.kernels.specialised FAMILY QUANTIZE KV_DTYPE

prints as JSON the compilations of the warm-up, and those of steps of 1, 15, 16, 17 and 33 rows after it. Run without
TRITON_INTERPRET. Nothing is compiled or launched: what Triton specialises a kernel for is looked at, and results are
whatever lies in memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime.jit import JITFunction

from protos.values import SamplingParams
from tests.kernels.compiled import NamesTarget
from tests.numerics.checkpoints import make_checkpoint
from workers.attention.registry import attention_for
from workers.batch import Batch, Row, Sample
from workers.kernels.device_kernels import kernels_for
from workers.kernels.quantised import product_choice
from workers.kv.kv_storage import KVStorage
from workers.models import loader
from workers.models.served import layout_of
from workers.runner.torch_runner import TorchRunner
from workers.sampling import sampler

_BLOCK_SIZE = 16
_COUNTS = (1, 15, 16, 17, 33)


def _count_compilations() -> list[str]:
    """The names of the kernels that are compiled from now on."""
    compiled: list[str] = []
    run = JITFunction.run

    def note(kernel: Any, key: str, _signature: object, device: int, *_options: object) -> object:
        compiled.append(kernel.__name__)
        kernel.device_caches[device][0][key] = kernel
        return kernel

    def look(kernel: Any, *args: Any, **options: Any) -> None:
        run(kernel, *args, **{**options, "warmup": True})

    JITFunction._do_compile = note
    JITFunction.run = look
    return compiled


def _row(number: int, num_tokens: int, start: int) -> Row:
    blocks = -(-(start + num_tokens) // _BLOCK_SIZE)
    return Row(
        request_id=str(number),
        token_ids=(3,) * num_tokens,
        start=start,
        block_tables=(tuple(range(blocks)),),
        sample=Sample(params=SamplingParams(temperature=1.0), index=0),
        prompt_len=num_tokens,
    )


def main(family: str, quantize: Any, kv_dtype: Any) -> None:
    triton.runtime.driver.set_active(NamesTarget(90))
    cuda: Any = kernels_for("cuda")
    cuda.quantised_product = product_choice.quantised_product
    patch("workers.models.loader.kernels_for", lambda device: cuda).start()
    patch("workers.weights.formats.quantised_matrix.can_pack", lambda weight, dtype: False).start()
    patch("workers.sampling.sampler._choose", sampler._choose_on_gpu).start()
    compiled = _count_compilations()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(family, Path(folder), num_hidden_layers=2)
        decoder = loader.load_model(folder, quantize=quantize)
    decoder.pack()
    layout = layout_of(decoder.config, kv_dtype, block_size=_BLOCK_SIZE, dtype="float32", tp=1)
    storage = KVStorage(layout, num_blocks=80, device="cpu")
    storage._kernels = cuda
    runner = TorchRunner(decoder, attention_for(storage, "cuda"), block_size=_BLOCK_SIZE)
    storage.warm()
    runner.warm(max_tokens=512, max_rows=64, num_groups=len(layout.groups))
    warmed = list(compiled)
    compiled.clear()
    for count in _COUNTS:
        runner.run(Batch(rows=(_row(0, count, 0),)))
        runner.run(Batch(rows=tuple(_row(number, 1, 20 * count) for number in range(count))))
        runner.run(Batch(rows=(_row(0, count, 5), *(_row(number, 1, number) for number in range(1, count)))))
        for tensor in storage.tensors:
            cuda.gather(tensor, torch.arange(count + 1)[1:])
    print(json.dumps({"warmed": warmed, "later": compiled}))


if __name__ == "__main__":
    main(*sys.argv[1:])
