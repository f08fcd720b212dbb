"""The layer of the study `icl-autoregression` and the sequences s_{t+1} = W s_t that it is trained on.

    out = B Σ_t w_t (k_t* A s_T) s_t,    k_t = s_{t−1} for augmented tokens, w_t = 1;    k_t = s_t for others, w trained

Tokens are counted from the end of the context, s_{T−k}, so that contexts of different lengths are one array with a
mask. Complex numbers are pairs of real ones in the parameters, which the optimiser can then update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joma import noise
from joma.arguments import InputError, choice, whole
from joma.noise import check_generators
from joma.theory.in_context_autoregression import PROCESSES

ANGLES, STARTS, REFLECTIONS = range(3)  # sites of the noise
HAAR = "haar"  # a process of matrices that do not commute: W uniform among orthogonal matrices
REAL = ("rotations", HAAR)
DTYPE = torch.float32


@dataclass(frozen=True)
class Arm:
    """One kind of sequences and tokens.

    Attributes:
        process: a name of `PROCESSES`, or haar.
        length: T.
        augmented: whether a token holds the one before it too.
    """

    process: str
    length: int
    augmented: bool = True

    def __post_init__(self) -> None:
        choice("process", self.process, {**PROCESSES, HAAR: ""})
        whole("length", self.length, low=2)

    @property
    def is_real(self) -> bool:
        """Whether tokens and parameters are real."""
        return self.process in REAL

    @property
    def name(self) -> str:
        """The label of the arm in the run."""
        return f"{self.process if self.augmented else 'plain'}, {self.length}"


class LinearAttention(nn.Module):
    """One layer of linear attention for many models: A and B, and the weights of positions for plain tokens.

    Args:
        arms: the arm of each model; all real or all complex.
        dim: d.
        generators: one for each model.
        scale: standard deviation of the initial A and B, of real and imaginary parts each.

    >>> model = LinearAttention([Arm("unitary", 3)], 2, generators=[torch.Generator().manual_seed(0)], scale=0.1)
    >>> model(torch.ones(1, 5, 4, 2, dtype=torch.complex64)).shape
    torch.Size([1, 5, 2])
    """

    visible: Float[Tensor, "model back"]
    augmented: Bool[Tensor, "model 1"]

    def __init__(self, arms: Sequence[Arm], dim: int, *, generators: Sequence[torch.Generator], scale: float) -> None:
        super().__init__()
        check_generators(generators)
        if len({arm.is_real for arm in arms}) != 1 or len(arms) != len(generators):
            expected = f"{len(generators)} arms, all real or all complex"
            raise InputError("arms", expected, [arm.name for arm in arms], "split them")
        self.is_real = arms[0].is_real
        shape = (2, dim, dim) if self.is_real else (2, dim, dim, 2)
        draws = [scale * torch.randn(shape, generator=generator, dtype=DTYPE) for generator in generators]
        self.matrices = nn.Parameter(torch.stack(draws))
        # Augmented tokens are T − 1 pairs, plain ones are T; s_{T−k} is number k.
        counts = torch.tensor([arm.length - arm.augmented for arm in arms])
        longest = int(max(arm.length for arm in arms))
        self.register_buffer("visible", (torch.arange(longest) < counts[:, None]).to(DTYPE), persistent=False)
        self.register_buffer("augmented", torch.tensor([[arm.augmented] for arm in arms]), persistent=False)
        self.position = nn.Parameter(torch.ones(len(arms), longest, dtype=DTYPE))

    @property
    def A(self) -> Tensor:
        """The matrix of attention, [model, dim, dim]."""
        return self._matrix(0)

    @property
    def B(self) -> Tensor:
        """The matrix of values and output, [model, dim, dim]."""
        return self._matrix(1)

    def _matrix(self, index: int) -> Tensor:
        matrix = self.matrices[:, index]
        return matrix if self.is_real else torch.view_as_complex(matrix.contiguous())

    @property
    def weights(self) -> Float[Tensor, "model back"]:
        """The weight of each token, from the last one back: 1 if augmented, trained if plain, 0 beyond the context."""
        return torch.where(self.augmented, 1.0, self.position) * self.visible

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the prediction [model, sample, dim] from tokens [model, sample, back, dim], one more than the longest.

        Token 0 is s_T, token k is s_{T−k}.
        """
        values = tokens[:, :, :-1]
        keys = torch.where(self.augmented[..., None, None], tokens[:, :, 1:], values)
        query = (tokens[:, :, 0] @ self.A.mT)[..., None]  # A s_T
        scores = (keys.conj() @ query)[..., 0] * self.weights[:, None]
        return (scores[:, :, None] @ values)[:, :, 0] @ self.B.mT


