"""The update rules, from one table: many seeds in one pass, each with its own rate, clipping and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joma.arguments import InputError, choice, real, whole

OPTIMISERS: dict[str, str] = {
    "sgd": "p − η(g + λp)",
    "adam": "p − η m̂/(√v̂ + ε) with the moments of g + λp",
    "adamw": "p − ηλp − η m̂/(√v̂ + ε) with the moments of g",
}
FIRST, SECOND, EPSILON = 0.9, 0.999, 1e-8  # Adam's β₁, β₂, ε
LARGE = 1 << 20  # elements from which a parameter has passes of its own on CUDA
Schedule = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Optimiser:
    """A rule of `OPTIMISERS` with its rates: `Optimiser("sgd", 0.1, rates={"z": 0.3})` trains `z` thrice as fast.

    Attributes:
        name: sgd (no momentum, one step is Δt = 1 of gradient flow with η = rate), adam or adamw.
        rate: learning rate of every parameter that `rates` does not name; or one for each seed.
        rates: learning rates by parameter name.
        weight_decay: added to the gradient as weight_decay · parameter (sgd, adam), or decoupled from it (adamw).
        clip: largest norm of one seed's gradient, over all its parameters that are not held; None for no limit.
        restart: the rule starts afresh, its moments zero, every so many steps; None for never.
        schedules: factors of the rate by a pattern of parameter names (as of file names, the first that fits), each
            from the step, a tensor without axes, to a number or one for each seed. Where it is 0 a parameter is held.
    """

    name: str = "sgd"
    rate: float | Sequence[float] = 0.1
    rates: Mapping[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    clip: float | None = None
    restart: int | None = None
    schedules: Mapping[str, Schedule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("optimiser", self.name, OPTIMISERS)
        real("rate", self.rate, ndim=1 if isinstance(self.rate, Sequence) else 0, low=0.0)
        for rate in self.rates.values():
            real("rates", rate, ndim=0, low=0.0)
        real("weight_decay", self.weight_decay, ndim=0, low=0.0)
        if self.clip is not None:
            real("clip", self.clip, ndim=0, low=0.0)
        if self.restart is not None:
            whole("restart", self.restart)

    def build(self, model: nn.Module) -> Rule:
        """Return the rule of `model`'s trainable parameters, with moments of zero."""
        on_cuda = next(model.parameters()).is_cuda
        return PackedRule(self, model) if on_cuda and self.name != "sgd" else Rule(self, model)


class _Group(NamedTuple):
    """Parameters that share a rate."""

    rate: Float[Tensor, "*seed"]
    schedule: Schedule | None
    names: list[str]


