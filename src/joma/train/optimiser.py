"""The update rules, from one table, and gradient clipping seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from joma.arguments import choice, real

OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Optimiser:
    """A rule of `OPTIMISERS` with its rates: `Optimiser("sgd", 0.1, rates={"z": 0.3})` trains `z` thrice as fast.

    Attributes:
        name: sgd (no momentum, one step is Δt = 1 of gradient flow with η = rate), adam or adamw.
        rate: learning rate of every parameter that `rates` does not name.
        rates: learning rates by parameter name.
        weight_decay: added to the gradient as weight_decay · parameter (sgd, adam), or decoupled from it (adamw).
        clip: largest norm of one seed's gradient, over all its parameters; None for no limit.
    """

    name: str = "sgd"
    rate: float = 0.1
    rates: Mapping[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        choice("optimiser", self.name, OPTIMISERS)
        for rate in (self.rate, *self.rates.values()):
            real("rate", rate, ndim=0, low=0.0)
        real("weight_decay", self.weight_decay, ndim=0, low=0.0)
        if self.clip is not None:
            real("clip", self.clip, ndim=0, low=0.0)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the torch optimiser of `model`'s trainable parameters; on CUDA, one that a graph can capture.

        >>> model = nn.Linear(2, 1)
        >>> [group["lr"] for group in Optimiser("adam", 0.1, rates={"bias": 0.3}).build(model).param_groups]
        [0.1, 0.3]
        """
        parameters = {name: own for name, own in model.named_parameters() if own.requires_grad}
        for name in self.rates:
            choice("rates", name, parameters)
        groups = [{"params": [own], "lr": self.rates.get(name, self.rate)} for name, own in parameters.items()]
        options = {"fused": True}  # one pass over the parameters
        if self.name != "sgd" and any(own.is_cuda for own in parameters.values()):
            options["capturable"] = True
        return OPTIMISERS[self.name](groups, weight_decay=self.weight_decay, **options)  # pyright: ignore[reportCallIssue]


def adam_update(
    p: Float[Tensor, " element"],
    g: Float[Tensor, " element"],
    m: Float[Tensor, " element"],
    v: Float[Tensor, " element"],
    *,
    step: Float[Tensor, ""],
    rate: float,
    decay: float,
    decoupled: bool,
) -> None:
    """One update of Adam in place; compiled, it is one pass at full bandwidth, of which torch's fused kernel uses 2/3.

        g ← g + λp (or p ← p − ηλp, decoupled),   m ← β₁m + (1−β₁)g,   v ← β₂v + (1−β₂)g²
        p ← p − η/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε),    β₁ = 0.9, β₂ = 0.999, ε = 1e-8

    >>> p, m, v = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
    >>> adam_update(p, torch.tensor([2.0]), m, v, step=torch.tensor(1.0), rate=0.1, decay=0.0, decoupled=False)
    >>> p, m
    (tensor([0.9000]), tensor([0.2000]))
    """
    slope = g if decoupled else g + decay * p
    shrunk = p * (1 - rate * decay) if decoupled else p
    m.copy_(0.9 * m + 0.1 * slope)
    v.copy_(0.999 * v + 0.001 * slope * slope)
    spread = v.sqrt() / (1 - 0.999**step).sqrt() + 1e-8
    p.copy_(shrunk - rate / (1 - 0.9**step) * m / spread)


def captured_update(rule: torch.optim.Optimizer) -> None:
    """Apply the rule inside a step that is captured on CUDA: Adam by a compiled `adam_update`, others as they are."""
    if not isinstance(rule, (torch.optim.Adam, torch.optim.AdamW)):
        rule.step()
        return
    decoupled = isinstance(rule, torch.optim.AdamW)
    update = torch.compile(adam_update, dynamic=True)
    with torch.no_grad():
        steps = [state["step"] for state in rule.state.values()]
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]  (one launch for all)
        for group in rule.param_groups:
            for own in group["params"]:
                state = rule.state[own]
                flat = (part.reshape(-1) for part in (own, own.grad, state["exp_avg"], state["exp_avg_sq"]))
                options = {"rate": group["lr"], "decay": group["weight_decay"], "decoupled": decoupled}
                update(*flat, step=state["step"], **options)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Float[Tensor, " seed"]:
    """Scale every seed's gradient down to a norm of at most `limit`, in place; return the norms before.

        g_s ← g_s · min(1, limit / (‖g_s‖ + 1e-6)),    ‖g_s‖ over all parameters of seed s

    >>> p = nn.Parameter(torch.zeros(2, 2))
    >>> p.grad = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_gradients([p], 1.0)
    tensor([5.0000, 0.5000])
    >>> p.grad
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    gradients = [own.grad for own in parameters if own.grad is not None]
    squares = torch.stack([gradient.reshape(len(gradient), -1).square().sum(dim=1) for gradient in gradients])
    norm = squares.sum(dim=0).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *(1,) * (gradient.ndim - 1)))
    return norm
