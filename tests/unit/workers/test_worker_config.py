"""A setting nobody could serve with is refused where it is written, by name, with what would do."""

from __future__ import annotations

from typing import Any

import pytest

from protos.errors import Misconfigured
from workers.worker_config import WorkerConfig


def test_the_defaults_serve() -> None:
    assert WorkerConfig(model="some/folder").tp == 1


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("model", "", "folder"),
        ("device", "tpu", "auto, cpu, cuda"),
        ("dtype", "int8", "auto, bfloat16, float32"),
        ("tp", 0, "1 or more"),
        ("block_size", -16, "1 or more"),
        ("num_blocks", 0, "1 or more"),
        ("max_model_len", 0, "1 or more"),
        ("prefill_chunk", 0, "1 or more"),
        ("memory_fraction", 0.0, "at most 1"),
        ("memory_fraction", 1.5, "at most 1"),
        ("memory_fraction", float("nan"), "at most 1"),
        ("host_kv_gib", -1.0, "0 or more"),
        ("host_kv_gib", float("nan"), "0 or more"),
        ("max_num_seqs", 4096, "max_num_batched_tokens"),
        ("steps_in_flight", -1, "0 to 4"),
        ("steps_in_flight", 5, "0 to 4"),
    ],
)
def test_a_bad_value_is_named_with_its_range(setting: str, value: Any, told: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        WorkerConfig(**({"model": "some/folder"} | {setting: value}))
    assert raised.value.param == setting
    assert setting in raised.value.message
    assert told in raised.value.message
    assert str(value) in raised.value.message
