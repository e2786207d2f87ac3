"""A quantization_config that is not served is refused by the field that says so, before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.fields import Fields
from protos.model_files.folder import FolderFiles
from tests.numerics.formats.compressed_encoder import config_of, floats, integers
from tests.numerics.formats.gptq_encoder import gptq_config
from workers.weights.registry import read_format

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [40, 24]}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
IN_4 = {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


@pytest.mark.parametrize(
    ("config", "param"),
    [
        *((AWQ | {"version": version}, "version") for version in ("gemv", "gemv_fast", "marlin")),
        (AWQ | {"backend": "llm-awq"}, "backend"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"bits": 8}, "bits"),
        (AWQ | {"group_size": -2}, "group_size"),
        (FP8 | {"fmt": "e5m2"}, "fmt"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme"),
        *((FP8 | {"weight_block_size": sizes}, "weight_block_size") for sizes in ([128], [0, 128])),
        *((gptq_config() | {"bits": bits}, "bits") for bits in (5, "four")),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format"),
        (gptq_config(format="gptq_p"), "format"),
        (gptq_config(is_marlin_format=True), "is_marlin_format"),
        (gptq_config(group_size=0), "group_size"),
        (gptq_config(dynamic={"x": {"bits": 6}}), "bits"),
        *((gptq_config(dynamic={pattern: {}}), "pattern") for pattern in ("(a+)+$", "[")),
        *((config_of(layout, floats("group", num_bits=4)), "format") for layout in ("nvfp4-pack-quantized", "mxfp4")),
        (config_of("marlin-24", integers(4, "group", 128)), "format"),
        (config_of(PACKED, integers(5, "channel")), "num_bits"),
        (config_of(INT, integers(4, "channel")), "num_bits"),
        (config_of(PACKED, integers(4, "block")), "strategy"),
        (config_of(INT, integers(8, "channel"), BY_TOKEN | {"strategy": "tensor"}), "strategy"),
        (config_of(PACKED, integers(4, "group", 0)), "group_size"),
        (config_of(PACKED, integers(4, "group", 32), BY_TOKEN), "input_activations"),
        (config_of(INT, integers(8, "channel"), BY_TOKEN | {"symmetric": False}), "symmetric"),
        (config_of(FLOAT, floats("block", block_structure=[0, 128])), "block_structure"),
        (config_of(FLOAT, integers(8, "channel")), "type"),
        (config_of(PACKED, integers(4, "group", 32), sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (config_of(PACKED, integers(4, "group", 32), transform_config={"config_groups": {"a": 1}}), "transform_config"),
        (config_of(PACKED, integers(4, "group", 32), ignore=["re:(a*)*"]), "pattern"),
        (config_of(PACKED, integers(4, "group", 32), config_groups={}), "config_groups"),
        (IN_4 | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
        (IN_4 | {"load_in_4bit": False}, "load_in_8bit"),
        (IN_4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        (INT8 | {"llm_int8_threshold": "six"}, "llm_int8_threshold"),
        *(({"quant_method": method}, "quantization_config") for method in ("exl3", "aqlm", None)),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], param: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedModel, BadCheckpoint)) as refused:
        read_format(Fields({"quantization_config": config}, "config.json"), FolderFiles(tmp_path))
    assert refused.value.param == param
    assert refused.value.message.startswith("config.json")
