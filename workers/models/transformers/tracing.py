"""Finds out what a transformers model does by one forward pass on the meta device: no weight is read, no number
computed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protos.errors import UnsupportedModel
from workers.models.transformers.attention_function import SERVED, TRACED, AttentionStep
from workers.models.transformers.transformers_config import AttentionCall

NUM_TOKENS = 13  # unlikely to be any size of the model

_HARMLESS = frozenset({
    "attention_mask", "cache_position", "is_causal", "output_attentions", "output_hidden_states", "position_ids",
    "return_dict", "sliding_window", "softcap", "s_aux", "use_cache", "logits_to_keep", "past_key_values",
    "num_items_in_batch", "position_embeddings", "output_router_logits",
})  # fmt: skip
"""Options of a call that change nothing here, or that `_call_of` reads."""


class Tracing:
    """Records the calls of the attention function. `masks`: the model's masks by identity, with their windows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: list[AttentionCall] = []
        self.modules: list[torch.nn.Module] = []
        self._masks: list[tuple[torch.Tensor, int | None]] = []

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
        unknown = sorted(name for name, value in options.items() if value is not None and name not in _HARMLESS)
        if unknown:
            raise self._refused(f"its attention takes {', '.join(unknown)}, which Baton's does not have")
        if isinstance(scale, torch.Tensor):
            raise self._refused("the scale of its attention is a tensor")
        lengths = q_1NTD.shape[2], k_1KTD.shape[2], v_1KTD.shape[2]
        if set(lengths) != {NUM_TOKENS} or q_1NTD.shape[0] != 1:
            raise self._refused(f"{NUM_TOKENS} tokens give {lengths} queries, keys and values")
        self.modules.append(module)
        self.calls.append(
            AttentionCall(
                num_heads=q_1NTD.shape[1],
                num_kv_heads=k_1KTD.shape[1],
                key_dim=k_1KTD.shape[3],
                value_dim=v_1KTD.shape[3],
                window=self._window(module, mask, options),
                softcap=float(options.get("softcap") or 0.0),
                has_sinks=options.get("s_aux") is not None,
            )
        )
        return q_1NTD.new_empty(1, NUM_TOKENS, q_1NTD.shape[1], v_1KTD.shape[3])

    def make_mask(
        self, *, mask_function: Any, device: torch.device, local_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Returns a stand-in for a causal mask, with a window of `local_size` or without."""
        if not _is_causal(mask_function, local_size):
            kind = "chunks" if local_size else "neither causal nor of a sliding window"
            raise self._refused(f"its attention mask is of another kind: {kind}")
        mask = torch.empty(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device=device)
        self._masks.append((mask, local_size))
        return mask

    def _window(self, module: torch.nn.Module, mask: torch.Tensor | None, options: Mapping[str, Any]) -> int | None:
        if mask is None:
            if not options.get("is_causal", getattr(module, "is_causal", True)):
                raise self._refused("its attention is not causal")
            window: int | None = options.get("sliding_window")
            return window
        for made, window in self._masks:
            if mask is made:
                return window
        raise self._refused("it makes an attention mask of its own, which may add a bias or hide other keys")

    def _refused(self, why: str) -> UnsupportedModel:
        return refused(self._name, why)


def refused(name: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} is not served: it is none of Baton's own architectures, and cannot run through transformers: {why}. "
        "Give --model another checkpoint",
        param="architectures",
    )


def trace(model: Any, name: str) -> tuple[Tracing, torch.Tensor]:
    """One forward pass of a model on the meta device: its calls, and the logits [1, R, V]. Raises UnsupportedModel."""
    tracing = Tracing(name)
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    rows = torch.zeros(3, dtype=torch.int64, device="meta")
    with _through(model, tracing), _MetaValues() as values, torch.inference_mode():
        try:
            logits = forward(model, ids, positions, rows)
        except UnsupportedModel:
            raise
        except Exception as error:
            message = str(error).strip().partition("\n")[0][:300]
            raise refused(name, f"its forward pass fails on packed rows ({type(error).__name__}: {message})") from error
    if values.mixing:
        raise refused(name, f"tokens reach one another outside of its attention ({values.mixing})")
    if not tracing.calls:
        raise refused(name, "its attention is its own code, which does not call the attention interface")
    return tracing, logits


def forward(model: Any, ids_1T: torch.Tensor, positions_1T: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """Logits [1, R, V] of a causal language model of transformers."""
    keeps = takes(model, "logits_to_keep")
    options = {"logits_to_keep": rows_R} if keeps else {}
    logits: torch.Tensor = model(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, **options).logits
    return logits if keeps else logits[:, rows_R]


def takes(model: Any, parameter: str) -> bool:
    return parameter in inspect.signature(model.forward).parameters


@contextmanager
def _through(model: Any, tracing: Tracing) -> Iterator[None]:
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    set_step(model, tracing, TRACED, "batched_mm")
    for config in configs:
        object.__setattr__(config, "baton_masks", tracing.make_mask)
    try:
        with patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None):
            yield
    finally:
        for config in configs:
            object.__delattr__(config, "baton_masks")
        for module in model.modules():  # what ropes keep of a pass
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and value.device.type == "meta":
                    delattr(module, name)
        set_step(model, None, SERVED, "eager")


def set_step(model: Any, step: AttentionStep | None, implementation: str, experts: str) -> None:
    """From now on each attention of the model calls `step`; `experts` is how transformers multiplies with experts."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation
            module.config._experts_implementation = experts
        object.__setattr__(module, "baton_step", step)


def _is_causal(mask_function: Any, window: int | None) -> bool:
    """Whether `mask_function` is causal attention, with this window: tried on queries around its edges."""
    zero = torch.tensor(0)
    for query in (0, 5, *((window - 1, window, 2 * window + 3) if window else (4000,))):
        keys = torch.arange(query + 3)
        try:
            seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).broadcast_to(keys.shape)
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return False
        if seen.device.type == "meta":
            return False
        expected = (keys <= query) & (keys > query - (window or query + 1))
        if not torch.equal(seen, expected):
            return False
    return True


class _MetaValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the few questions about numbers that forward passes ask: no expert is hit, nothing is true. `mixing`
    names an operation that joins neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixing = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "item") and args[0].device.type == "meta":
            return False if args[0].dtype == torch.bool else 0
        if name == "nonzero" and args[0].device.type == "meta":
            return torch.empty(0, args[0].dim(), dtype=torch.int64, device="meta")
        if name in ("convolution", "conv1d", "cumsum", "roll") and args[0].is_floating_point():
            self.mixing = self.mixing or name
        return func(*args, **(kwargs or {}))
