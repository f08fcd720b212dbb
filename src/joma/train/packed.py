"""Adam on CUDA in few launches: small parameters are packed into one tensor, and every pass is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joma.arguments import InputError
from joma.train.optimiser import EPSILON, Group, Optimiser, Updater, clipping_factors, per_seed, seed_rows

LARGE = 1 << 20  # a parameter with at least so many elements is updated in its own pass


class _Pack(NamedTuple):
    """The parameters of a group: the large ones, and the small ones whose elements are packed into one tensor."""

    large: list[str]
    small: list[str]
    moments: list[Tensor]
    owner: Tensor | None  # the seed that each packed element belongs to


class PackedAdam(Updater):
    """Adam or AdamW for a captured step: no value is read back, and small parameters share one pass.

    Attributes:
        halves: bfloat16 copies of large parameters, whose leading parts are the parameters. The model reads the copies
            alone, so they have the gradients; an update writes both.
    """

    def __init__(self, optimiser: Optimiser, model: nn.Module) -> None:
        super().__init__(optimiser, model)
        self.seeds = len(next(iter(self.parameters.values())))
        self.halves: dict[str, nn.Parameter] = {}
        self.open_gate = torch.ones((), dtype=torch.float64, device=self.groups[0].rate.device)
        self.gate = self.open_gate  # closed during trial steps, before one is captured
        self.packs = [self._pack(group.names) for group in self.groups]

    def _pack(self, names: list[str]) -> _Pack:
        """Split the names into large and small; the moments of the small ones become views of one tensor each."""
        small = [name for name in names if self.parameters[name].numel() < LARGE]
        large = [name for name in names if name not in small]
        if not small:
            return _Pack(large, [], [], None)
        moments = []
        for kind in ("exp_avg", "exp_avg_sq"):
            moments.append(torch.cat([self.moments[name][kind].flatten() for name in small]))
            for name, view in zip(small, self._unpack(moments[-1], small), strict=True):
                self.moments[name][kind] = view
        return _Pack(large, small, moments, torch.cat([_seed_numbers(self.parameters[name]) for name in small]).int())

    def half_copies(self, makers: Mapping[str, Callable[[Tensor], Tensor]]) -> Mapping[str, nn.Parameter]:
        """Make and return bfloat16 copies of the large float32 parameters that have a maker; updates write them too."""
        large = {name for pack in self.packs for name in pack.large}
        chosen = [name for name in makers if name in large and self.parameters[name].dtype == torch.float32]
        self.halves = {name: nn.Parameter(makers[name](self.parameters[name].detach())) for name in chosen}
        return self.halves

    def zero_grad(self) -> None:
        """Set all gradients to None, those of the copies too."""
        super().zero_grad()
        for copy in self.halves.values():
            copy.grad = None

    def _unpack(self, packed: Float[Tensor, " element"], names: list[str]) -> list[Tensor]:
        parameters = [self.parameters[name] for name in names]
        parts = packed.split([parameter.numel() for parameter in parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]

    @torch.no_grad()
    def update(self, step: Tensor, diverged: Bool[Tensor, " seed"] | None = None) -> None:
        """Update every seed except the diverged ones; no value is read back, so that the update can be captured."""
        if diverged is None:
            diverged = torch.zeros(self.seeds, dtype=torch.bool, device=step.device)
        factors = [group.factor(step) for group in self.groups]
        clipping = None
        if self.optimiser.clip is not None:
            gradients = [self._gradient_rows(pack) for pack in self.packs]
            clipping = clipping_factors(gradients, factors, self.optimiser.clip)
        t = (step if self.optimiser.restart is None else step % self.optimiser.restart) + 1
        for group, factor, pack in zip(self.groups, factors, self.packs, strict=True):
            coefficients = self._coefficients(group, factor, clipping, t)
            self._update_pack(pack, coefficients | {"diverged": diverged})

    def _coefficients(
        self, group: Group, factor: Tensor | None, clipping: Tensor | None, t: Tensor
    ) -> dict[str, Tensor]:
        rate = group.rate * self.open_gate if factor is None else group.rate * factor * self.open_gate
        compiled = torch.compile(_adam_coefficients)
        return compiled(
            *(rate, clipping, t, self.parameters[group.names[0]].dtype),
            betas=self.optimiser.betas,
            decay=self.optimiser.weight_decay,
            decoupled=self.optimiser.name == "adamw",
        )

    def _update_pack(self, pack: _Pack, coefficients: dict[str, Tensor]) -> None:
        for name, gradient in zip(pack.large, self._gradients(pack.large), strict=True):
            parameter, half = self.parameters[name].detach(), self.halves.get(name)
            tensors = [parameter, gradient, *self.moments[name].values()]
            tensors += [] if half is None else [leading_part(half.detach(), parameter)]
            if all(tensor.is_contiguous() for tensor in tensors):  # parameters of one size share a graph
                tensors = list(map(seed_rows, tensors))
            adam_update(*tensors[:4], half=None if half is None else tensors[4], **coefficients)
        if pack.small:
            parameters = [self.parameters[name].detach() for name in pack.small]
            packed, gradients = (
                torch.cat([tensor.flatten() for tensor in tensors])
                for tensors in (parameters, self._gradients(pack.small))
            )
            adam_update(packed, gradients, *pack.moments, owner=pack.owner, **coefficients)
            torch._foreach_copy_(parameters, self._unpack(packed, pack.small))  # pyright: ignore[reportPrivateImportUsage]

    def _gradients(self, names: list[str]) -> list[Tensor]:
        gradients = [self._gradient(name) for name in names]
        missing = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
        if missing:
            remedy = "use every parameter, or freeze it by `requires_grad_(False)`"
            raise InputError("loss", "a function of every parameter", f"no gradient of {missing}", remedy)
        return [gradient for gradient in gradients if gradient is not None]

    def _gradient(self, name: str) -> Tensor | None:
        """Return the gradient; in bfloat16 if the parameter has a copy, as the product that it came from."""
        gradient, half = self.parameters[name].grad, self.halves.get(name)
        if half is None:
            return gradient
        gradient = None if gradient is None else gradient.to(half.dtype)
        of_copy = None if half.grad is None else leading_part(half.grad, self.parameters[name])
        return of_copy if gradient is None else gradient if of_copy is None else gradient + of_copy

    def _gradient_rows(self, pack: _Pack) -> list[Float[Tensor, "seed ..."]]:
        """Return the gradients of the large parameters, and those of the small ones as one tensor, seed by seed."""
        rows = self._gradients(pack.large)
        if pack.small:
            rows.append(torch.cat([seed_rows(gradient) for gradient in self._gradients(pack.small)], dim=1))
        return rows


def leading_part(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the leading part of a tensor that has the shape of the parameter, as a view.

    >>> leading_part(torch.arange(12).view(3, 4), torch.zeros(2, 3))
    tensor([[0, 1, 2],
            [4, 5, 6]])
    """
    return tensor[tuple(map(slice, parameter.shape))]


