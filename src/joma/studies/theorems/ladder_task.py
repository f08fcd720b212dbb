"""What the arms of the trained ladder learn: sequences of tokens that are independent given their class.

Arms with one query predict the class of the sequence, arms with all positions each next token. All arms of a seed see
the same stream of sequences, drawn afresh at every step (some arms read the same few at every step), and are measured
on the same probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from joma import noise
from joma.arguments import whole
from joma.data.tokens import Contexts, log_normal_classes, stream_contexts
from joma.models.one_layer import OneLayer, prefix_frequencies
from joma.models.one_layer_config import OneLayerConfig
from joma.probes.entropy import shannon_entropy
from joma.studies.surprisal import surprisal
from joma.studies.theorems.ladder_arms import Arm
from joma.study import Context

PROBE, FIXED = -1, -2  # the steps of the stream at which probe and fixed batch are drawn: training has none of them
DTYPE = torch.float32


@dataclass(frozen=True)
class TrainedLadderConfig:
    """The trained arms of the ladder and their data."""

    trained_arms: tuple[str, ...] = ("base", "constant", "separable", "product")
    """Names of `ladder_arms.ARMS`."""
    trained_rates: tuple[float, ...] = (3.0,)
    """Each arm is trained with its learning rate times each of these factors."""
    trained_steps: int = 3000
    trained_classes: int = 8
    trained_distinct: int = 10
    trained_common: int = 10
    trained_scale: float = 1.5
    """Standard deviation of the logarithm of a token's weight."""
    trained_length: int = 12
    trained_batch: int = 64
    trained_probe: int = 256
    """Sequences of each seed on which the entropy and the loss are measured."""
    trained_optimum: int = 0
    """Sequences of each seed for which the optimum with all positions is computed; 0 leaves it out."""

    @property
    def trained_tokens(self) -> int:
        """The number of different tokens."""
        return self.trained_distinct + self.trained_common


def model_config(config: TrainedLadderConfig, arm: Arm) -> OneLayerConfig:
    """Return the model of an arm at the sizes of the data."""
    return arm.model(tokens=config.trained_tokens, classes=whole("trained_classes", config.trained_classes))


class Task:
    """The sequences that a group of arms is trained and measured on, and their losses and measures.

    Attributes:
        model_config: the model of all arms in the group.
        worlds: P[token | class] of each seed, by kind of classes.
        constant: which models are trained with a constant gradient.
        row_weight: the weight of each position in the loss of models with all positions, [model, 1, position].
        probe: the sequences on which models are measured.
        fixed_batch: the sequences that every step reads, for all arms of the group; None if they are drawn afresh.
    """

    def __init__(
        self, config: TrainedLadderConfig, context: Context, arms: Sequence[Arm], *, dtype: torch.dtype = DTYPE
    ) -> None:
        self.config, self.arms, self.model_config = config, arms, model_config(config, arms[0])
        self.all_positions = arms[0].all_positions
        self.seeds = torch.tensor(context.seeds, device=context.device)
        self.worlds = {
            world: _classes(config, context, world).to(dtype) for world in sorted({arm.world for arm in arms})
        }
        self.constant = torch.tensor(context.per_model([arm.constant for arm in arms]), device=context.device)
        rows = torch.ones(len(arms), config.trained_length - 1, dtype=dtype)
        rows[[arm.last for arm in arms], :-1] = 0.0
        weights = torch.stack(context.per_model(list(rows / rows.sum(-1, keepdim=True))))
        self.row_weight = weights[:, None].to(context.device)
        self.probe = self.draw(PROBE, config.trained_probe)
        self.fixed_batch = self.draw(FIXED, arms[0].repeated) if arms[0].repeated else None

    def draw(self, step: Tensor | int, samples: int) -> Contexts:
        """Return the sequences of each model at a step; arms on the same classes have the same ones."""
        key, length = noise.key(self.seeds, step), self.config.trained_length
        by_world = {
            world: stream_contexts(frequency, samples=samples, length=length, key=key)
            for world, frequency in self.worlds.items()
        }
        drawn = [by_world[arm.world] for arm in self.arms]
        return Contexts(
            token=torch.cat([contexts.token for contexts in drawn]),
            frequency=torch.cat([contexts.frequency for contexts in drawn]),
            label=torch.cat([contexts.label for contexts in drawn]),
        )

    def losses(self, model: OneLayer, contexts: Contexts) -> Float[Tensor, " model"]:
        """Return the loss of each model: cross entropy, or −Σ_k g_k h_k for a constant gradient g at the outputs."""
        outputs = model(self.inputs(contexts))
        target = contexts.token[..., 1:] if self.all_positions else contexts.label
        cross_entropy = surprisal(outputs, target)
        if self.all_positions:
            return (cross_entropy * self.row_weight).sum(-1).mean(-1)
        chosen = outputs.gather(-1, target[..., None])[..., 0]
        return torch.where(self.constant[:, None], outputs.mean(-1) - chosen, cross_entropy).mean(-1)

    def inputs(self, contexts: Contexts) -> Tensor:
        """Return what the models see: all tokens but the last, which is predicted, or the frequencies of all."""
        return contexts.token[..., :-1] if self.all_positions else contexts.frequency

    def loss(self, model: OneLayer, step: Tensor) -> Float[Tensor, " model"]:
        """Return the loss of each model on the sequences of a step."""
        contexts = self.fixed_batch
        return self.losses(model, self.draw(step, self.config.trained_batch) if contexts is None else contexts)

    @torch.no_grad()
    def measure(self, model: OneLayer, _step: int) -> dict[str, Tensor]:
        """Return the entropy of attention and the loss on the probe, and the spread of the logits over tokens."""
        spread = model.logits.std(-1, correction=0).mean(-1)
        return {"entropy": self.entropy(model), "probe_loss": self.losses(model, self.probe), "spread": spread}

    def entropy(self, model: OneLayer) -> Float[Tensor, " model"]:
        """Return the mean entropy of attention over positions, as a share of its largest possible value, ln n.

        The positions of a token share its attention: H = H(b) + Σ_l b_l ln n_l, where token l occurs n_l times among n
        positions. With all positions, the rows of the second half are measured.
        """
        b = model.attend(self.inputs(self.probe))
        if self.all_positions:
            length = self.config.trained_length
            visible = torch.arange(1, length, device=b.device)
            x = prefix_frequencies(self.inputs(self.probe), self.config.trained_tokens, b.dtype)
            late = visible >= length / 2
            b, x, visible = b[..., late, :], x[..., late, :], visible[late].to(b.dtype)
        else:
            x, visible = self.probe.frequency, torch.tensor(self.config.trained_length, device=b.device).to(b.dtype)
        counts = x * visible[..., None]
        entropy = shannon_entropy(b, check=False) + (b * counts.clamp_min(1.0).log()).sum(-1)
        return (entropy / visible.log()).flatten(1).mean(-1)


def _classes(config: TrainedLadderConfig, context: Context, world: str) -> Float[Tensor, "seed label token"]:
    return log_normal_classes(
        generators=context.generators("ladder, classes"),
        classes=config.trained_classes,
        distinct=config.trained_distinct,
        common=config.trained_common,
        scale=config.trained_scale,
        separable=world == "separable",
    ).frequency.to(context.device)
