"""A small language model with and without σReparam, and the floor of every row of its attention while it trains.

σReparam (Zhai et al., arXiv 2303.06296) replaces a weight W by γ W/σ(W), σ its spectral norm and γ a trained number. As
in the authors' code σ = vᵀ W u comes from one step of power iteration for each step of training, from singular vectors
that are exact at the start, and γ starts at 1. Here it applies to query and key projections, which have no biases:
together they are one factor γ_Q γ_K / (σ_Q σ_K) of the scores, through which the weights have their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from joma import noise, schedule
from joma.arguments import whole
from joma.models.config import DecoderConfig
from joma.models.layers import Attention, Layer, QueryPositions, QueryScale
from joma.models.transformer import Decoder
from joma.probes.entropy import attention_entropy
from joma.probes.floor import entropy_floor, logit_norms
from joma.studies.common_axes import NAMES, attention_axes
from joma.studies.text.language_training import LanguageSetting, TextColumns, Variant, decoder_config
from joma.study import Arms, Context, LabelledTraining
from joma.tensors import of_finite
from joma.train import Optimiser, Record

ARMS = ("plain", "σReparam")
ROWS = 400  # rows of attention of one seed that are stored for the figure


class SigmaReparamDecoder(Decoder):
    """A decoder whose query and key weights are γ W/σ(W), σ the spectral norm.

    Call `iterate` before every step of training.

    Args:
        config, generators, options: as for `Decoder`; attention has no biases.

    >>> config = DecoderConfig(vocabulary=10, width=8, attention_bias=False)
    >>> model = SigmaReparamDecoder(config, generators=[torch.Generator().manual_seed(0)])
    >>> norms = [torch.linalg.matrix_norm(weight, 2) for weight in query_key_weights(model)[0]]
    >>> bool(torch.isclose(model.score_scales()[0], 1 / (norms[0] * norms[1])))
    True
    """

    right: Float[Tensor, "seed layer 2 width"]  # right singular vectors of W_Q and W_K

    def __init__(self, config: DecoderConfig, *, generators: Sequence[torch.Generator], **options: Any) -> None:
        super().__init__(config, generators=generators, **options)
        self.gamma = nn.Parameter(torch.ones(len(generators), config.layers, 2, dtype=self.embedding.dtype))
        with torch.no_grad():
            vectors = torch.linalg.svd(self._weights()).Vh[..., 0, :]
        self.register_buffer("right", vectors)

    @torch.no_grad()
    def iterate(self) -> None:
        """Make one step of power iteration towards the present singular vectors."""
        weights = self._weights()
        left = F.normalize((weights @ self.right[..., None])[..., 0], dim=-1)
        self.right.copy_(F.normalize((left[..., None, :] @ weights)[..., 0, :], dim=-1))

    def score_scales(self) -> Float[Tensor, "seed layer"]:
        """Return the factor γ_Q γ_K / (σ_Q σ_K) of each layer's scores; vectors are constants to the gradient."""
        products = (self._weights() @ self.right[..., None])[..., 0]
        left = F.normalize(products.detach(), dim=-1)
        return (self.gamma / (left * products).sum(dim=-1)).prod(dim=-1)

    def _weights(self) -> Float[Tensor, "seed layer 2 width width"]:
        return torch.stack([torch.stack(pair, dim=1) for pair in query_key_weights(self)], dim=1)

    def _overrides(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        noise: Tensor | None,
        mask: Tensor,
        query_positions: QueryPositions,
    ) -> Sequence[QueryScale]:
        """Return for each layer the factor of its queries."""
        del tokens, positions, noise, mask, query_positions
        return [QueryScale(scale) for scale in self.score_scales().unbind(1)]


def query_key_weights(model: Decoder) -> list[tuple[Tensor, Tensor]]:
    """Return W_Q and W_K of each layer, [seed, in, out], as they are stored."""
    pairs = []
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, Attention)
        assert attention.query is not None
        assert attention.key is not None
        pairs.append((attention.query.weight, attention.key.weight))
    return pairs


