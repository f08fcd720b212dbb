"""How low attention's entropy can be: the floor of a row, of a matrix, and of a language model with σReparam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from joma.arguments import distinct, scalar, whole
from joma.studies.common_axes import NAMES, STEP
from joma.studies.related import entropy_floor_figures, entropy_floor_training
from joma.studies.related.entropy_floor_measures import (
    below_bound,
    below_floor,
    below_identity,
    below_mean_floor,
    collapse,
    converged,
    entropy_gain,
    floor_correlation,
    loss_gain,
    lower_peaks,
    norm_excess,
    row_difference,
    weight_correlation,
)
from joma.studies.text.language_training import LanguageSetting, inputs, read_text
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, at_most
from joma.theory import entropy_floor, entropy_search


@dataclass(frozen=True)
class Config:
    """Searches for low entropy over rows and over matrices, and a language model of bytes."""

    keys: tuple[int, ...] = (2, 3, 5, 10, 50)
    norms: tuple[float, ...] = (0.1, 1.0, 4.0, 16.0)
    """Norms σ of a row's centred logits."""
    row_starts: int = 4
    """Searches for a row by each seed."""
    sizes: tuple[int, ...] = (3, 5, 8)
    """Rows and columns T of the matrices."""
    spectral_norms: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    matrix_starts: int = 16
    """Searches for a matrix by each seed."""
    corpus: str = "python-reference"
    """A folder or file of text, a Hugging Face dataset, or python-reference."""
    width: int = 32
    hidden: int = 64
    heads: int = 2
    layers: int = 2
    length: int = 32
    batch: int = 8
    steps: int = 300
    every: int = 30
    """Steps between probes; logarithmic before the first."""
    rates: tuple[float, ...] = (3e-3, 3e-2)
    """Learning rates of Adam; the paper's claim is about large ones."""
    clip: float = 1.0
    windows: int = 8
    """Windows of the validation text on which every row of attention is measured."""

    @property
    def setting(self) -> LanguageSetting:
        """The text and the sizes of the model, without dropout, and one Adam throughout."""
        return LanguageSetting(
            corpus=self.corpus,
            tokeniser="bytes",
            width=self.width,
            hidden=self.hidden,
            heads=self.heads,
            length=self.length,
            dropout=0.0,
            batch=self.batch,
            columns=self.batch,
            steps=self.steps,
            clip=self.clip,
            restart=False,
            every=self.every,
        )


def run(config: Config, context: Context) -> xr.Dataset:
    """Search for low rows and matrices, each seed from its own starts, and train the language model."""
    return xr.merge([_rows(config, context), _matrices(config, context), _training(config, context)], join="exact")


def _rows(config: Config, context: Context) -> xr.Dataset:
    """Return the least entropy that each seed's searches reach, the floor, and the least of all k-peak rows."""
    keys = [whole("keys", count, low=2) for count in distinct("keys", config.keys)]
    norms = [scalar("norms", norm, above=0.0) for norm in distinct("norms", config.norms)]
    starts = whole("row_starts", config.row_starts)
    lowest = [
        [
            [entropy_search.lowest_row(norm, count, starts=starts, generator=generator).entropy.min() for norm in norms]
            for count in keys
        ]
        for generator in context.numpy_generators("rows")
    ]
    dims = ("key_count", "norm")
    peaks = [[entropy_floor.peak_entropy(norm, count, range(1, count)).min() for norm in norms] for count in keys]
    return xr.Dataset(
        {
            "row_lowest": (("seed", *dims), np.array(lowest)),
            "row_floor": (dims, entropy_floor.row_floor(np.array(norms), np.array(keys)[:, None])),
            "peak_lowest": (dims, np.array(peaks)),
        },
        {"seed": list(context.seeds), "key_count": keys, "norm": norms},
    )


