"""The training loop: many seeds are one model with the seed as the leading axis of every parameter.

The seeds' losses are added and propagated back at once. No parameter is shared, so each seed's gradient is its own, and
a seed trains as it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from joma.arguments import InputError, choice, real, whole
from joma.progress import SILENT, Progress

Model = TypeVar("Model", bound=nn.Module)

OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
NEVER = -1  # the step at which a seed that stayed finite diverged


@dataclass(frozen=True)
class Optimiser:
    """A rule of `OPTIMISERS` with its rates: `Optimiser("sgd", 0.1, rates={"z": 0.3})` trains `z` thrice as fast.

    Attributes:
        name: sgd (no momentum, one step is Δt = 1 of gradient flow with η = rate) or adam.
        rate: learning rate of every parameter that `rates` does not name.
        rates: learning rates by parameter name.
        weight_decay: added to the gradient as weight_decay · parameter, in both rules.
    """

    name: str = "sgd"
    rate: float = 0.1
    rates: Mapping[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        choice("optimiser", self.name, OPTIMISERS)
        for rate in (self.rate, *self.rates.values()):
            real("rate", rate, ndim=0, low=0.0)
        real("weight_decay", self.weight_decay, ndim=0, low=0.0)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the torch optimiser of `model`'s parameters.

        >>> model = nn.Linear(2, 1)
        >>> [group["lr"] for group in Optimiser("adam", 0.1, rates={"bias": 0.3}).build(model).param_groups]
        [0.1, 0.3]
        """
        parameters = dict(model.named_parameters())
        for name in self.rates:
            choice("rates", name, parameters)
        groups = [{"params": [own], "lr": self.rates.get(name, self.rate)} for name, own in parameters.items()]
        return OPTIMISERS[self.name](groups, weight_decay=self.weight_decay)  # pyright: ignore[reportCallIssue]


def _nothing(model: nn.Module, step: int) -> dict[str, Tensor]:  # noqa: ARG001  (the signature of `record`)
    return {}


def fit(
    model: Model,
    loss: Callable[[Model, int], Tensor],
    *,
    optimiser: Optimiser,
    steps: int,
    record: Callable[[Model, int], Mapping[str, Tensor]] = _nothing,
    at: Iterable[int] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    seeds: Sequence[int] | None = None,
    progress: Progress = SILENT,
    label: str = "training",
) -> xr.Dataset:
    """Train every seed of `model` for `steps` steps and return what was recorded on the way.

        θ_s ← θ_s − rule(∂L_s/∂θ_s),    L_s = loss(model, step)[s]

    At step n the model has been updated n times. `record` is called between the backward pass and the update, so that
    it sees the parameters *and* the gradients of that step; at the last step there is no update any more.

    A seed whose loss is not finite is frozen where it is, and NaN is recorded for it from that step on; the others go
    on undisturbed.

    Args:
        model: the seed is the leading axis of each of its parameters.
        loss: from the model and the step to each seed's loss, [seed].
        optimiser: rule and rates.
        steps: number of updates.
        record: from the model and the step to named tensors [seed, ...].
        at: the steps at which to record, e.g. of `joma.schedule`; every step if not given.
        dims: names of the axes after `seed` of what `record` returns, by variable.
        seeds: labels of the seed axis, 0, 1, … if not given.
        progress, label: where to report progress, and under which words.

    Returns:
        A Dataset over `seed` and `step` with `loss`, all that `record` returns, and `diverged` [seed]: the step at
        which the seed's loss was first not finite, −1 if it never was.

    >>> model = nn.Module()
    >>> model.p = nn.Parameter(torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    >>> run = fit(model, lambda model, step: (model.p**2).sum(-1) / 2, optimiser=Optimiser("sgd", 0.5), steps=2)
    >>> run.loss.values
    array([[0.5    , 0.125  , 0.03125],
           [2.     , 0.5    , 0.125  ]])
    """
    steps = whole("steps", steps, low=0)
    moments = _moments(range(steps + 1) if at is None else at, steps)
    diverged = np.full(_seeds(model), NEVER)
    rule, recorded = optimiser.build(model), {}
    with progress.task(label, total=steps) as work:
        for step in range(steps + 1):
            rule.zero_grad()
            losses = loss(model, step)
            if losses.shape != diverged.shape:
                expected, got = f"one value for each of {len(diverged)} seeds", f"shape {tuple(losses.shape)}"
                raise InputError("loss", expected, got, "average over all axes but the seed's")
            losses.sum().backward()
            lost = _watch(losses, diverged, step)
            if step in moments:
                _keep(recorded, {"loss": losses, **record(model, step)}, lost)
            if step < steps:
                _update(rule, lost)
                work.advance()
    return _dataset(recorded, diverged, sorted(moments), dims or {}, seeds)


