"""A model's hidden states of some texts, taken through the layers one at a time: at most a layer's weights are in
memory. On the CPU, in float32.

Legend: T tokens of a batch of sequences, E hidden size, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from workers.attention.backend import AttentionInputs, AttentionOptions, CosSin
from workers.kernels import twins
from workers.kernels.device_kernels import kernels_for
from workers.models.decoder import DecoderLayer, embedding_of, head_of, last_norm_of, rotations_of
from workers.models.filling import LoadPart, PartLoader, ignore_progress
from workers.models.layers.embedding import Embedding
from workers.models.model_config import ModelConfig
from workers.parallel.group import Solo
from workers.weights.encoding import LayerContext, WeightEncodings
from workers.weights.formats.float_matrix import only_floats
from workers.weights.slots import Loadable
from workers.weights.source import WeightSource

_BATCH = 2048  # tokens of the sequences that go through a layer together
_LOGIT_ROWS = 512

Sequences = Sequence[Sequence[int]]


class WholeSequences:
    """Causal attention without a cache: each row is a whole sequence."""

    def __init__(self) -> None:
        self._inputs: AttentionInputs | None = None
        self._keys_values: CosSin | None = None

    def begin(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        self._keys_values = twins.rope_last(k_TKD, *rotation), v_TKD
        return twins.rope_last(q_TND, *rotation)

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        assert self._inputs is not None, "attend before begin"
        assert self._keys_values is not None, "attend before write"
        k_TKD, v_TKD = self._keys_values
        starts, outputs = self._inputs.query_starts, []
        for first, last in pairwise(starts):
            q, k, v = (heads[first:last].transpose(0, 1).unsqueeze(0) for heads in (q_TND, k_TKD, v_TKD))
            distance = torch.arange(last - first).unsqueeze(1) - torch.arange(last - first)
            visible = (distance >= 0) & (distance < (options.window or last))
            if options.softcap or options.sinks_N is not None:
                k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
                sinks = None if options.sinks_N is None else options.sinks_N.unsqueeze(1)
                out = twins.attention(q, k, v, visible, scale=options.scale, softcap=options.softcap, sinks_Q=sinks)
            else:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=options.scale, enable_gqa=True)
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


class LayerWalk:
    """`embed`, each layer in turn by `make` and `advance`, then `nats`."""

    def __init__(self, folder: Path, config: ModelConfig, source: WeightSource, sequences: Sequences) -> None:
        self._folder, self._config, self._source = folder, config, source
        self._batches = _batches(sequences)
        self._streams_TE: list[torch.Tensor] = []
        self._rotations = rotations_of(config, "cpu")
        self._made = -1  # the layer that was made last
        self._attention = WholeSequences()

    def embed(self) -> None:
        embedding = self._embedding()
        self._load(embedding)
        self._streams_TE = [embedding(_ids(batch)) for batch in self._batches]

    def make(self, layer: int, encodings: WeightEncodings) -> DecoderLayer:
        made = DecoderLayer(self.context(encodings), self._config, layer)
        self._made = layer
        self._load(made)
        return made

    def run(self, layer: DecoderLayer) -> None:
        """Every batch through the layer, the results dropped: for what observes its inputs."""
        for place in range(len(self._batches)):
            self._through(layer, place)

    def advance(self, layer: DecoderLayer) -> None:
        for place in range(len(self._batches)):
            self._streams_TE[place] = self._through(layer, place)

    def nats(self, encodings: WeightEncodings) -> float:
        """Mean cross entropy in nats, over all tokens but the first of each sequence."""
        context, config = self.context(encodings), self._config
        tied = self._embedding() if config.tied_embeddings else None
        norm, head = last_norm_of(context, config), head_of(context, config, tied)
        self._load(norm)
        self._load(tied or head)
        head.pack()
        total, count = 0.0, 0
        for batch, stream_TE in zip(self._batches, self._streams_TE, strict=True):
            rows = [start + place for start, sequence in _placed(batch) for place in range(len(sequence) - 1)]
            labels = [token for sequence in batch for token in sequence[1:]]
            for first in range(0, len(rows), _LOGIT_ROWS):
                some = slice(first, first + _LOGIT_ROWS)
                logits = head.logits(norm(stream_TE[rows[some]]))
                total += F.cross_entropy(logits.double(), torch.tensor(labels[some]), reduction="sum").item()
            count += len(rows)
        return total / max(1, count)

    def context(self, encodings: WeightEncodings) -> LayerContext:
        return LayerContext(
            device="cpu", dtype=torch.float32, parallel=Solo(), kernels=kernels_for("cpu"), encodings=encodings
        )

    def _through(self, layer: DecoderLayer, place: int) -> torch.Tensor:
        inputs, stream_TE = _inputs(self._batches[place]), self._streams_TE[place]
        self._attention.begin(inputs)
        rotation = self._rotations(inputs, inputs.context_lens)[self._made]
        delta_TE, stream_TE = layer(torch.zeros_like(stream_TE), stream_TE, rotation, self._attention)
        return delta_TE + stream_TE

    def _embedding(self) -> Embedding:
        return embedding_of(self.context(only_floats), self._config)

    def _load(self, part: Loadable) -> None:
        PartLoader(self._folder, self._source).load([LoadPart(slots=part.slots)], ignore_progress, num_threads=1)


def _batches(sequences: Sequences) -> list[list[Sequence[int]]]:
    batches: list[list[Sequence[int]]] = []
    room = 0
    for sequence in sequences:
        if len(sequence) < 2:
            continue
        if len(sequence) > room:
            batches.append([])
            room = _BATCH
        batches[-1].append(sequence)
        room -= len(sequence)
    return batches


def _placed(batch: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
    starts = _starts(batch)
    return list(zip(starts[:-1], batch, strict=True))


def _starts(batch: Sequence[Sequence[int]]) -> tuple[int, ...]:
    starts = [0]
    for sequence in batch:
        starts.append(starts[-1] + len(sequence))
    return tuple(starts)


def _ids(batch: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for sequence in batch for token in sequence])


def _inputs(batch: Sequence[Sequence[int]]) -> AttentionInputs:
    lengths = tuple(len(sequence) for sequence in batch)
    return AttentionInputs(
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        query_starts=_starts(batch),
        context_lens=lengths,
        tables=(),
        max_query=max(lengths),
        max_context=max(lengths),
    )