def _seed_numbers(parameter: Tensor) -> Tensor:
    """Return the number of the seed that each element belongs to."""
    return torch.arange(len(parameter), device=parameter.device).repeat_interleave(parameter[0].numel())


def _adam_coefficients(
    rate: Tensor,
    clipping: Tensor | None,
    t: Tensor,
    dtype: torch.dtype,
    *,
    betas: Sequence[float],
    decay: float,
    decoupled: bool,
) -> dict[str, Tensor]:
    """Return the coefficients of `_update` that depend on optimiser, clipping and time, each [seed] or []."""
    correction_1, correction_2 = (1 - beta ** t.double() for beta in betas)
    unity = torch.ones_like(correction_1)
    beta_1, beta_2 = (beta * unity for beta in betas)
    values = {
        "beta_1": beta_1,
        "gain_1": 1 - beta_1,
        "beta_2": beta_2,
        "gain_2": 1 - beta_2,
        "rate": rate / correction_1,
        "root": correction_2.sqrt(),
        "clipping": unity if clipping is None else clipping,
        "decay": unity * (0.0 if decoupled else decay),
        "shrink": 1 - rate * decay if decoupled else unity,
        "continues": t > 1,
    }
    return {name: value.to(dtype) for name, value in values.items()}


def _update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    beta_1: Tensor,
    gain_1: Tensor,
    beta_2: Tensor,
    gain_2: Tensor,
    rate: Tensor,
    root: Tensor,
    clipping: Tensor,
    decay: Tensor,
    shrink: Tensor,
    continues: Tensor,
    diverged: Tensor,
    owner: Tensor | None = None,
    half: Tensor | None = None,
) -> None:
    """Make one update of Adam in place, in one pass over the memory once it is compiled.

        g ← s·g + λp,   m ← β₁m + (1−β₁)g,   v ← β₂v + (1−β₂)g²,   p ← κp − η m / (√v/r + ε)

    Args:
        p, g, m, v: parameter, gradient and the two moments.
        beta_1, gain_1, beta_2, gain_2: β₁, 1 − β₁, β₂, 1 − β₂.
        rate: η/(1−β₁ᵗ). root: r = √(1−β₂ᵗ). clipping: s. decay: λ, or 0 where it is decoupled.
        shrink: κ = 1 − ηλ where decay is decoupled, else 1. continues: 0 where the moments restart from zero, else 1.
        diverged: where nothing changes, whatever the gradient is.
        owner: the seed of each element, where parameters are packed and the coefficients are one for each seed.
        half: a copy of the parameter in half precision, which follows it.
    """
    rate, clipping, shrink, diverged = (
        per_seed(value, p) if owner is None else value[owner] if value.ndim else value
        for value in (rate, clipping, shrink, diverged)
    )
    gradient = clipping * g.to(p.dtype) + decay * p
    mean = beta_1 * continues * m + gain_1 * gradient
    square = beta_2 * continues * v + gain_2 * gradient * gradient
    p.copy_(torch.where(diverged, p, shrink * p - rate * mean / (square.sqrt() / root + EPSILON)))
    m.copy_(torch.where(diverged, m, mean))
    v.copy_(torch.where(diverged, v, square))
    if half is not None:
        half.copy_(p)


def adam_update(*tensors: Tensor, **coefficients: Tensor | None) -> None:
    """Apply `_update`, compiled: PyTorch's own fused kernel reaches two thirds of the card's bandwidth.

    Each size of large tensors (or packs) has its own graph, so that loads are as wide as possible; others share one.
    """
    torch.compile(_update, dynamic=tensors[0].numel() < LARGE)(*tensors, **coefficients)
