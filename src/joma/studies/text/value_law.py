"""Do value vectors predict attention in a language model? The law of the value path outside its assumptions.

For fixed orthonormal embeddings e_l and free logits gradient flow ties the logits of a token to its value vector,
whatever stands above attention (for exp attention; softmax adds the remainder that Theorem 1 has):

    (1/η_z) Σ_m z_ml − (1/2η_V) ‖W_V e_l‖²    is constant

It is Theorem 1 with the dimensions of the value vector in place of the hidden units. So the same comparison is made
with ‖W_V e_l‖² in place of Σ_k v_lk²: the same logits, sums, null, regression on frequency and scale. It is judged at
three times of training, which were chosen before any run.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from joma.models.transformer import Decoder, Layer
from joma.studies.text.law_comparison import LAWS, Source, at_end, final_error, law_claims
from joma.study import Claim, NotInRun, above

PREFIX = "value_"  # of the variables that `compare` returns for value vectors
DIMS = {"value_squares": ("token",), "value_rest": ()}
TITLES = {
    "softmax": "Law for softmax with value vectors",
    "exp": "Law for exp with value vectors",
}
SHARES = (0.1, 1 / 3, 1.0)  # of the training, at which the law is judged


def read(model: Decoder, *, tokens: Int[Tensor, " token"]) -> dict[str, Tensor]:
    """Return, per seed, `value_squares` [token], ‖e_l W_V‖², and `value_rest`, their sum over all other types.

    The bias of the values is left out. This is harmless with softmax attention, whose weights sum to 1: the bias adds
    the same to every output, whatever the logits, and so moves none of them. With exp or linear attention a bias that
    is not zero breaks the law. Positions that are added to embeddings are left out too, and this is not harmless: they
    give a token another value vector at each position.
    """
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    embeddings = model.embedding.double() * (model.input_stage.scale or 1.0)
    all_squares = (embeddings @ layer.attention.value.weight.double()).square().sum(dim=-1)
    squares = all_squares[:, tokens.to(all_squares.device)]
    return {"value_squares": squares, "value_rest": all_squares.sum(dim=-1) - squares.sum(dim=-1)}


def as_squares(trajectory: xr.Dataset) -> xr.Dataset:
    """Return a trajectory with the squares of value vectors in place of those of hidden units, for `compare`."""
    return trajectory.drop_vars(["squares", "rest"]).rename(value_squares="squares", value_rest="rest")


def is_in(run: xr.Dataset) -> bool:
    """Return whether the law of the value path was tested in a run."""
    return f"{PREFIX}correlation" in run


def as_laws(run: xr.Dataset) -> xr.Dataset:
    """Return the measures of the value path under the names that those of the MLP's law have."""
    if not is_in(run):
        raise NotInRun("value path")
    names = [str(name) for name in run.data_vars if str(name).startswith(PREFIX) and str(name) not in DIMS]
    return run[names].rename({name: name.removeprefix(PREFIX) for name in names})


def measure(run: xr.Dataset, law: str, name: str, null: str | None = None) -> xr.DataArray:
    """Return a measure of the value path's law at the end, per seed; less the upper bound of a null, if named."""
    return at_end(as_laws(run), law, name, null)


def least_partial(run: xr.Dataset, law: str) -> xr.DataArray:
    """Return, per seed, the least of the partial correlation less its null at `SHARES` of the training."""
    values = [at_end(as_laws(run), law, "partial", "partial_null", share=share) for share in SHARES]
    times = xr.concat([value.drop_vars("step") for value in values], xr.Variable("time", np.array(SHARES)))
    return times.min("time", skipna=False)


def lead(run: xr.Dataset, law: str) -> xr.DataArray:
    """Return, per seed, how much better value vectors do than the MLP's weights among tokens of like frequency.

    `NotInRun` if value vectors do no better than chance in some seed: to be less wrong than others is no lead.
    """
    if bool((measure(run, law, "partial", "partial_null") <= 0).any()):
        raise NotInRun("prediction from value vectors beyond chance in every seed")
    return measure(run, law, "partial") - at_end(run, law, "partial")


SOURCE = Source("value vectors", "‖W_V e‖²", "value-", as_laws)


def claims(law: str) -> tuple[Claim, ...]:
    """Return the claims about the value path and one law."""
    return (
        *law_claims(law, SOURCE),
        Claim(
            f"value-throughout-{law}",
            f"On text value vectors predict attention by the law for {law} attention at every time of training.",
            partial(least_partial, law=law),
            above(0.0),
            kind="control",
            quantity="the correlation with log frequency regressed out, less the bound of its null, the least of a "
            "tenth and a third of the way and the end; interval over seeds",
            across="interval",
        ),
        Claim(
            f"value-lead-{law}",
            f"On text value vectors predict attention by the law for {law} attention better than the MLP's weights do.",
            partial(lead, law=law),
            above(0.0),
            kind="control",
            quantity="correlation at the end with log frequency regressed out of both sides, from value vectors less "
            "that from the MLP's weights; interval over seeds",
            across="interval",
        ),
    )


def outcome(run: xr.Dataset) -> str:
    """Return what either law explains from value vectors at the end, or nothing for a run without them."""
    if not is_in(run):
        return ""
    parts = []
    for law in LAWS:
        correlation, rest = (float(measure(run, law, name).mean()) for name in ("correlation", "partial"))
        error = float(final_error(as_laws(run), law).mean())
        parts.append(f"{correlation:.2f} (law for {law}, error {error:.2f}, correlation at like frequency {rest:.2f})")
    null = float(measure(run, "softmax", "partial_null").sel(side="high").mean())
    return f"From value vectors it is {' and '.join(parts)}; chance at like frequency is {null:.2f}."