def _matrices(config: Config, context: Context) -> xr.Dataset:
    """Return where each seed's best search for a matrix ended, whether it converged, the bound, and σI's entropy."""
    sizes = [whole("sizes", size, low=2) for size in distinct("sizes", config.sizes)]
    norms = [scalar("spectral_norms", norm, above=0.0) for norm in distinct("spectral_norms", config.spectral_norms)]
    starts, ends = whole("matrix_starts", config.matrix_starts), []
    for generator in context.numpy_generators("matrices"):
        for size in sizes:
            for norm in norms:
                low = entropy_search.lowest_matrix(norm, size, starts=starts, generator=generator)
                ends.append((low.entropy.min(), low.gradient[low.entropy.argmin()]))
    lowest = np.array(ends).reshape(len(context.seeds), len(sizes), len(norms), 2)
    dims = ("matrix_size", "spectral_norm")
    return xr.Dataset(
        {
            "matrix_lowest": (("seed", *dims), lowest[..., 0]),
            "matrix_gradient": (("seed", *dims), lowest[..., 1]),
            "identity": (dims, entropy_floor.identity_entropy(np.array(norms), np.array(sizes)[:, None])),
            "mean_floor": (dims, np.stack([entropy_floor.mean_floor(norms, size) for size in sizes])),
            "identity_threshold": ("matrix_size", [entropy_floor.identity_threshold(size) for size in sizes]),
        },
        {"matrix_size": sizes, "spectral_norm": norms},
    )


def _training(config: Config, context: Context) -> xr.Dataset:
    """Train the language model; the common axes are those of its plain form at the first rate."""
    rates = [scalar("rates", rate, above=0.0) for rate in distinct("rates", config.rates)]
    setting = config.setting
    text = read_text(setting, context)
    layers, windows = whole("layers", config.layers), whole("windows", config.windows)
    trained = entropy_floor_training.train(setting, context, text, layers=layers, rates=rates, probe=windows)
    axes = trained[list(NAMES)].isel(arm=0, rate=0, drop=True).rename(step=STEP)
    last = trained[["row_entropy", "row_norm"]].isel(seed=0, step=[0, -1], drop=True).rename(step="row_step")
    length, rows = config.length, trained.sizes["row"]
    trained = trained.drop_vars([*NAMES, "row_entropy", "row_norm", "diverged"], errors="ignore")
    return xr.merge([trained, axes.drop_vars("seed"), last.drop_vars("seed", errors="ignore")], join="exact").assign(
        row_keys=("row", np.arange(rows) % length + 1)
    )


