"""The optimisers: they update many seeds in one pass, each with its own learning rate, clipping and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joma.arguments import InputError, choice, instance, real, scalar, whole

OPTIMISERS: dict[str, str] = {
    "sgd": "p − η(g + λp)",
    "adam": "p − η m̂/(√v̂ + ε) with the moments of g + λp",
    "adamw": "p − ηλp − η m̂/(√v̂ + ε) with the moments of g",
}
EPSILON = 1e-8  # of Adam
Schedule = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Optimiser:
    """An optimiser of `OPTIMISERS` with its learning rates, clipping and schedules.

    `Optimiser("sgd", 0.1, rates={"z": 0.3})` trains `z` three times as fast as the other parameters.

    Attributes:
        name: sgd (no momentum; one step is Δt = 1 of gradient flow with η = rate), adam or adamw.
        rate: learning rate of every parameter that `rates` does not name: one, or one for each seed.
        rates: learning rates by parameter name.
        weight_decay: added to the gradient as weight_decay · parameter (sgd, adam), or decoupled from it (adamw).
        clip: largest norm of one seed's gradient, over all its parameters that are not frozen; None for no limit.
        restart: number of steps after which Adam starts again, with zero moments and new bias correction; None: never.
        schedules: factors of the learning rate by a pattern of parameter names (as for file names; the first that
            matches counts). Each maps the step, a tensor without axes, to a number or one for each seed. A parameter
            whose factor is 0 is frozen.
        betas: decay rates of Adam's mean of the gradient and of its square, at least 0 and below 1.
    """

    name: str = "sgd"
    rate: float | Sequence[float] = 0.1
    rates: Mapping[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    clip: float | None = None
    restart: int | None = None
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    betas: Sequence[float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        choice("optimiser", self.name, OPTIMISERS)
        instance("rates", self.rates, Mapping, "give learning rates by parameter name")
        real("rate", self.rate, ndim=1 if isinstance(self.rate, Sequence) else 0, low=0.0)
        for rate in self.rates.values():
            scalar("rates", rate, low=0.0)
        scalar("weight_decay", self.weight_decay, low=0.0)
        if self.clip is not None:
            scalar("clip", self.clip, low=0.0)
        if self.restart is not None:
            whole("restart", self.restart)
        betas = real("betas", self.betas, ndim=1, low=0.0)
        if len(betas) != 2 or not (betas < 1).all():
            raise InputError("betas", "two numbers of at least 0 and below 1", self.betas, "such as (0.9, 0.999)")

    def build(self, model: nn.Module) -> Updater:
        """Return the updater of `model`'s trainable parameters, with zero moments."""
        if next(model.parameters()).is_cuda and self.name != "sgd":
            from joma.train.packed import PackedAdam

            return PackedAdam(self, model)
        return Updater(self, model)


class Group(NamedTuple):
    """Parameters that share a learning rate and a schedule."""

    rate: Float[Tensor, "*seed"]
    schedule: Schedule | None
    names: list[str]

    def factor(self, step: Tensor) -> Tensor | None:
        """Return the schedule's factor at this step; None if there is no schedule."""
        return None if self.schedule is None else self.schedule(step)


