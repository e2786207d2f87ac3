"""Which device gets the Triton kernels, and that no other ever imports Triton."""

from __future__ import annotations

import subprocess
import sys
from inspect import getmembers, isfunction, signature

from workers.attention.registry import BACKENDS
from workers.kernels import cuda, twins
from workers.kernels.device_kernels import Kernels, kernels_for

BY_TORCH = {"activate", "head_products", "layer_norm"}  # products of dense matrices, and what only two families have


def test_cuda_is_served_by_triton_under_the_names_of_the_seam() -> None:
    assert kernels_for("cuda:1") is cuda
    assert BACKENDS["cuda"] == "workers.attention.paged:PagedAttention"
    for name, _ in getmembers(Kernels, isfunction):
        if not name.startswith("_"):
            ours, twin = getattr(cuda, name), getattr(twins, name)
            assert list(signature(ours).parameters) == list(signature(twin).parameters), name
            assert (ours.__module__ != twin.__module__) is (name not in BY_TORCH), f"{name} has no kernel"


def test_a_cpu_never_imports_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from protos.values import KVLayout
from workers.attention.registry import attention_for
from workers.kernels.device_kernels import kernels_for
from workers.kv.kv_storage import KVStorage
layout = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
attention_for(KVStorage(layout, num_blocks=1))
kernels_for("cpu").silu_mul(torch.zeros(1, 8))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