class Rule:
    """An update rule at work on a model whose parameters have the seed as leading axis.

    >>> model = nn.Module()
    >>> model.p = nn.Parameter(torch.tensor([[1.0], [2.0]]))
    >>> model.p.grad = torch.tensor([[1.0], [1.0]])
    >>> Optimiser("sgd", (0.1, 0.5)).build(model).update(torch.tensor(0))
    >>> model.p.detach().flatten()
    tensor([0.9000, 1.5000])
    """

    def __init__(self, optimiser: Optimiser, model: nn.Module) -> None:
        self.optimiser = optimiser
        self.parameters = {name: own for name, own in model.named_parameters() if own.requires_grad}
        if not self.parameters:
            remedy = "let one train by `requires_grad_()`"
            raise InputError("model", "one with a parameter to train", "frozen parameters alone", remedy)
        for name in optimiser.rates:
            choice("rates", name, self.parameters)
        kinds = () if optimiser.name == "sgd" else ("exp_avg", "exp_avg_sq")
        self.moments = {name: {kind: torch.zeros_like(own) for kind in kinds} for name, own in self.parameters.items()}
        self.groups = list(self._grouped())

    def _grouped(self) -> Iterable[_Group]:
        names: dict[tuple[float | None, str | None], list[str]] = {}
        for name in self.parameters:
            pattern = next((one for one in self.optimiser.schedules if fnmatchcase(name, one)), None)
            names.setdefault((self.optimiser.rates.get(name), pattern), []).append(name)
        for pattern in self.optimiser.schedules:
            if not any(pattern == own for _, own in names):
                raise InputError("schedules", f"patterns of {', '.join(self.parameters)}", pattern, "name a parameter")
        for (own, pattern), members in names.items():
            first = self.parameters[members[0]]
            rate = torch.as_tensor(
                self.optimiser.rate if own is None else own, dtype=torch.float64, device=first.device
            )
            if rate.shape not in ((), first.shape[:1]):
                raise InputError("rate", f"one, or one for each of {len(first)} seeds", len(rate), "give one a seed")
            yield _Group(rate, None if pattern is None else self.optimiser.schedules[pattern], members)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for own in self.parameters.values():
            own.grad = None

    @torch.no_grad()
    def update(self, now: Tensor, lost: Bool[Tensor, " seed"] | None = None) -> None:
        """Update every seed but the lost ones, whom momenta and decay would move even without a gradient.

        Args:
            now: how many updates there were, a tensor without axes on the parameters' device.
            lost: the seeds to leave alone; None for none.
        """
        factors = [None if group.schedule is None else group.schedule(now) for group in self.groups]
        slopes = [[self.parameters[name].grad for name in group.names] for group in self.groups]
        scale = None if self.optimiser.clip is None else _scale(slopes, factors, self.optimiser.clip)
        passed = now if self.optimiser.restart is None else now % self.optimiser.restart
        for group, factor in zip(self.groups, factors, strict=True):
            rate = group.rate if factor is None else group.rate * factor
            names = [name for name in group.names if self.parameters[name].grad is not None]
            if self.optimiser.name == "sgd":
                self._descend(names, rate, scale, lost)
            else:
                self._adapt(names, rate, scale, passed + 1, lost)

    def _descend(self, names: list[str], rate: Tensor, scale: Tensor | None, lost: Tensor | None) -> None:
        for name in names:
            own, gradient = self._parts(name)
            slope = gradient if scale is None else gradient * _beside(scale, own)
            slope = slope + self.optimiser.weight_decay * own if self.optimiser.weight_decay else slope
            slope = slope if lost is None else slope.masked_fill(_beside(lost, own), 0.0)
            own.sub_(_beside(rate.to(own.dtype), own) * slope)

    def _adapt(self, names: list[str], rate: Tensor, scale: Tensor | None, t: Tensor, lost: Tensor | None) -> None:
        """Adam by torch's fused kernel, in one pass over all tensors; where seeds differ, over those of each."""
        if not names:
            return
        columns = [list(column) for column in zip(*map(self._parts, names), strict=True)]
        self._refresh(columns[2:], t)
        if scale is None and lost is None and not rate.ndim:
            self._fused(columns, rate, None, t)
            return
        seeds = range(len(columns[0][0]))
        for seed in seeds if lost is None else (~lost).nonzero().flatten().tolist():
            own = [[tensor[seed] for tensor in column] for column in columns]
            self._fused(own, rate if not rate.ndim else rate[seed], None if scale is None else scale[seed], t)

    def _parts(self, name: str) -> tuple[Tensor, ...]:
        own = self.parameters[name]
        assert own.grad is not None
        return own.detach(), own.grad, *self.moments[name].values()

    def _refresh(self, moments: list[list[Tensor]], t: Tensor) -> None:
        """Where the rule starts afresh, the moments are zero again."""
        if self.optimiser.restart is not None and int(t) == 1:
            for column in moments:
                torch._foreach_zero_(column)  # pyright: ignore[reportPrivateImportUsage]

    def _fused(self, columns: Sequence[list[Tensor]], rate: Tensor, scale: Tensor | None, t: Tensor) -> None:
        p, g, m, v = columns
        if scale is not None and p[0].dtype == torch.float64:  # the kernel knows scale and rate in float32 alone
            torch._foreach_mul_(g, scale)  # pyright: ignore[reportPrivateImportUsage]
            scale = None
        divisor = None if scale is None else scale.reciprocal().float()
        fused: Callable[..., None] = getattr(torch, f"_fused_{self.optimiser.name}_")
        fused(
            *(p, g, m, v, []),
            [t.float()] * len(p),
            lr=float(rate),
            beta1=FIRST,
            beta2=SECOND,
            weight_decay=self.optimiser.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )


class _Pack(NamedTuple):
    """A group on CUDA: large parameters, and small ones whose elements lie one after the other in one tensor."""

    large: list[str]
    small: list[str]
    moments: list[Tensor]
    owner: Tensor | None  # the seed that each packed element belongs to


