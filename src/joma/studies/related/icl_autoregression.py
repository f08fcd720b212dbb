"""Linear attention that learns W of s_{t+1} = W s_t in context: one step of gradient descent, and where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, distinct, scalar, whole
from joma.studies.related import icl_autoregression_figures as figures
from joma.studies.related.icl_autoregression_measures import (
    below_formula,
    beside_best_scalar,
    diagonal_error,
    from_formula,
    from_searched_formula,
    of_process,
    step_error,
)
from joma.studies.related.icl_autoregression_model import HAAR, Arm, LinearAttention, sequences
from joma.study import Arms, Claim, Context, Drawing, Preset, Study, above, at_most
from joma.theory import in_context_autoregression as theory
from joma.train import Optimiser, Record

PROBE = -1  # the step whose random numbers are the probe's: training has no such step


@dataclass(frozen=True)
class Config:
    """The sequences, the layer and how it is trained."""

    dim: int = 4
    """The number of coordinates; even, since a rotation turns a plane."""
    lengths: tuple[int, ...] = (3, 5, 8)
    """Lengths T of contexts with independent eigenvalues."""
    length: int = 8
    """The length of the other arms: a fixed start, plain tokens, rotations, and matrices that do not commute."""
    steps: int = 2000
    batch: int = 256
    rate: float = 0.01
    """Adam's learning rate at first; it falls to 0 as a cosine."""
    scale: float = 0.1
    """Standard deviation of the initial entries of A and B."""
    records: int = 20
    probe: int = 20_000
    """Sequences of each seed on which the arm of matrices that do not commute is measured."""
    search_dim: int = 4
    """The number of coordinates at which the best parameters are searched for."""
    searches: int = 3


def run(config: Config, context: Context) -> xr.Dataset:
    """Train all arms, compute their exact losses, and search for the best parameters of each process."""
    _check(config)
    complex_arms = [Arm("unitary", length) for length in config.lengths]
    complex_arms += [Arm("fixed", config.length), Arm("unitary", config.length, augmented=False)]
    groups = [complex_arms, [Arm("rotations", config.length)], [Arm(HAAR, config.length)]]
    trained = xr.concat([_train(config, context, group) for group in groups], dim="arm").transpose("seed", ...)
    return xr.merge([trained, _searched(config, context)])


def _check(config: Config) -> None:
    for name in ("dim", "search_dim"):
        if whole(name, getattr(config, name), low=2) % 2:
            raise InputError(name, "even", getattr(config, name), "a rotation turns a plane")
    distinct("lengths", config.lengths)
    for length in config.lengths:
        whole("lengths", length, low=2)
    whole("length", config.length, low=3)
    whole("records", config.records, low=2)
    whole("steps", config.steps)
    for name in ("batch", "probe", "searches"):
        whole(name, getattr(config, name))
    scalar("rate", config.rate, above=0.0)
    scalar("scale", config.scale, above=0.0)


def _train(config: Config, context: Context, group: Sequence[Arm]) -> xr.Dataset:
    """Train arms as one model, and return the losses and the final parameters of each."""
    axis, seeds = Arms("arm", [arm.name for arm in group]), torch.tensor(context.seeds, device=context.device)
    model = LinearAttention(
        context.per_model(list(group)), config.dim, generators=context.generators("weights", axis), scale=config.scale
    )

    def loss(model: LinearAttention, step: Tensor | int, samples: int = config.batch) -> Tensor:
        tokens, target = sequences(group, seeds=seeds, step=step, samples=samples, dim=config.dim)
        return (model(tokens) - target).abs().square().mean(dim=(1, 2))

    def measure(model: LinearAttention, _step: int) -> dict[str, Tensor]:
        with torch.no_grad():
            sampled = {"probe_loss": loss(model, PROBE, config.probe)} if group[0].process == HAAR else {}
        parts = {
            name: torch.view_as_real(matrix.to(torch.complex128)) for name, matrix in (("A", model.A), ("B", model.B))
        }
        return {**parts, "weights": model.weights, **sampled}

    steps = config.steps
    trajectory = context.fit(
        model,
        loss,
        optimiser=Optimiser(
            "adam", config.rate, schedules={"*": lambda step: (1 + torch.cos(math.pi * step / steps)) / 2}
        ),
        steps=steps,
        record=Record(
            measure,
            at=schedule.logarithmic(config.records, steps),
            dims={"A": ("row", "column", "part"), "B": ("row", "column", "part"), "weights": ("back",)},
            gradients=False,
        ),
        arms=axis,
        label=f"icl-autoregression, {group[0].name} and the like",
    )
    return xr.concat([_measured(config, context, trajectory, arm) for arm in group], dim="arm")


