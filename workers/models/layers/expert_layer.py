"""A mixture of experts as the feed-forward half of a layer: a router, the experts that it chooses, a shared expert.

    y = sum over a token's slots, in their order, of weight * down(silu(gate(x)) * up(x)), + the shared expert's output

The sum is float32 and its order is fixed, so that a token's bits do not depend on the others of its batch. Ranks share
each expert's columns, or, with `expert_parallel`, have whole experts; either way one all-reduce adds up their parts.

Legend: T tokens, E hidden size, X experts, S slots: the experts of a token; I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.adapters.linear import AdaptableLinear
from workers.kernels.cpu.experts import ExpertProducts, PackedExperts, RouterRule, RouterScores
from workers.kernels.cpu.products import PackedProduct, can_pack
from workers.kernels.device_kernels import ExpertsSum, ExpertWeight
from workers.models.families.experts_config import ClampedGate, ExpertNames, ExpertsConfig
from workers.models.layers.layer_parts import FeedForward
from workers.models.layers.linear_layers import ColumnParallel
from workers.models.layers.mlp import MLP
from workers.models.layers.routing import route
from workers.models.model_config import ModelConfig
from workers.weights.encoding import LayerContext, Matrix, Projection, WeightShare
from workers.weights.formats.float_matrix import FloatMatrix
from workers.weights.formats.quantised_matrix import QuantisedMatrix
from workers.weights.slots import Slot

_SCORES = {
    "softmax": RouterScores.SOFTMAX,
    "sigmoid": RouterScores.SIGMOID,
    "softmax-of-chosen": RouterScores.SOFTMAX_OF_CHOSEN,
}


def feed_forward(context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> FeedForward:
    """Experts in the layers that have them, an MLP in the others. `prefix` is the layer's."""
    experts = config.experts
    if experts is None or not experts.sparse[layer]:
        return MLP(context, f"{prefix}.mlp", config)
    return MixtureOfExperts(context, f"{prefix}.{experts.names.module}", experts, config.hidden_size)


class MixtureOfExperts:
    def __init__(self, context: LayerContext, prefix: str, experts: ExpertsConfig, hidden_size: int) -> None:
        names, rank, size = experts.names, context.parallel.rank, context.parallel.size
        self._config = experts
        self.counts_X = torch.zeros(experts.num_experts, dtype=torch.int64)  # tokens of each expert so far
        self._parallel = context.parallel
        self._router = _Router(context, prefix, experts, hidden_size)
        share = (1, 0) if context.expert_parallel else (size, rank)
        self._experts = {
            expert: ExpertShare(context, f"{prefix}.experts.{expert}", experts, hidden_size, *share)
            for expert in range(experts.num_experts)
            if not context.expert_parallel or expert % size == rank
        }
        self._shared: ExpertShare | None = None
        if experts.shared_width:
            self._shared = ExpertShare(
                context, f"{prefix}.{names.shared}", experts, hidden_size, size, rank, shared=True
            )
        self._packed: PackedExperts | None = None
        self._kernels = context.kernels
        self._grouped: ExpertsSum | None = None

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._parallel.all_reduce(self._packed(x_TE))
        logits_TX, shared_T1 = self._router(x_TE)
        chosen_TS, weights_TS = route(logits_TX, self._config.routing, self._router.correction_X)
        sum_TE = self._sum(x_TE, chosen_TS, weights_TS)
        if self._shared is not None:
            shared_TE = self._shared(x_TE).float()
            sum_TE += shared_TE if shared_T1 is None else shared_T1.sigmoid() * shared_TE
        return self._parallel.all_reduce(sum_TE.to(x_TE.dtype))

    def _sum(self, x_TE: torch.Tensor, chosen_TS: torch.Tensor, weights_TS: torch.Tensor) -> torch.Tensor:
        if self._grouped is None:
            self._grouped = self._group()
        if self._grouped is not None:
            return self._grouped(x_TE, chosen_TS, weights_TS)
        sum_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        y_TSE = self._outputs(x_TE, chosen_TS)
        for slot in range(chosen_TS.shape[1]):
            sum_TE += weights_TS[:, slot : slot + 1] * y_TSE[:, slot]
        return sum_TE

    def _group(self) -> ExpertsSum | None:
        found = {index: weights for index, each in self._experts.items() if (weights := each.device_weights())}
        if not found or len(found) < len(self._experts):
            return None
        first = next(iter(self._experts.values()))
        biases = {index: each.biases for index, each in self._experts.items()} if self._config.biased else None
        return self._kernels.grouped_experts(
            {index: gate_up for index, (gate_up, _) in found.items()},
            {index: down for index, (_, down) in found.items()},
            first.gate,
            num_experts=self._config.num_experts,
            gate_up_biases=None if biases is None else {index: gate_up for index, (gate_up, _) in biases.items()},
            down_biases=None if biases is None else {index: down for index, (_, down) in biases.items()},
        )

    @property
    def waits(self) -> bool:
        """Whether the host chooses experts once weights are packed: without a product of all experts."""
        return self._packed is None and self._grouped is None

    def _outputs(self, x_TE: torch.Tensor, chosen_TS: torch.Tensor) -> torch.Tensor:
        """[T, S, E]: the output of each slot's expert, 0 for an expert of another rank."""
        y_TSE = x_TE.new_zeros(*chosen_TS.shape, x_TE.shape[1])
        self.counts_X += torch.bincount(chosen_TS.flatten().cpu(), minlength=len(self.counts_X))
        for expert in torch.unique(chosen_TS).tolist():
            if expert in self._experts:
                tokens, slots = (chosen_TS == expert).nonzero(as_tuple=True)
                y_TSE[tokens, slots] = self._experts[expert](x_TE[tokens])
        return y_TSE

    def packed_products(self) -> tuple[PackedProduct, None] | None:
        """One product for all experts: this rank's part of the sum."""
        return None if self._packed is None else (PackedProduct(weight=self._packed), None)

    def linears(self) -> Iterator[AdaptableLinear]:
        """None: compiled code computes all experts of a step at once."""
        yield from ()

    def pack(self) -> None:
        """Where compiled code takes the experts' weights, it takes the router, too."""
        for expert in (*self._experts.values(), *((self._shared,) if self._shared else ())):
            expert.pack()
        products = {index: expert.products() for index, expert in self._experts.items()}
        found = {index: each for index, each in products.items() if each is not None}
        shared = self._shared.products() if self._shared else None
        if len(found) == len(products) and (shared is None) == (self._shared is None) and self._router.can_pack():
            config = self._config
            self._packed = PackedExperts(
                self._router.weight_RE,
                self._router.rule(),
                found,
                width=next(iter(self._experts.values())).width if self._experts else config.width,
                shared=shared,
                shared_width=self._shared.width if self._shared else 0,
                clamped=(config.clamped.alpha, config.clamped.limit) if config.clamped else None,
                counts_X=self.counts_X,
            )
            self._router.release()
        else:
            self._grouped = self._group()

    def slots(self) -> Iterator[Slot]:
        yield from self._router.slots()
        for expert in self._experts.values():
            yield from expert.slots()
        if self._shared is not None:
            yield from self._shared.slots()