class PackedRule(Rule):
    """Adam on CUDA, in few launches: small parameters are packed into one tensor, and every pass is compiled.

    Parameters may have `halves`, copies in bfloat16 for a model that reads nothing else of them: then these have the
    gradients, and an update writes both.
    """

    def __init__(self, optimiser: Optimiser, model: nn.Module) -> None:
        super().__init__(optimiser, model)
        self.seeds = len(next(iter(self.parameters.values())))
        self.halves: dict[str, nn.Parameter] = {}
        # While it is 0 the parameters stay as they are: steps on trial, before one is captured.
        self.gate = torch.ones((), dtype=torch.float64, device=self.groups[0].rate.device)
        self.packs = [self._packed(group.names) for group in self.groups]

    def _packed(self, names: list[str]) -> _Pack:
        """Split the names into large and small ones; the moments of the small ones become views of one tensor each."""
        small = [name for name in names if self.parameters[name].numel() < LARGE]
        large = [name for name in names if name not in small]
        if not small:
            return _Pack(large, [], [], None)
        moments = []
        for kind in ("exp_avg", "exp_avg_sq"):
            moments.append(torch.cat([self.moments[name][kind].flatten() for name in small]))
            for name, view in zip(small, self._unpacked(moments[-1], small), strict=True):
                self.moments[name][kind] = view
        return _Pack(large, small, moments, torch.cat([_seed_numbers(self.parameters[name]) for name in small]).int())

    def halve(self, names: Iterable[str]) -> Mapping[str, nn.Parameter]:
        """Give the large ones of these parameters, in float32, a copy in bfloat16 that follows them; return these."""
        large = {name for pack in self.packs for name in pack.large}
        chosen = [name for name in names if name in large and self.parameters[name].dtype == torch.float32]
        self.halves = {name: nn.Parameter(self.parameters[name].detach().bfloat16()) for name in chosen}
        return self.halves

    def zero_grad(self) -> None:
        """Forget the gradients."""
        super().zero_grad()
        for own in self.halves.values():
            own.grad = None

    def _unpacked(self, pack: Float[Tensor, " element"], names: list[str]) -> list[Tensor]:
        own = [self.parameters[name] for name in names]
        parts = pack.split([one.numel() for one in own])
        return [part.view(one.shape) for part, one in zip(parts, own, strict=True)]

    @torch.no_grad()
    def update(self, now: Tensor, lost: Bool[Tensor, " seed"] | None = None) -> None:
        """Update every seed but the lost ones; no value is looked at, so that the update can be captured."""
        lost = torch.zeros(self.seeds, dtype=torch.bool, device=now.device) if lost is None else lost
        factors = [None if group.schedule is None else group.schedule(now) for group in self.groups]
        scale = None
        if self.optimiser.clip is not None:
            scale = _scale([self._slopes(pack) for pack in self.packs], factors, self.optimiser.clip)
        t = (now if self.optimiser.restart is None else now % self.optimiser.restart) + 1
        options = {"decay": self.optimiser.weight_decay, "decoupled": self.optimiser.name == "adamw"}
        for group, factor, pack in zip(self.groups, factors, self.packs, strict=True):
            rate = group.rate * self.gate if factor is None else group.rate * factor * self.gate
            pace = torch.compile(_pace)(rate, scale, t, self.parameters[group.names[0]].dtype, **options)
            pace["lost"] = lost[:, None]
            for name, gradient in zip(pack.large, self._gradients(pack.large), strict=True):
                own, half = self.parameters[name].detach(), self.halves.get(name)
                parts = map(_rows, (own, gradient, *self.moments[name].values()))
                adam_update(*parts, half=None if half is None else _rows(half.detach()), **pace)
            if pack.small:
                together = [self.parameters[name].detach() for name in pack.small]
                p, g = (
                    torch.cat([one.flatten() for one in column]) for column in (together, self._gradients(pack.small))
                )
                adam_update(p, g, *pack.moments, owner=pack.owner, **pace)
                torch._foreach_copy_(together, self._unpacked(p, pack.small))  # pyright: ignore[reportPrivateImportUsage]

    def _gradients(self, names: list[str]) -> list[Tensor]:
        gradients = [self._gradient(name) for name in names]
        missing = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
        if missing:
            remedy = "use every parameter, or freeze it by `requires_grad_(False)`"
            raise InputError("loss", "one that reaches every parameter", f"no gradient of {missing}", remedy)
        return [gradient for gradient in gradients if gradient is not None]

    def _gradient(self, name: str) -> Tensor | None:
        """Return the gradient; where there is a half, in its precision, which is that of the product it came from."""
        own, half = self.parameters[name].grad, self.halves.get(name)
        if half is None:
            return own
        own = None if own is None else own.to(half.dtype)
        return half.grad if own is None else own if half.grad is None else own + half.grad

    def _slopes(self, pack: _Pack) -> list[Float[Tensor, "seed _"]]:
        """Return the gradients of the large parameters, and of the small ones as one tensor, seed by seed."""
        small = [torch.cat([_rows(own) for own in self._gradients(pack.small)], dim=1)] if pack.small else []
        return [_rows(own) for own in self._gradients(pack.large)] + small


