"""A decoder whose layers transformers computes: the model in place of Baton's stack, with Baton's cache under it.

Legend: T tokens of the batch (rows packed), N query heads, K key/value heads, D head dim, of this rank; R positions
whose logits are asked for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from workers.adapters.linear import AdaptableLinear
from workers.adapters.low_rank import StepAdapters
from workers.attention.backend import AttentionBackend, AttentionInputs, AttentionOptions, CosSin
from workers.models.decoder import ModelInputs, Through
from workers.models.transformers.attention_function import SERVED
from workers.models.transformers.tracing import forward, set_step
from workers.models.transformers.transformers_config import TransformersConfig
from workers.models.transformers.transformers_linear import MatrixLinear
from workers.models.transformers.transformers_ropes import LongTokens
from workers.weights.encoding import LayerContext


class PagedStep:
    """The attention function of a step: writes keys and values of the packed rows into the cache, and attends there.

    The n-th call of a step is the n-th layer of the cache. Queries and keys come rotated; heads of another size than
    the cache's are padded with zeros, which change no product.
    """

    def __init__(self, config: TransformersConfig, context: LayerContext) -> None:
        tp = context.parallel.size
        self._calls = config.calls
        self._parallel = context.parallel
        self._dtype = context.dtype
        self._num_kv_heads, self._head_dim = config.num_kv_heads // tp, config.head_dim
        self._backend: AttentionBackend | None = None
        self._next = 0
        self._unrotated: CosSin = (torch.empty(0), torch.empty(0))

    def begin(self, backend: AttentionBackend, inputs: AttentionInputs) -> None:
        self._backend, self._next = backend, 0
        angles = inputs.positions_T.shape[0], self._head_dim // 2
        if self._unrotated[0].shape != angles:
            device = inputs.positions_T.device
            self._unrotated = torch.ones(angles, device=device), torch.zeros(angles, device=device)

    def end(self) -> None:
        assert self._next == len(self._calls), f"{self._next} calls of attention, {len(self._calls)} in the traced pass"

    def __call__(
        self,
        module: torch.nn.Module,
        q_1NTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTD: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        assert self._backend is not None, "attention before a step has begun"
        layer, self._next = self._next, self._next + 1
        call, dtype = self._calls[layer], q_1NTD.dtype
        sinks_N: torch.Tensor | None = options.get("s_aux") if call.has_sinks else None
        whole = self._parallel.size > 1 and q_1NTD.shape[1] == call.num_heads
        q_TND, k_TKD, v_TKD = (heads[0].transpose(0, 1) for heads in (q_1NTD, k_1KTD, v_1KTD))
        if whole:
            q_TND, k_TKD, v_TKD = (self._share(heads, dim=1) for heads in (q_TND, k_TKD, v_TKD))
        if sinks_N is not None:
            sinks_N = sinks_N.detach().flatten().float()
            sinks_N = self._share(sinks_N, dim=0) if sinks_N.shape[0] > q_TND.shape[1] else sinks_N
        k_TKD, v_TKD = self._widened(k_TKD), self._widened(v_TKD)
        q_TND = self._backend.write(layer, self._padded(q_TND), k_TKD, v_TKD, self._unrotated)
        sinks_N = None if sinks_N is None else sinks_N.contiguous()
        attention = AttentionOptions(scale=scale, window=call.window, softcap=call.softcap, sinks_N=sinks_N)
        out_TND = self._backend.attend(layer, q_TND, attention)
        out_TND = out_TND[..., : call.value_dim].to(dtype)
        if whole:
            parts = self._parallel.collect(out_TND.contiguous())
            out_TND = parts.transpose(0, 1).flatten(1, 2)
        return out_TND.unsqueeze(0)

    def _share(self, heads: torch.Tensor, *, dim: int) -> torch.Tensor:
        return heads.chunk(self._parallel.size, dim=dim)[self._parallel.rank]

    def _widened(self, heads_TKD: torch.Tensor) -> torch.Tensor:
        times = self._num_kv_heads // heads_TKD.shape[1]
        return self._padded(heads_TKD.repeat_interleave(times, dim=1) if times > 1 else heads_TKD)

    def _padded(self, heads: torch.Tensor) -> torch.Tensor:
        missing = self._head_dim - heads.shape[-1]
        return (F.pad(heads, (0, missing)) if missing else heads).to(self._dtype).contiguous()


class TransformersDecoder:
    """The decoder of `workers.models.decoder`, by a model of transformers. Made by
    `workers.models.transformers.transformers_loader`."""

    def __init__(self, model: Any, config: TransformersConfig, context: LayerContext, *, stored_as: str) -> None:
        self.config = config
        self.context = context
        self.stored_as = stored_as
        self.generation = 0  # no graph is captured of it
        self.step_adapters = StepAdapters()
        self._model = model
        self._step = PagedStep(config, context)
        self._long_tokens = None if config.long_from is None else LongTokens(config.long_from)
        if self._long_tokens is not None:
            self._long_tokens.install(model)
        set_step(model, self._step, SERVED, "eager" if context.device == "cpu" else "grouped_mm")

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, attention: AttentionBackend, through: Through | None = None) -> torch.Tensor:
        """Logits [R, V], float32, as `Decoder.forward`; there is nothing that could compute `through` the layers."""
        self._step.begin(attention, inputs.attention)
        if self._long_tokens is not None:
            self._long_tokens.begin(inputs.attention, inputs.prompt_lens)
        positions_1T = inputs.attention.positions_T.unsqueeze(0)
        with self._keeping(inputs):
            logits_1RV = forward(self._model, inputs.token_ids_T.unsqueeze(0), positions_1T, inputs.logit_rows)
        self._step.end()
        return logits_1RV[0].float()

    @contextmanager
    def _keeping(self, inputs: ModelInputs) -> Iterator[None]:
        if inputs.pooled_rows is None:
            yield
            return

        def keep(module: Any, given: Any, output: Any) -> None:
            inputs.hidden.append(output[0][0][inputs.pooled_rows])

        handle = self._model.base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def pack(self) -> None:
        for module in self._model.modules():
            if isinstance(module, MatrixLinear):
                module.pack()

    def linears(self) -> Iterable[AdaptableLinear]:
        """None can have an adapter."""
        return ()

    def expert_counts(self) -> list[torch.Tensor]:
        """None are counted: transformers' experts do not."""
        return []