@dataclass(frozen=True)
class AttentionRowsProbe:
    """Measures of every row of attention on fixed windows, in float64.

    Attributes:
        windows: tokens, [sample, position].
    """

    windows: Int[Tensor, "sample position"]

    @torch.no_grad()
    def __call__(self, model: Decoder, step: int) -> dict[str, Tensor]:
        """Return entropy, floors, logits' norms and weights' norms by layer [seed, layer], and rows of one layer."""
        del step
        scales = model.score_scales() if isinstance(model, SigmaReparamDecoder) else None
        residual = model.activations(self.windows, ["residual"])["residual"]
        by_layer, rows = [], {}
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            scale = None if scales is None else scales[:, number]
            measures, rows = self._layer(layer, residual[number], scale)
            by_layer.append(measures)
        combined = {name: torch.stack([measures[name] for measures in by_layer], dim=1) for name in by_layer[0]}
        attention = model.activations(self.windows, ["attention"])["attention"][0]
        value = model.get_parameter("layers.0.attention.value.weight")
        return {**combined, **rows, **_common_axes(attention, value)}

    def _layer(
        self, layer: Layer, x: Tensor, scale: Float[Tensor, " seed"] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return means over rows, and the last head's rows of the first windows."""
        length, heads = x.shape[2], layer.attention.heads
        query, key = layer.queries_and_keys(x, QueryPositions((length,), 0))
        query = query if scale is None else query * scale[:, None, None, None]
        query, key = (part.double().unflatten(-1, (heads, -1)).transpose(2, 3) for part in (query, key))
        entropy, norm = attention_entropy(query, key, causal=True), logit_norms(query, key, causal=True)
        keys = torch.arange(1, length + 1, device=x.device, dtype=torch.float64)
        floor = entropy_floor(norm, keys)
        weights = _weight_norms(layer, heads, scale)
        bound = _norm_bounds(weights, x.double(), heads)
        measures = {
            "entropy": entropy[..., 1:],
            "floor": floor[..., 1:],
            "weight_floor": entropy_floor(bound, keys)[..., 1:],
            "logit_norm": norm[..., 1:],
        }
        means = {name: values.mean(dim=(1, 2, 3)) for name, values in measures.items()}
        slack = (entropy - floor).amin(dim=(1, 2, 3))
        means |= {"slack": slack, "bound_slack": (bound - norm).amin(dim=(1, 2, 3)), "weight_norm": weights.mean(dim=1)}
        rows = {"row_entropy": entropy[..., -1, :], "row_norm": norm[..., -1, :]}
        return means, {name: values.flatten(1)[:, :ROWS] for name, values in rows.items()}


def _weight_norms(layer: Layer, heads: int, scale: Tensor | None) -> Float[Tensor, "seed head"]:
    """Return ‖W_Q W_Kᵀ‖₂ of each head, with σReparam's factor."""
    attention = layer.attention
    assert attention.query is not None
    assert attention.key is not None
    query, key = (
        weight.double().unflatten(-1, (heads, -1)).transpose(1, 2)
        for weight in (attention.query.weight, attention.key.weight)
    )
    norms = of_finite(_spectral_norm, query @ key.mT)
    return norms if scale is None else norms * scale[:, None].double().abs()


def _spectral_norm(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, ord=2)


def _norm_bounds(weights: Float[Tensor, "seed head"], x: Tensor, heads: int) -> Tensor:
    """Return ‖W_Q W_Kᵀ‖₂ ‖x_i‖ ‖X‖₂/√d, which no row's norm of logits exceeds, [seed, sample, head, position]."""
    whole_norm = of_finite(_spectral_norm, x)[:, :, None, None]
    row_norms = torch.linalg.vector_norm(x, dim=-1)[:, :, None]
    return weights[:, None, :, None] * row_norms * whole_norm / (x.shape[-1] // heads) ** 0.5


def _common_axes(attention: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Return the numbers of `joma.studies.common_axes` of the first layer, means over samples and heads."""
    flat = attention.flatten(1, 2)
    visible = torch.ones(flat.shape[-2:], dtype=torch.bool, device=flat.device).tril().expand_as(flat)
    axes = attention_axes(flat, value[:, None].expand(-1, flat.shape[1], -1, -1), visible)
    return {name: axes[name].mean(dim=1) for name in NAMES}


def train(
    setting: LanguageSetting, context: Context, text: TextColumns, *, layers: int, rates: Sequence[float], probe: int
) -> xr.Dataset:
    """Train the model with and without σReparam at several learning rates, on the same windows of the text.

    Returns:
        Over `arm`, `rate`, `seed` and `step`: the training loss, and the measures of `AttentionRowsProbe`.
    """
    config = decoder_config(setting, Variant(layers=layers, alike=False, norm="pre"), text.types)
    config = replace(config, attention_bias=False)
    arms, steps = Arms("rate", list(rates)), whole("steps", setting.steps)
    seeds = torch.tensor(context.models(arms), device=context.device)

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        if isinstance(model, SigmaReparamDecoder):
            model.iterate()
        tokens, targets = text.window(step)
        return model.surprisal(tokens, targets, noise=noise.key(seeds, step)).mean(dim=(1, 2))

    every = whole("every", setting.every)
    early = schedule.logarithmic(10, min(every, steps))  # at large rates entropy falls within the first dozens of steps
    record = Record(
        AttentionRowsProbe(text.sample_windows(probe)),
        at=sorted({*early, *schedule.every(every, steps), steps}),
        dims={
            **dict.fromkeys(("entropy", "floor", "weight_floor", "logit_norm", "slack", "bound_slack"), ("layer",)),
            "weight_norm": ("layer",),
            **dict.fromkeys(("row_entropy", "row_norm"), ("row",)),
        },
        gradients=False,
    )
    trainings = [
        LabelledTraining(
            kind(config, generators=context.generators("weights", arms)),
            loss,
            label=label,
            optimiser=Optimiser("adam", context.per_model(rates), clip=setting.clip),
            steps=steps,
            record=record,
            arms=arms,
        )
        for label, kind in zip(("plain", "reparam"), (Decoder, SigmaReparamDecoder), strict=True)
    ]
    return xr.concat(context.fit_together(trainings), dim="arm").assign_coords(arm=list(ARMS))
