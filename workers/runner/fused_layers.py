"""All layers of a model in one call, where the machine has compiled code for them (workers/kernels/cpu/layers.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workers.attention.base import AttentionBackend, AttentionInputs, CosSin
from workers.attention.cpu import NativeAttention
from workers.kernels.cpu.build import native
from workers.kernels.cpu.layers import CompiledLayers
from workers.models.decoder import Decoder, Through


def fused_layers(decoder: Decoder, attention: AttentionBackend, notify: Callable[[int], None]) -> Through | None:
    """The fused layers of a packed model with this attention; None if its layers run one by one.

    `notify` is called with each layer whose keys and values are written; in a decode-only step, it is called with the
    last layer only, since no push waits for a part of the step.
    """
    if not isinstance(attention, NativeAttention):
        return None
    kernels, weights, form = native(decoder.context.dtype), decoder.packed_layers(), decoder.layer_form()
    if kernels is None or weights is None or form is None:
        return None
    first_layers = [form.ropes.index(rope) for rope in range(len(set(form.ropes)))]
    layers = CompiledLayers(
        kernels,
        weights,
        tuple(attention.caches.values()),
        form=form,
        dtype=decoder.context.dtype,
        attention=attention.kernels_for(decoder.context.dtype),
    )

    def through(
        delta_TE: torch.Tensor, stream_TE: torch.Tensor, rotations: Sequence[CosSin], inputs: AttentionInputs
    ) -> None:
        turns = [rotations[layer] for layer in first_layers]
        step, num_layers = layers.begin(delta_TE, stream_TE, turns, attention.rows), len(layers)
        done = 0
        for layer in range(num_layers) if inputs.max_query > 1 else (num_layers - 1,):
            step.run(done, 2 * layer + 1)
            notify(layer)
            done = 2 * layer + 1
        step.run(done, 2 * num_layers)

    return through