def sequences(
    arms: Sequence[Arm], *, seeds: Tensor, step: Tensor | int, samples: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Return tokens [model, sample, back, dim] from s_T back, and the next s_{T+1} [model, sample, dim].

    Models are all seeds of the first arm, then those of the second, …; arms share their random numbers, and are all
    real or all complex.

    >>> tokens, target = sequences([Arm("unitary", 3)], seeds=torch.tensor([0]), step=0, samples=2, dim=1)
    >>> rotation = target / tokens[:, :, 0]
    >>> torch.allclose(rotation * tokens[:, :, 1], tokens[:, :, 0])
    True
    """
    key, longest = noise.key(seeds, step), max(arm.length for arm in arms)
    if arms[0].process == HAAR:
        tokens = _haar_tokens(key, samples, dim, longest)
        tokens = tokens.repeat(len(arms), 1, 1, 1)
        return tokens[:, :, 1:], tokens[:, :, 0]
    count = dim // 2 if arms[0].process == "rotations" else dim
    angle, start = (
        2 * math.pi * noise.uniform((samples, count), key=key, site=site).to(DTYPE) for site in (ANGLES, STARTS)
    )
    last = torch.cat([(arm.length - 1) * angle if arm.process == "fixed" else start for arm in arms])
    back = torch.arange(-1, longest + 1, device=seeds.device, dtype=DTYPE)
    phase = last[:, :, None] - back[:, None] * angle.repeat(len(arms), 1, 1)[:, :, None]
    if arms[0].is_real:
        planes = math.sqrt(2) * torch.stack([phase.cos(), phase.sin()], dim=-1)
        tokens = planes.flatten(-2)
    else:
        tokens = torch.polar(torch.ones_like(phase), phase)
    return tokens[:, :, 1:], tokens[:, :, 0]


def _haar_tokens(key: Tensor, samples: int, dim: int, longest: int) -> Float[Tensor, "seed sample back dim"]:
    """Return s_{T+1} back to s_{T−longest} for W uniform among orthogonal matrices.

    W is a product of reflections in normal vectors of growing dimension (Stewart 1980). Its inverse is as uniform as W,
    so that going back in time is the same as going forth.
    """
    # The noise is a multiple of 2⁻²⁴. Half of that is added, in float64: a vector of zeros would have no direction.
    uniform = noise.uniform((2, dim + 1, samples, dim), key=key, site=REFLECTIONS).double() + 2.0**-25
    radius = (-2 * uniform[:, 0].log()).sqrt()
    normal = (radius * (2 * math.pi * uniform[:, 1]).cos()).to(DTYPE)  # [seed, vector, sample, dim]
    corner = torch.ones(dim, dim, dtype=DTYPE, device=key.device).tril().flip(1)  # the last 1, 2, … coordinates
    rows = torch.eye(dim, dtype=DTYPE, device=key.device).expand(*normal[:, 0].shape, dim)
    for index in range(dim):
        vector = (normal[:, index] * corner[index])[..., None, :]
        rows = _reflected(rows, vector, first=dim - 1 - index, inside=corner[index] > 0)
    token = math.sqrt(dim) * normal[:, dim] / normal[:, dim].norm(dim=-1, keepdim=True)
    tokens = [token]
    for _ in range(longest + 1):
        tokens.append((tokens[-1][..., None, :] @ rows)[..., 0, :])
    return torch.stack(tokens, dim=2)


def _reflected(token: Tensor, vector: Tensor, *, first: int, inside: Tensor) -> Tensor:
    """Return the token after the map of a subspace that takes its first unit vector to the direction of `vector`.

    The map is a reflection along u + sign(u_first) e_first, as in Householder's QR, times a sign.
    """
    unit = vector / vector.norm(dim=-1, keepdim=True)
    sign = torch.where(unit[..., first] >= 0, 1.0, -1.0)[..., None]
    axis = unit + sign * torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)[first]
    axis = axis / axis.norm(dim=-1, keepdim=True)
    reflected = token - 2 * (token * axis).sum(dim=-1, keepdim=True) * axis
    return torch.where(inside, -sign * reflected, token)