def _seed_numbers(parameter: Tensor) -> Tensor:
    """Return the number of the seed that each element belongs to."""
    return torch.arange(len(parameter), device=parameter.device).repeat_interleave(parameter[0].numel())


def _pace(
    rate: Tensor, scale: Tensor | None, t: Tensor, dtype: torch.dtype, *, decay: float, decoupled: bool
) -> dict[str, Tensor]:
    """Return what `_update` needs to know of rate, clipping and time, beside parameters [seed, element]."""
    first, second = (1 - beta ** t.double() for beta in (FIRST, SECOND))
    one = torch.ones_like(first)
    values = {
        "rate": rate / first,
        "root": second.sqrt(),
        "scale": one if scale is None else scale,
        "decay": one * (0.0 if decoupled else decay),
        "shrink": 1 - rate * decay if decoupled else one,
        "kept": t > 1,
    }
    return {name: (value[:, None] if value.ndim else value).to(dtype) for name, value in values.items()}


def _scale(
    slopes: Sequence[Sequence[Tensor | None]], factors: Sequence[Tensor | None], limit: float
) -> Float[Tensor, " seed"]:
    """Return min(1, limit / (‖g_s‖ + 1e-6)), with the norm over all parameters of seed s that are not held."""
    squares = []
    for own, factor in zip(slopes, factors, strict=True):
        square = gradient_norms(own).square()
        squares.append(square if factor is None else square * (factor > 0))
    return (limit / (torch.stack(squares).sum(dim=0).sqrt() + 1e-6)).clamp(max=1.0)


def _update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    rate: Tensor,
    root: Tensor,
    scale: Tensor,
    decay: Tensor,
    shrink: Tensor,
    kept: Tensor,
    lost: Tensor,
    owner: Tensor | None = None,
    half: Tensor | None = None,
) -> None:
    """One update of Adam in place, in one pass over the memory once it is compiled.

        g ← s·g + λp,   m ← β₁m + (1−β₁)g,   v ← β₂v + (1−β₂)g²,   p ← κp − η m / (√v/r + ε)

    Args:
        p, g, m, v: parameter, gradient and the two moments.
        rate: η/(1−β₁ᵗ). root: r = √(1−β₂ᵗ). scale: s, of clipping. decay: λ, or 0 where it is decoupled.
        shrink: κ = 1 − ηλ where it is decoupled, else 1. kept: 0 where the moments start afresh, else 1.
        lost: where nothing changes, whatever the gradient is.
        owner: the seed of each element, where parameters are packed and these numbers are one for each seed.
        half: a copy of the parameter in half precision, which follows it.
    """
    if owner is not None:
        rate, scale, shrink, lost = (one[owner, 0] if one.ndim else one for one in (rate, scale, shrink, lost))
    slope = scale * g.to(p.dtype) + decay * p
    first = FIRST * kept * m + (1 - FIRST) * slope
    second = SECOND * kept * v + (1 - SECOND) * slope * slope
    p.copy_(torch.where(lost, p, shrink * p - rate * first / (second.sqrt() / root + EPSILON)))
    m.copy_(torch.where(lost, m, first))
    v.copy_(torch.where(lost, v, second))
    if half is not None:
        half.copy_(p)


def adam_update(*parts: Tensor, **pace: Tensor | None) -> None:
    """Apply `_update`, compiled: of the card's bandwidth torch's own fused kernel reaches two thirds.

    Large tensors, packs too, have a graph for each size, whose loads are then as wide as they can be; others share one.
    """
    torch.compile(_update, dynamic=parts[0].numel() < LARGE)(*parts, **pace)


def _rows(tensor: Tensor) -> Float[Tensor, "seed element"]:
    return tensor.reshape(len(tensor), -1)


def _beside(value: Tensor, p: Tensor) -> Tensor:
    """Return a number, or one for each seed, with the axes of `p`."""
    return value.view(-1, *(1,) * (p.ndim - 1)) if value.ndim else value


def gradient_norms(gradients: Iterable[Tensor | None]) -> Float[Tensor, " seed"]:
    """Return the norm of each seed's gradient over all the tensors, which have the seed as leading axis.

    >>> gradient_norms([torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2, 5)])
    tensor([5.0000, 0.5000])
    """
    there = [_rows(gradient) for gradient in gradients if gradient is not None]
    wide = torch.float64 if any(own.dtype == torch.float64 for own in there) else torch.float32
    norms = [torch.linalg.vector_norm(own, dim=1, dtype=wide) for own in there]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)
