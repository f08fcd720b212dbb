"""The layer of `icl-autoregression` and its sequences: the definition written out, and what W is."""

import numpy as np
import pytest
import torch

from joma.arguments import InputError
from joma.studies.related.icl_autoregression_model import HAAR, Arm, LinearAttention, sequences

SEEDS = torch.tensor([3, 4])


def generators(count):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def of_models(arms):
    return [arm for arm in arms for _ in SEEDS]


@pytest.mark.parametrize(
    "arms",
    [
        [Arm("unitary", 4), Arm("unitary", 2), Arm("fixed", 3), Arm("unitary", 3, augmented=False)],
        [Arm("rotations", 3)],
        [Arm(HAAR, 3)],
    ],
)
def test_the_layer_is_the_sum_over_the_tokens_of_its_context(arms):
    model = LinearAttention(of_models(arms), 4, generators=generators(2 * len(arms)), scale=0.5)
    tokens, _ = sequences(arms, seeds=SEEDS, step=5, samples=3, dim=4)
    with torch.no_grad():
        model.position.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
        out = model(tokens)
        for number, arm in enumerate(of_models(arms)):
            s = tokens[number].flip(1)[:, -arm.length :]  # s_1 to s_T
            expected = torch.zeros_like(out[number])
            for t in range(1 if arm.augmented else 0, arm.length):
                weight = 1.0 if arm.augmented else model.position[number, arm.length - 1 - t]
                key = s[:, t - 1] if arm.augmented else s[:, t]
                score = (key.conj() * (s[:, -1] @ model.A[number].mT)).sum(-1, keepdim=True)
                expected += weight * score * (s[:, t] @ model.B[number].mT)
            torch.testing.assert_close(out[number], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("process", ["unitary", "fixed", "rotations", HAAR])
def test_one_matrix_takes_each_token_to_the_next(process):
    tokens, target = sequences([Arm(process, 6)], seeds=SEEDS, step=1, samples=4, dim=4)
    s = torch.cat([target[:, :, None], tokens], dim=2).flip(2)  # from s_0 on
    assert s.shape == (2, 4, 8, 4)
    torch.testing.assert_close(s.abs().square().mean(-1), torch.ones(2, 4, 8), rtol=0, atol=1e-5)
    # W is determined by four independent pairs: the fifth must follow. Five tokens have a recursion of order four.
    first, second = s[:, :, :4].mT, s[:, :, 1:5].mT
    W = torch.linalg.solve(first.mT.to(torch.complex128), second.mT.to(torch.complex128)).mT
    following = (W @ s[:, :, 4, :, None].to(torch.complex128))[..., 0]
    torch.testing.assert_close(following, s[:, :, 5].to(torch.complex128), rtol=0, atol=1e-2)
    eye = torch.eye(4, dtype=torch.complex128).expand(2, 4, 4, 4)
    torch.testing.assert_close(W @ W.mH, eye, rtol=0, atol=1e-2)


def test_a_fixed_start_is_fixed():
    tokens, _ = sequences([Arm("fixed", 5)], seeds=SEEDS, step=1, samples=4, dim=2)
    torch.testing.assert_close(tokens[:, :, 4], torch.ones(2, 4, 2, dtype=torch.complex64), rtol=0, atol=1e-5)


def test_orthogonal_matrices_are_uniform():
    """Moments of Haar's measure: E tr W = 0, E (tr W)² = 1, E tr W² = 1, here as correlations of tokens."""
    tokens, _ = sequences([Arm(HAAR, 3)], seeds=torch.tensor([0]), step=0, samples=40_000, dim=3)
    s = tokens[0] / np.sqrt(3)
    first, second = (s[:, 0] * s[:, 1]).sum(-1), (s[:, 0] * s[:, 2]).sum(-1)
    assert abs(float(first.mean())) < 0.015
    assert float(first.square().mean()) == pytest.approx(1 / 3, abs=0.01)
    assert float(second.mean()) == pytest.approx(1 / 3, abs=0.015)  # E W² = E tr W² / d


def test_orthogonal_matrices_exist_for_noise_of_zero(monkeypatch):
    """The noise may be 0 exactly, once in 2²⁴ numbers: its normal vector still has a direction."""
    from joma import noise

    monkeypatch.setattr(noise, "uniform", lambda shape, *, key, **_: torch.zeros(key.shape[1], *shape))
    tokens, target = sequences([Arm(HAAR, 3)], seeds=SEEDS, step=0, samples=2, dim=3)
    assert torch.isfinite(tokens).all()
    torch.testing.assert_close(target.norm(dim=-1), torch.full((2, 2), 3**0.5))


def test_arms_and_seeds_share_no_numbers_they_should_not():
    arms = [Arm("unitary", 3), Arm("unitary", 5)]
    tokens, _ = sequences(arms, seeds=SEEDS, step=2, samples=3, dim=2)
    alone, _ = sequences(arms[1:], seeds=SEEDS[1:], step=2, samples=3, dim=2)
    torch.testing.assert_close(tokens[3], alone[0])
    torch.testing.assert_close(tokens[0], tokens[2])
    assert not torch.equal(tokens[0], tokens[1])


def test_bad_arms_are_refused():
    with pytest.raises(InputError, match="`process` must"):
        Arm("unitry", 3)
    with pytest.raises(InputError, match="`length` must"):
        Arm("unitary", 1)
    with pytest.raises(InputError, match="all real or all complex"):
        LinearAttention([Arm("unitary", 3), Arm(HAAR, 3)], 2, generators=generators(2), scale=0.1)