class Updater:
    """An optimiser at work on a model whose parameters have the seed as leading axis.

    Attributes:
        parameters: the trainable parameters, by name.
        moments: Adam's moments `exp_avg` and `exp_avg_sq` of each parameter; empty for SGD.
        gate: a factor of every update; while it is 0, the parameters do not change. None if the updater has no gate.

    >>> model = nn.Module()
    >>> model.p = nn.Parameter(torch.tensor([[1.0], [2.0]]))
    >>> model.p.grad = torch.tensor([[1.0], [1.0]])
    >>> Optimiser("sgd", (0.1, 0.5)).build(model).update(torch.tensor(0))
    >>> model.p.detach().flatten()
    tensor([0.9000, 1.5000])
    """

    gate: Tensor | None = None

    def __init__(self, optimiser: Optimiser, model: nn.Module) -> None:
        self.optimiser = optimiser
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self.parameters:
            remedy = "call `requires_grad_()` on at least one"
            raise InputError("model", "a module with trainable parameters", "only frozen parameters", remedy)
        for name in optimiser.rates:
            choice("rates", name, self.parameters)
        kinds = () if optimiser.name == "sgd" else ("exp_avg", "exp_avg_sq")
        self.moments = {
            name: {kind: torch.zeros_like(parameter) for kind in kinds} for name, parameter in self.parameters.items()
        }
        self.groups = list(self._groups())

    def _groups(self) -> Iterable[Group]:
        """Group the parameters by learning rate and schedule."""
        members: dict[tuple[float | None, str | None], list[str]] = {}
        for name in self.parameters:
            pattern = next((pattern for pattern in self.optimiser.schedules if fnmatchcase(name, pattern)), None)
            members.setdefault((self.optimiser.rates.get(name), pattern), []).append(name)
        used = {pattern for _, pattern in members}
        for pattern in self.optimiser.schedules:
            if pattern not in used:
                expected = f"patterns that match one of {', '.join(self.parameters)}"
                raise InputError("schedules", expected, repr(pattern), "correct the pattern or remove it")
        for (named_rate, pattern), names in members.items():
            first = self.parameters[names[0]]
            rate = torch.as_tensor(
                self.optimiser.rate if named_rate is None else named_rate, dtype=torch.float64, device=first.device
            )
            if rate.shape not in ((), first.shape[:1]):
                expected = f"one learning rate, or one for each of {len(first)} seeds"
                raise InputError("rate", expected, len(rate), "give one for each seed")
            yield Group(rate, None if pattern is None else self.optimiser.schedules[pattern], names)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def half_copies(self, makers: Mapping[str, Callable[[Tensor], Tensor]]) -> Mapping[str, nn.Parameter]:
        """Return copies in bfloat16 that follow large parameters, by name; only `PackedAdam` makes any.

        Args:
            makers: functions that make the copies, by name, as of `joma.train.ProductWeight`.
        """
        del makers
        return {}

    @torch.no_grad()
    def update(self, step: Tensor, diverged: Bool[Tensor, " seed"] | None = None) -> None:
        """Update every seed except the diverged ones, which momentum and weight decay would still move.

        Args:
            step: the number of updates made so far, a tensor without axes on the parameters' device.
            diverged: the seeds to leave alone; None for none.
        """
        factors = [group.factor(step) for group in self.groups]
        gradients = [[self.parameters[name].grad for name in group.names] for group in self.groups]
        clipping = None
        if self.optimiser.clip is not None:
            clipping = clipping_factors(gradients, factors, self.optimiser.clip)
        since_restart = step if self.optimiser.restart is None else step % self.optimiser.restart
        for group, factor in zip(self.groups, factors, strict=True):
            rate = group.rate if factor is None else group.rate * factor
            names = [name for name in group.names if self.parameters[name].grad is not None]
            if self.optimiser.name == "sgd":
                self._sgd(names, rate, clipping, diverged)
            else:
                self._adam(names, rate, clipping, since_restart + 1, diverged)

    def _sgd(self, names: list[str], rate: Tensor, clipping: Tensor | None, diverged: Tensor | None) -> None:
        decay = self.optimiser.weight_decay
        for name in names:
            parameter, gradient = self._tensors(name)
            gradient = gradient if clipping is None else gradient * per_seed(clipping, parameter)
            gradient = gradient + decay * parameter if decay else gradient
            gradient = gradient if diverged is None else gradient.masked_fill(per_seed(diverged, parameter), 0.0)
            parameter.sub_(per_seed(rate.to(parameter.dtype), parameter) * gradient)

    def _adam(
        self, names: list[str], rate: Tensor, clipping: Tensor | None, t: Tensor, diverged: Tensor | None
    ) -> None:
        """Update by PyTorch's fused Adam kernel: all tensors in one pass, or seed by seed where seeds differ."""
        if not names:
            return
        # Lists of all parameters, all gradients, all first moments and all second moments.
        columns = [list(column) for column in zip(*map(self._tensors, names), strict=True)]
        self._restart(columns[2:], t)
        if clipping is None and diverged is None and not rate.ndim:
            self._fused_adam(columns, rate, None, t)
            return
        seeds = range(len(columns[0][0]))
        for seed in seeds if diverged is None else (~diverged).nonzero().flatten().tolist():
            of_seed = [[tensor[seed] for tensor in column] for column in columns]
            factor = None if clipping is None else clipping[seed]
            self._fused_adam(of_seed, rate if not rate.ndim else rate[seed], factor, t)

    def _tensors(self, name: str) -> tuple[Tensor, ...]:
        """Return a parameter, its gradient and its moments."""
        parameter = self.parameters[name]
        assert parameter.grad is not None
        return parameter.detach(), parameter.grad, *self.moments[name].values()

    def _restart(self, moments: list[list[Tensor]], t: Tensor) -> None:
        """Set the moments to zero if Adam starts again at this step."""
        if self.optimiser.restart is not None and int(t) == 1:
            for column in moments:
                torch._foreach_zero_(column)  # pyright: ignore[reportPrivateImportUsage]

    def _fused_adam(self, columns: Sequence[list[Tensor]], rate: Tensor, clipping: Tensor | None, t: Tensor) -> None:
        parameters, gradients, means, squares = columns
        if clipping is not None and parameters[0].dtype == torch.float64:  # the kernel takes a float32 scale only
            torch._foreach_mul_(gradients, clipping)  # pyright: ignore[reportPrivateImportUsage]
            clipping = None
        divisor = None if clipping is None else clipping.reciprocal().float()
        beta_1, beta_2 = self.optimiser.betas
        fused: Callable[..., None] = getattr(torch, f"_fused_{self.optimiser.name}_")
        fused(
            *(parameters, gradients, means, squares, []),
            [t.float()] * len(parameters),
            lr=float(rate),
            beta1=float(beta_1),
            beta2=float(beta_2),
            weight_decay=self.optimiser.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )


