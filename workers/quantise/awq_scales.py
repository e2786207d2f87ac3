"""AWQ (https://arxiv.org/abs/2306.00978): inputs that are large get larger weights, and so a finer rounding; what
produces them is divided by as much, so that the layer computes the same and needs nothing at run time.

Both searches minimise the squared error of the layer's outputs on a sample of its inputs.
Legend: O outputs, I inputs, G groups, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from workers.weights.group_rounding import GroupRounding

_SAMPLE, _SAMPLE_OF_BATCH = 512, 64
_EXPONENTS = tuple(step / 20 for step in range(20))
_CLIPS = tuple(1 - step / 20 for step in range(10))  # of a group's largest magnitude

_PRODUCERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.v_proj",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
}
"""By the first projection of an input: the module of the same layer whose outputs that input is, or is scaled by."""


class InputSample:
    """Tokens of each batch, and the mean magnitude of each input over all tokens."""

    def __init__(self, num_inputs: int) -> None:
        self._sum_I = torch.zeros(num_inputs)
        self._num_tokens = 0
        self._rows: list[torch.Tensor] = []

    def add(self, x_TI: torch.Tensor) -> None:
        self._sum_I += x_TI.abs().sum(dim=0)
        self._num_tokens += x_TI.shape[0]
        self._rows.append(x_TI[:: max(1, x_TI.shape[0] // _SAMPLE_OF_BATCH)].clone())

    @property
    def magnitude_I(self) -> torch.Tensor:
        return self._sum_I / max(1, self._num_tokens)

    def rows(self) -> torch.Tensor:
        """[S, I]: evenly taken from all batches."""
        rows = torch.cat(self._rows)
        return rows[:: max(1, rows.shape[0] // _SAMPLE)][:_SAMPLE]

    def divide(self, scale_I: torch.Tensor) -> None:
        self._sum_I /= scale_I
        self._rows = [rows / scale_I for rows in self._rows]


RoundingOf = Callable[[str], GroupRounding]


def fold_scales(
    layer: str,
    tensors: Mapping[str, torch.Tensor],
    observed: Mapping[tuple[str, ...], InputSample],
    rounding_of: RoundingOf,
) -> None:
    """Scales weights of a layer in place. `tensors` has them by name; the linear weights of projections with the same
    input are observed."""
    for names, sample in observed.items():
        producer = _PRODUCERS.get(names[0].removeprefix(f"{layer}."))
        divided = [
            tensor
            for name in (f"{layer}.{producer}.weight", f"{layer}.{producer}.bias")
            if (tensor := tensors.get(name)) is not None
        ]
        if not divided or divided[0].shape[0] != sample.magnitude_I.shape[0]:
            continue  # several query heads share a value head: no scale of a head's own can be folded into it
        weights = {name: tensors[f"{name}.weight"] for name in names}
        scale_I = _best_scale(weights, sample, rounding_of)
        for weight in weights.values():
            weight.mul_(scale_I)
        for tensor in divided:
            tensor.div_(scale_I.unsqueeze(1) if tensor.dim() == 2 else scale_I)
        sample.divide(scale_I)


def _best_scale(weights: Mapping[str, torch.Tensor], sample: InputSample, rounding_of: RoundingOf) -> torch.Tensor:
    """[I]: powers of the inputs' magnitudes, times the opposite powers of the weights' magnitudes in their groups."""
    rows_SI = sample.rows()
    inputs_I = sample.magnitude_I.clamp(min=1e-5)
    relative = []
    for name, weight in weights.items():
        groups = torch.split(weight.abs(), rounding_of(name).group_size, dim=1)
        relative.append(torch.cat([group / group.amax(dim=1, keepdim=True).clamp(min=1e-9) for group in groups], 1))
    weights_I = torch.cat(relative).mean(dim=0).clamp(min=1e-4)
    best, least = torch.ones_like(inputs_I), float("inf")
    for exponent in _EXPONENTS:
        scale_I = inputs_I.pow(exponent) / weights_I.pow(1 - exponent) if exponent else torch.ones_like(inputs_I)
        scale_I = scale_I.clamp(min=1e-4)
        scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
        error = 0.0
        for name, weight in weights.items():
            difference = rounding_of(name).rounded(weight * scale_I).div_(scale_I).sub_(weight)
            error += float((rows_SI @ difference.T).square().sum())
        if error < least:
            best, least = scale_I, error
    return best


def clipped_scales(
    weight_OI: torch.Tensor, rows_SI: torch.Tensor, rounding: GroupRounding, dtype: torch.dtype
) -> torch.Tensor:
    """[O, G]: the scale of each group with the least error of its outputs, at most that of rounding to nearest."""
    whole_OG = rounding.scales(weight_OI, torch.float32)
    scales = []
    size = rounding.group_size
    groups = zip(torch.split(weight_OI, size, dim=1), torch.split(rows_SI, size, dim=1), strict=True)
    for group, (weight_OK, rows_SK) in enumerate(groups):
        moments_KK = rows_SK.T @ rows_SK
        best_O = least_O = None
        for clip in _CLIPS:
            scale_O = (whole_OG[:, group] * clip).to(dtype).float().unsqueeze(1)
            difference = rounding.levels(weight_OK, scale_O).mul_(scale_O).sub_(weight_OK)
            error_O = (difference @ moments_KK).mul_(difference).sum(dim=1)
            if best_O is None or least_O is None:
                best_O, least_O = scale_O.squeeze(1), error_O
            else:
                best_O = torch.where(error_O < least_O, scale_O.squeeze(1), best_O)
                least_O = torch.minimum(error_O, least_O)
        assert best_O is not None
        scales.append(best_O)
    return torch.stack(scales, dim=1).to(dtype)