class _Router:
    """Logits in float32, of every expert on every rank. The last row of the weight is the shared expert's gate."""

    def __init__(self, context: LayerContext, prefix: str, experts: ExpertsConfig, hidden_size: int) -> None:
        self._name, self._shared_name = f"{prefix}.{experts.names.router}", f"{prefix}.{experts.names.shared_gate}"
        self._correction_name = f"{prefix}.{experts.names.correction}"
        self._routing = experts.routing
        self._num_experts = experts.num_experts
        self.weight_RE = context.empty(experts.num_experts + experts.shared_gated, hidden_size)

        def numbers() -> torch.Tensor:
            return torch.empty(experts.num_experts, dtype=torch.float32, device=context.device)

        self.bias_X = numbers() if experts.routing.biased else None
        self.correction_X = numbers() if experts.routing.corrected else None

    def __call__(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits [T, X], logits of the shared expert's gate [T, 1]), float32."""
        logits_TR = x_TE.float() @ self.weight_RE.float().T
        logits_TX = logits_TR[:, : self._num_experts]
        if self.bias_X is not None:
            logits_TX = logits_TX + self.bias_X
        shared_gated = logits_TR.shape[1] > self._num_experts
        return logits_TX, logits_TR[:, self._num_experts :] if shared_gated else None

    def can_pack(self) -> bool:
        return can_pack(self.weight_RE)

    def rule(self) -> RouterRule:
        by = self._routing
        return RouterRule(
            num_experts=by.num_experts,
            num_chosen=by.num_chosen,
            scores=_SCORES[by.scoring],
            renormalised=by.renormalised,
            epsilon=by.epsilon,
            factor=by.factor,
            num_groups=by.num_groups,
            num_chosen_groups=by.num_chosen_groups,
            by_two=by.group_score == "top-2",
            bias_X=self.bias_X,
            correction_X=self.correction_X,
        )

    def release(self) -> None:
        """Frees the weight, which is packed."""
        self.weight_RE = torch.empty_like(self.weight_RE[:0])

    def slots(self) -> Iterator[Slot]:
        weight_XE, shared_1E = self.weight_RE[: self._num_experts], self.weight_RE[self._num_experts :]
        yield Slot(name=f"{self._name}.weight", shape=tuple(weight_XE.shape), target=weight_XE)
        if len(shared_1E):
            yield Slot(name=f"{self._shared_name}.weight", shape=tuple(shared_1E.shape), target=shared_1E)
        if self.bias_X is not None:
            yield Slot(name=f"{self._name}.bias", shape=tuple(self.bias_X.shape), target=self.bias_X)
        if self.correction_X is not None:
            shape = tuple(self.correction_X.shape)
            yield Slot(name=self._correction_name, shape=shape, target=self.correction_X)


class ExpertShare:
    """One rank's columns of down(silu(gate(x)) * up(x)): a partial sum if there are several ranks."""

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        experts: ExpertsConfig,
        hidden_size: int,
        num_shares: int,
        share: int,
        *,
        shared: bool = False,
    ) -> None:
        names = ExpertNames() if shared else experts.names
        total = experts.shared_width if shared else experts.width
        self.width = width = total // num_shares
        self._clamped = None if shared else experts.clamped
        self._kernels = context.kernels
        self._gate_up = ColumnParallel(
            context,
            [
                Projection(name=f"{prefix}.{name}", total=total, start=share * width, size=width)
                for name in (names.gate, names.up)
            ],
            hidden_size,
            bias=experts.biased and not shared,
            gated=self._clamped is None,
        )
        down = Projection(name=f"{prefix}.{names.down}", total=hidden_size, start=0, size=hidden_size)
        self._down = context.matrix(
            WeightShare(projections=(down,), total_inputs=total, first_input=share * width, num_inputs=width)
        )
        self._down_bias_E = context.empty(hidden_size) if experts.biased and not shared else None
        self._down_name, self._adds_bias = down.name, share == 0  # the first partial sum has the bias

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        inner_TI = self._gate_up(x_TE)
        if self._clamped is not None:
            inner_TI = clamped_gate(inner_TI, self._clamped)
        return self._down(inner_TI, self._added_bias_E)

    @property
    def _added_bias_E(self) -> torch.Tensor | None:
        return self._down_bias_E if self._adds_bias else None

    def gate(self, wide_TI2: torch.Tensor) -> torch.Tensor:
        """[T, I] of gate and up [T, 2 I]."""
        return self._kernels.silu_mul(wide_TI2) if self._clamped is None else clamped_gate(wide_TI2, self._clamped)

    def device_weights(self) -> tuple[ExpertWeight, ExpertWeight] | None:
        """The weights of gate and up, and of down, in the form of the device's product of all experts."""
        gate_up, down = _device_weight(self._gate_up.matrix), _device_weight(self._down)
        return None if gate_up is None or down is None else (gate_up, down)

    @property
    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The biases of gate and up, and of down: zeros if another share adds the latter."""
        assert self._gate_up.bias_O is not None
        assert self._down_bias_E is not None
        down_E = self._down_bias_E if self._adds_bias else torch.zeros_like(self._down_bias_E)
        return self._gate_up.bias_O, down_E

    def products(self) -> ExpertProducts | None:
        gate_up, down = self._gate_up.packed_product(), self._down.packed_weight
        if gate_up is None or down is None:
            return None
        return ExpertProducts(gate_up=gate_up, down=PackedProduct(weight=down, bias_O=self._added_bias_E))

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def slots(self) -> Iterator[Slot]:
        yield from self._gate_up.slots()
        yield from self._down.slots()
        if self._down_bias_E is not None:
            name, shape = f"{self._down_name}.bias", tuple(self._down_bias_E.shape)
            yield Slot(name=name, shape=shape, target=self._down_bias_E)


def _device_weight(matrix: Matrix) -> ExpertWeight | None:
    """Floats that are not packed; once packed, a quantised weight that the device has a kernel for."""
    if isinstance(matrix, FloatMatrix):
        return None if matrix.packed else matrix.weight_OI
    return matrix.device_product if isinstance(matrix, QuantisedMatrix) else None


def clamped_gate(gate_up_TI2: torch.Tensor, by: ClampedGate) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), of clamped gate and up: [T, I] of [T, 2 I], the gate's half first."""
    gate_TI, up_TI = gate_up_TI2.float().chunk(2, dim=1)
    gate_TI, up_TI = gate_TI.clamp(max=by.limit), up_TI.clamp(-by.limit, by.limit)
    return ((up_TI + 1) * gate_TI * torch.sigmoid(by.alpha * gate_TI)).to(gate_up_TI2.dtype)