def clipping_factors(
    gradients: Sequence[Sequence[Tensor | None]], schedule_factors: Sequence[Tensor | None], limit: float
) -> Float[Tensor, " seed"]:
    """Return min(1, limit / (‖g_s‖ + 1e-6)), with the norm over all parameters of seed s that are not frozen."""
    squares = []
    for of_group, factor in zip(gradients, schedule_factors, strict=True):
        square = gradient_norms(of_group).square()
        squares.append(square if factor is None else square * (factor > 0))
    return (limit / (torch.stack(squares).sum(dim=0).sqrt() + 1e-6)).clamp(max=1.0)


def seed_rows(tensor: Tensor) -> Float[Tensor, "seed element"]:
    """Flatten all axes but the seed's."""
    return tensor.reshape(len(tensor), -1)


def per_seed(value: Tensor, parameter: Tensor) -> Tensor:
    """Reshape a number, or one for each seed, so that it broadcasts with the parameter."""
    return value.view(-1, *(1,) * (parameter.ndim - 1)) if value.ndim else value


def gradient_norms(gradients: Iterable[Tensor | None]) -> Float[Tensor, " seed"]:
    """Return the norm of each seed's gradient over all the tensors, which have the seed as leading axis.

    >>> gradient_norms([torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2, 5)])
    tensor([5.0000, 0.5000])
    """
    # A part of a larger tensor is not flattened, which would copy it.
    rows = [
        gradient if gradient.ndim > 1 and not gradient.is_contiguous() else seed_rows(gradient)
        for gradient in gradients
        if gradient is not None
    ]
    dtype = torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32
    norms = [torch.linalg.vector_norm(row, dim=tuple(range(1, row.ndim)), dtype=dtype) for row in rows]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)