def _measured(config: Config, context: Context, trajectory: xr.Dataset, arm: Arm) -> xr.Dataset:
    """Return the loss of an arm at each record, and its final matrices in the eigenbasis."""
    record = trajectory.sel(arm=arm.name).transpose("seed", "step", ...)
    first, second = (record[name].values[..., 0] + 1j * record[name].values[..., 1] for name in ("A", "B"))
    losses = record.probe_loss.values if arm.process == HAAR else _exact_losses(arm, first, second, record)
    first, second = first[:, -1], second[:, -1]
    if arm.process == "rotations":
        basis = theory.rotation_basis(config.dim)
        first, second = (basis @ matrix @ basis.conj().T for matrix in (first, second))
    product = np.diagonal(first, axis1=-2, axis2=-1) * np.diagonal(second, axis1=-2, axis2=-1)
    best_scalar = _best_scalar(config, context) if arm.process == HAAR else np.full(len(context.seeds), np.nan)
    return xr.Dataset(
        {
            "loss": (("seed", "record"), losses),
            "A_size": (("seed", "row", "column"), np.abs(first)),
            "B_size": (("seed", "row", "column"), np.abs(second)),
            "product": (("seed", "row", "part"), np.stack([product.real, product.imag], axis=-1)),
            "best_scalar_loss": ("seed", best_scalar),
            "length": arm.length,
            "process": arm.process if arm.augmented else "plain",
            "formula": float(theory.best_loss(arm.length, config.dim)),
        },
        {"seed": list(context.seeds), "arm": arm.name, "record": range(losses.shape[1])},
    ).assign(step=("record", trajectory.step.values))


def _exact_losses(arm: Arm, first: np.ndarray, second: np.ndarray, record: xr.Dataset) -> np.ndarray:
    """Return the exact loss of A and B, [seed, record, dim, dim], at every record; NaN once a seed has diverged."""
    positions = record.weights.values[..., : arm.length][..., ::-1]  # they are recorded from the last token back
    losses = [
        theory.population_loss(
            first[place],
            second[place],
            arm.length,
            process=arm.process,
            positions=None if arm.augmented else positions[place],
        )
        if np.isfinite(first[place]).all() and np.isfinite(second[place]).all()
        else np.nan
        for place in np.ndindex(first.shape[:2])
    ]
    return np.reshape(losses, first.shape[:2])


def _best_scalar(config: Config, context: Context) -> np.ndarray:
    """Return the probe's loss at the best multiples of the identity, of matrices that do not commute, per seed."""
    seeds = torch.tensor(context.seeds, device=context.device)
    arm = Arm(HAAR, config.length)
    tokens, target = sequences([arm], seeds=seeds, step=PROBE, samples=config.probe, dim=config.dim)
    last, values, keys = tokens[:, :, :1], tokens[:, :, :-2], tokens[:, :, 1:-1]
    descent = ((keys * last).sum(-1, keepdim=True) * values).sum(2)
    step = (descent * target).sum((1, 2)) / descent.square().sum((1, 2))
    return (step[:, None, None] * descent - target).square().mean((1, 2)).cpu().numpy()


def _searched(config: Config, context: Context) -> xr.Dataset:
    """Return the least exact loss that a search over all complex matrices finds, for each process and seed."""
    losses = [
        [
            theory.optimum(
                config.length, config.search_dim, process=process, starts=config.searches, generator=generator
            ).loss
            for process in theory.PROCESSES
        ]
        for generator in context.numpy_generators("searches")
    ]
    return xr.Dataset(
        {
            "searched_loss": (("seed", "searched"), np.array(losses)),
            "searched_formula": float(theory.best_loss(config.length, config.search_dim)),
        },
        {"seed": list(context.seeds), "searched": list(theory.PROCESSES)},
    )