def _moments(at: Iterable[int], steps: int) -> frozenset[int]:
    moments = frozenset(whole("at", step, low=0, high=steps) for step in at)
    if not moments:
        raise InputError("at", "at least one step", "none", "use a policy of joma.schedule")
    return moments


def _seeds(model: nn.Module) -> int:
    """Return the length of the leading axis, which all parameters must share."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        expected = "a module whose parameters all have the seed as leading axis"
        raise InputError("model", expected, shapes or "no parameters", "add that axis")
    return next(iter(shapes.values()))[0]


def _watch(
    losses: Float[Tensor, " seed"], diverged: Int[np.ndarray, " seed"], step: int
) -> Bool[np.ndarray, " seed"] | None:
    """Note in `diverged` which seeds have just turned non-finite; return which ever have, or None if none has."""
    fresh = ~np.isfinite(losses.detach().cpu().numpy()) & (diverged == NEVER)
    if fresh.any():
        diverged[fresh] = step
    lost = diverged != NEVER
    return lost if lost.any() else None


def _update(rule: torch.optim.Optimizer, lost: Bool[np.ndarray, " seed"] | None) -> None:
    """One step of the rule, not for lost seeds: momenta and decay would move them even without a gradient."""
    if lost is None:
        rule.step()
        return
    parameters = [parameter for group in rule.param_groups for parameter in group["params"]]
    before = [parameter.detach()[lost].clone() for parameter in parameters]
    rule.step()
    with torch.no_grad():
        for parameter, old in zip(parameters, before, strict=True):
            parameter[lost] = old


def _keep(
    recorded: dict[str, list[Tensor]], values: Mapping[str, Tensor], lost: Bool[np.ndarray, " seed"] | None
) -> None:
    seeds = values["loss"].shape
    for name, value in values.items():
        if value.shape[:1] != seeds:
            got = f"{name} of shape {tuple(value.shape)} for {len(values['loss'])} seeds"
            raise InputError("record", "tensors with the seed as leading axis", got, "keep that axis")
        kept = value.detach().clone()
        if lost is not None and value.is_floating_point():
            kept[lost] = torch.nan
        recorded.setdefault(name, []).append(kept)


def _dataset(
    recorded: Mapping[str, list[Tensor]],
    diverged: Int[np.ndarray, " seed"],
    steps: Sequence[int],
    dims: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None,
) -> xr.Dataset:
    labels = range(len(diverged)) if seeds is None else seeds
    if len(labels) != len(diverged):
        raise InputError("seeds", f"{len(diverged)} labels", len(labels), "give one for each seed of the model")
    variables = {}
    for name, values in recorded.items():
        array = torch.stack(values, dim=1).cpu().numpy()
        further = tuple(dims.get(name, ()))
        if len(further) != array.ndim - 2:
            got = f"{further} for the shape {array.shape[2:]} of {name!r}"
            raise InputError("dims", "one name for each axis after the seed's", got, "name them in `dims`")
        variables[name] = (("seed", "step", *further), array)
    variables["diverged"] = (("seed",), diverged)
    coords = {"seed": np.asarray(labels), "step": np.asarray(steps)}
    return xr.Dataset(variables, coords=coords)
