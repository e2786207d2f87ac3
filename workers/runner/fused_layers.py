"""All layers of a model in one call, where the machine has compiled code for them (workers/kernels/cpu/layers.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workers.attention.backend import AttentionBackend, AttentionInputs, CosSin
from workers.attention.cpu import CompiledAttention
from workers.attention.grouped_attention import GroupedAttention
from workers.kernels.cpu.layers import CompiledLayers
from workers.kernels.cpu.native_build import native
from workers.models.decoder import Decoder, Taps, Through
from workers.models.interface import ServedDecoder


def fused_layers(decoder: ServedDecoder, attention: AttentionBackend, notify: Callable[[int], None]) -> Through | None:
    """Returns the fused layers of a packed model with this attention; None if layers must run one by one. `notify` is
    called with each layer whose keys and values are written; in a step without prompts only with the last layer,
    because no push waits for a part of it."""
    if not isinstance(decoder, Decoder):
        return None
    backends = attention.backends if isinstance(attention, GroupedAttention) else (attention,)
    natives = [backend for backend in backends if isinstance(backend, CompiledAttention)]
    if len(natives) < len(backends):
        return None
    kernels, weights, form = native(decoder.context.dtype), decoder.packed_layers(), decoder.layer_form()
    if kernels is None or weights is None or form is None:
        return None
    parallel = decoder.context.parallel
    first_layers = [form.ropes.index(rope) for rope in range(len(set(form.ropes)))]
    caches = {layer: cache for backend in natives for layer, cache in backend.caches.items()}
    group_of = {layer: group for group, backend in enumerate(natives) for layer in backend.caches}
    layers = CompiledLayers(
        kernels,
        weights,
        [caches[layer] for layer in range(len(weights))],
        form=form,
        dtype=decoder.context.dtype,
        attention=natives[0].kernels_for(decoder.context.dtype),
        groups=[group_of[layer] for layer in range(len(weights))],
        all_reduce=parallel.all_reduce if parallel.size > 1 else None,
    )

    def through(
        delta_TE: torch.Tensor,
        stream_TE: torch.Tensor,
        rotations: Sequence[CosSin],
        inputs: AttentionInputs,
        taps: Taps,
    ) -> None:
        turns = [rotations[layer] for layer in first_layers]
        rows = [backend.rows for backend in natives]
        growth = None if decoder.growth is None else decoder.growth.factors_T
        step, num_layers = layers.begin(delta_TE, stream_TE, turns, rows, growth), len(layers)
        done = 0
        waited = inputs.has_prompts and inputs.max_query > 1
        notified = range(num_layers) if waited else (num_layers - 1,)
        for layer in sorted({*notified, *taps.layers} - {num_layers}) if taps.layers else notified:
            if layer in taps.layers:
                step.run(done, 2 * layer)
                taps.take(layer, delta_TE, stream_TE)
                done = 2 * layer
            if layer in notified:
                step.run(done, 2 * layer + 1)
                notify(layer)
                done = 2 * layer + 1
        step.run(done, 2 * num_layers)

    return through