CLAIMS = (
    Claim(
        "loss",
        "Trained linear attention reaches the loss (d − 1)/(T + d − 2).",
        lambda run: from_formula(run, "unitary"),
        at_most(0.003),
        kind="control",
        quantity="largest distance of the exact loss at the end from the formula, over lengths",
    ),
    Claim(
        "diagonal",
        "Trained matrices are diagonal in the eigenbasis.",
        lambda run: diagonal_error(run, "unitary"),
        at_most(0.02),
        kind="control",
        quantity="largest entry off the diagonal over the largest on it, of A and of B, over lengths",
    ),
    Claim(
        "step",
        "Training finds one step of gradient descent, with step size 1/(T + d − 2).",
        lambda run: step_error(run, "unitary"),
        at_most(0.02),
        kind="reading",
        quantity="largest |a_i b_i (T + d − 2) − 1| at the end, over coordinates and lengths",
    ),
    Claim(
        "optimum",
        "No matrices have a smaller loss than (d − 1)/(T + d − 2).",
        lambda run: from_searched_formula(run, "unitary"),
        at_most(1e-8),
        kind="theorem",
        quantity="distance from the formula of the least exact loss that a search over all complex matrices finds",
    ),
    Claim(
        "plain",
        "Without augmented tokens one layer does no better than predicting zero.",
        lambda run: 1 - of_process(run, "plain").loss.isel(record=-1, arm=0),
        at_most(1e-8),
        kind="theorem",
        quantity="by how much the exact loss at the end is below 1, with trained weights of positions",
    ),
    Claim(
        "fixed-start",
        "From a fixed start, training gets below the loss of one step of gradient descent.",
        lambda run: below_formula(run, "fixed"),
        above(0.0),
        kind="control",
        quantity="(d − 1)/(T + d − 2) less the exact loss at the end, all sequences starting at (1, …, 1); interval "
        "over seeds",
        across="interval",
    ),
    Claim(
        "rotations",
        "Conjugate pairs of eigenvalues, as real rotations have, do not change the least loss.",
        lambda run: from_searched_formula(run, "rotations"),
        at_most(1e-8),
        kind="control",
        quantity="distance from the formula of the least exact loss that a search over all complex matrices finds",
    ),
    Claim(
        "rotations-trained",
        "Real attention trained on rotations reaches the loss (d − 1)/(T + d − 2).",
        lambda run: from_formula(run, "rotations"),
        at_most(0.003),
        kind="control",
        quantity="distance of the exact loss at the end from the formula",
    ),
    Claim(
        "non-commuting",
        "For matrices that do not commute, training ends at the best step of gradient descent.",
        beside_best_scalar,
        at_most(0.003),
        kind="reading",
        quantity="distance of the loss at the end from that of the best multiples of the identity, same sequences",
    ),
    Claim(
        "non-commuting-diagonal",
        "For matrices that do not commute, trained matrices are multiples of the identity.",
        lambda run: diagonal_error(run, HAAR),
        at_most(0.02),
        kind="control",
        quantity="largest entry off the diagonal over the largest on it, of A and of B; the bound is that of "
        "`diagonal`",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: distances from the formula, and the losses of the controls."""
    ends = {process: of_process(run, process).loss.isel(record=-1) for process in ("fixed", "rotations", "plain", HAAR)}
    means = {process: float(end.mean()) for process, end in ends.items()}
    formula = float(of_process(run, "fixed").formula[0])
    scalar_loss = float(of_process(run, HAAR).best_scalar_loss.mean())
    return (
        f"Trained losses are within {float(from_formula(run, 'unitary').max()):.1g} of (d − 1)/(T + d − 2), and step "
        f"sizes within {100 * float(step_error(run, 'unitary').max()):.1f} % of 1/(T + d − 2). At T = "
        f"{int(of_process(run, 'fixed').length[0])} the formula is {formula:.4f}; real rotations reach "
        f"{means['rotations']:.4f}, sequences with a fixed start {means['fixed']:.4f}, tokens without the one before "
        f"{means['plain']:.4f}. Matrices that do not commute reach {means[HAAR]:.4f}, the best step of gradient "
        f"descent {scalar_loss:.4f}."
    )


STUDY = Study(
    name="icl-autoregression",
    title="Linear attention learns a rotation in context by one step of gradient descent",
    source="Sander et al. 2024 (arXiv 2402.05787)",
    statement=(
        "On sequences s_{t+1} = W s_t with commuting orthogonal W, a trained layer of linear attention whose tokens "
        "hold the one before them does one step of gradient descent on the context's own regression (Sander et al. "
        "2024, arXiv 2402.05787). The best step size 1/(T + d − 2) and the loss (d − 1)/(T + d − 2) are derived here."
    ),
    about=(
        "We train A and B of one layer by Adam on fresh sequences with random eigenvalues on the unit circle, and "
        "compute the exact loss of what is trained: the output is a sum of monomials in independent phases. Controls "
        "are a fixed start, real rotations, tokens that are not augmented (with trained weights of positions), and "
        "orthogonal matrices that do not commute. A search over all complex matrices looks for a smaller exact loss."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=3, seconds=15),
        "paper": Preset(Config(dim=16, lengths=(4, 8, 16, 32, 64), length=16, steps=4000), seeds=10, seconds=600),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "losses": Drawing(
            figures.draw_losses,
            "(a) Loss of trained layers by the length of the context; line: (d − 1)/(T + d − 2). (b) Loss over "
            "training, all arms of one length; bands from the least to the greatest seed, dotted line: the formula. "
            "(c) Where the arms of this length end. Black lines: the least loss that a search finds, where its "
            "matrices are of the same size, and for matrices that do not commute the best multiples of the identity.",
        ),
        "matrices": Drawing(
            figures.draw_matrices,
            "Sizes of the entries of the trained A and B, seed 0, over the largest of each, on a logarithmic scale: "
            "independent eigenvalues, real rotations (in their eigenbasis), a fixed start, matrices that do not "
            "commute. What is off the diagonal is noise of training but for the fixed start.",
        ),
    },
)
