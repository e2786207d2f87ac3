"""FP8 of quant_method fp8: e4m3 bytes with `weight_scale_inv` by blocks, or a scalar `weight_scale`, by which they are
multiplied in spite of the first one's name."""

from __future__ import annotations

from workers.quantization.activation_rounding import ActivationRounding
from workers.weights.encoding import WeightEncodings
from workers.weights.formats.byte_weight import ByteSettings, ByteWeight
from workers.weights.formats.quantised_matrix import encodings_where
from workers.weights.source import WeightSource
from workers.weights.weight_formats import FP8Settings


def encodings(stored: FP8Settings, source: WeightSource) -> WeightEncodings:
    """Activations without a stored scale are rounded by token, in groups as wide as the blocks where there are any."""
    names = source.names()
    scale = "weight_scale_inv" if any(name.endswith(".weight_scale_inv") for name in names) else "weight_scale"
    inputs = "activation_scale" if any(name.endswith(".activation_scale") for name in names) else "input_scale"
    block = stored.block
    settings = ByteSettings(
        levels="fp8",
        strategy="tensor" if block is None else "block",
        scale=scale,
        block=block or (1, 1),
        activations=ActivationRounding(levels="fp8", group=None if block is None else block[1]),
        input_scale=inputs if stored.static else None,
    )
    return encodings_where(scale, source, lambda _: settings, ByteWeight)