ROW_CLAIMS = (
    Claim(
        "tight",
        "The least entropy of a row with logits of norm σ is B(σ, T).",
        row_difference,
        at_most(1e-6),
        kind="theorem",
        quantity="largest relative difference from B of the least entropy that BFGS reaches, over σ and T, all seeds",
    ),
    Claim(
        "peaks",
        "No row with k equally high logits has a lower entropy than the one with a single high logit.",
        lower_peaks,
        at_least(-1e-12),
        kind="theorem",
        quantity="least entropy over k less B, relative, over σ and T",
    ),
    Claim(
        "mean-floor",
        "No square matrix of logits of spectral norm σ has a lower mean entropy than the convex envelope of B.",
        below_mean_floor,
        at_least(-1e-9),
        kind="theorem",
        quantity="least mean entropy that a projected gradient reaches, less the bound, in nats; ours",
    ),
    Claim(
        "identity",
        "No square matrix of logits has a lower mean entropy than the multiple of the identity of its spectral norm.",
        below_identity,
        at_least(-1e-9),
        kind="control",
        quantity="least mean entropy that a projected gradient reaches, less that of σI, in nats; proved for large σ",
    ),
    Claim(
        "converged",
        "The searches for matrices converge.",
        converged,
        at_most(entropy_search.CONVERGED),
        kind="check",
        quantity="projected gradient at the end of the best search, largest over σ and T",
    ),
)
MODEL_CLAIMS = (
    Claim(
        "never-below",
        "No row of a trained model's attention has a lower entropy than the floor of its logits.",
        below_floor,
        at_least(-1e-9),
        kind="theorem",
        quantity="least entropy less B(norm of the row's centred logits, visible keys): all rows, steps, arms",
    ),
    Claim(
        "weight-bound",
        "The norm of a row's logits is at most ‖W_Q W_Kᵀ‖ ‖x_i‖ ‖X‖ / √d.",
        below_bound,
        at_least(0.0),
        kind="theorem",
        quantity="least of this bound less the norm, over all rows, steps and arms",
    ),
    Claim(
        "collapse",
        "A large learning rate brings the plain model's entropy lower than a small one.",
        collapse,
        above(0.0),
        kind="reading",
        quantity="least entropy over training at the smallest rate less that at the largest, mean over layers, in nats",
        across="interval",
    ),
    Claim(
        "reparam",
        "σReparam keeps entropy up at the large learning rate.",
        lambda run: entropy_gain(run, run.rate.max()),
        above(0.0),
        kind="reading",
        quantity="least entropy over training with σReparam less that without, mean over layers, in nats",
        across="interval",
    ),
    Claim(
        "reparam-small-rate",
        "σReparam keeps entropy up at the small learning rate too.",
        lambda run: entropy_gain(run, run.rate.min()),
        above(0.0),
        kind="control",
        quantity="least entropy over training with σReparam less that without, mean over layers, in nats",
        across="interval",
    ),
    Claim(
        "reparam-norms",
        "With σReparam logits stay smaller at the large learning rate.",
        norm_excess,
        above(1.0),
        kind="reading",
        quantity="largest mean norm of the logits over training without σReparam over that with it",
        across="interval",
    ),
    Claim(
        "reparam-loss",
        "At the large learning rate σReparam lowers the training loss.",
        loss_gain,
        above(0.0),
        kind="reading",
        quantity="training loss without σReparam less that with it, mean over records in the second half of the steps",
        across="interval",
    ),
    Claim(
        "use",
        "Over training a layer's entropy follows the floor of its logits' norms.",
        floor_correlation,
        above(0.0),
        kind="control",
        quantity="rank correlation over steps of mean entropy and mean floor, mean over layers, arms and rates",
        across="interval",
    ),
    Claim(
        "use-weights",
        "Over training a layer's entropy falls as the spectral norm of W_Q W_Kᵀ rises.",
        weight_correlation,
        above(0.0),
        kind="control",
        quantity="rank correlation over steps of mean entropy and minus that norm, mean over layers, arms and rates",
        across="interval",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: the floors of rows and matrices, and what σReparam does to a language model."""
    large = run.sel(rate=run.rate.max()).mean(("seed", "layer"))
    plain, reparam = (large.sel(arm=arm) for arm in entropy_floor_training.ARMS)
    return (
        f"Searches reach the floor of a row to {float(row_difference(run)):.0e} and none goes below. Over matrices "
        f"none goes below σI (least difference {float(below_identity(run).min()):.0e} nats). At learning rate "
        f"{float(run.rate.max()):g} entropy falls from {float(plain.entropy[0]):.2f} to "
        f"{float(plain.entropy.min()):.2f} nats, with σReparam to {float(reparam.entropy.min()):.2f}; training "
        f"losses at the end are {float(plain.loss[-1]):.2f} and {float(reparam.loss[-1]):.2f} nats."
    )


STUDY = Study(
    name="entropy-floor",
    title="Attention's entropy has a floor, which σReparam keeps high",
    source="Zhai et al. (arXiv 2303.06296)",
    statement=(
        "A row of T logits of norm at most σ has an entropy of at least B(σ, T), which falls exponentially in σ. "
        "Low entropy goes with unstable training; σReparam, which replaces weights W by γ W/‖W‖₂, prevents it (Zhai "
        "et al., arXiv 2303.06296)."
    ),
    about=(
        "The floor of one row is compared with the least entropy that BFGS reaches on the sphere of logits. For "
        "square matrices of logits we derive a bound on the mean entropy of the rows, and a projected gradient "
        "looks for lower matrices. A language model of bytes is trained on the embedded text by Adam at two "
        "learning rates, with and without σReparam of its query and key weights; every row of attention on fixed "
        "windows is measured in float64."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=3, seconds=20),
        "paper": Preset(
            Config(
                keys=(2, 3, 5, 10, 50, 200),
                norms=(0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
                sizes=(3, 4, 5, 6, 8, 12),
                spectral_norms=(0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0),
                matrix_starts=32,
                steps=2000,
                every=100,
            ),
            seeds=5,
            seconds=200,
        ),
    },
    run=run,
    claims=(*ROW_CLAIMS, *MODEL_CLAIMS),
    outcome=outcome,
    threads=1,
    inputs=lambda config: inputs(config.setting),
    exact_shards=False,
    figures={
        "floor": Drawing(
            entropy_floor_figures.draw_floor,
            "(a) Lines: floor of a row over the norm of its logits. Points: least entropy that searches reach. (b) "
            "Mean entropy of square matrices of logits above our bound. Lines: σI. Points: the least that the "
            "searches of all seeds reach. (c) Every point is a row of attention of the trained model, last layer, "
            "last head, seed 0, whose entropy is drawn relative to the logarithm of the keys that it sees; the "
            "lines are the floor for the fewest and for the most keys shown.",
        ),
        "training": Drawing(
            entropy_floor_figures.draw_training,
            "A language model of bytes at each learning rate, with and without σReparam: entropy of attention, its "
            "floor by the logits' norms, and that norm, means over layers and rows. Lines: mean over seeds; bands: "
            "least to greatest seed. Titles: extremes of the means, without and with σReparam.",
        ),
    },
)
