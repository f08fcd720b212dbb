"""Attention that is known by the attribute that holds it: a class of any name is listed if it is not seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joma.arguments import InputError
from joma.watch import AttentionNotSeen, attention
from joma.watch.unseen import BY_NAME, attention_kind
from tiny_models import random_normal, textbook_entropy

NAMES = (
    *("attn", "attention", "self_attn", "self_attention", "cross_attn", "mha", "xattn", "attn1", "attns.1", "x_attn"),
    *("core_attention", "attention_layer", "selfAttention", "multihead_attn", "attend", "attn_block", "encoder.0.attn"),
)
PARTS = (
    *(
        "attn_dropout",
        "attn_norm",
        "c_attn",
        "q_attn",
        "attn.q_proj",
        "attn_mask",
        "attention_bias",
        "attn.dropout",
        "mlp",
    ),
    *("post_attention_layernorm", "attention.output", "attn_hc", "q_proj", "key_conv_attn_weights", "heads.0"),
)


def sigmoid(x: Tensor) -> Tensor:
    return (x @ x.mT).sigmoid() @ x


def squared_relu(x: Tensor) -> Tensor:
    return torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", x, x).relu() ** 2, x)


def gumbel(x: Tensor) -> Tensor:
    return F.gumbel_softmax(torch.bmm(x, x.mT), dim=-1) @ x


def tensordot(x: Tensor) -> Tensor:
    return torch.stack([torch.tensordot((s @ s.mT).softmax(-1), s, 1) for s in x])


def tensordot_alone(x: Tensor) -> Tensor:
    return torch.stack([torch.tensordot(torch.tensordot(s, s.mT, 1).sigmoid(), s, 1) for s in x])


def linear(x: Tensor) -> Tensor:
    return F.elu(x) @ torch.matmul(input=F.elu(x).mT, other=x)


UNFOLLOWED = [sigmoid, squared_relu, gumbel, tensordot, tensordot_alone, linear]


class A(nn.Module):
    """Attention whose class does not say so."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class Sums(nn.Module):
    """Linear attention by running sums of elementwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.to_q(x)[..., None] * (self.to_k(x)[..., None] * x[..., None, :]).cumsum(1)).sum(-2)


class Around(nn.Module):
    """A module that holds another as `attn`, in a residual connection."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def by_softmax(x: Tensor) -> Tensor:
    return (x @ x.mT / 2).softmax(-1) @ x


def by_sdpa(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def eager_entropy(x: Tensor) -> Tensor:
    return textbook_entropy((x @ x.mT / 2).softmax(-1)).mean()


def not_seen(model: nn.Module) -> dict[str, str]:
    """Return what a pass lists beside one recorded layer `0`, whose entropy is that of its weights."""
    x = random_normal(2, 5, 4)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attention(model) as seen:
            model(x)
    assert [warning.category for warning in caught] == [AttentionNotSeen] * bool(seen.not_seen)
    torch.testing.assert_close(seen.passes[0]["0"].squeeze(), eager_entropy(x), atol=1e-6, rtol=0)
    return seen.not_seen


@pytest.mark.parametrize("compute", UNFOLLOWED, ids=lambda compute: compute.__name__)
@pytest.mark.parametrize("recorded", [by_softmax, by_sdpa])
def test_unfollowed_attention_of_a_class_of_any_name_is_listed(
    compute: Callable[[Tensor], Tensor], recorded: Callable[[Tensor], Tensor]
) -> None:
    model = nn.Sequential(A(recorded), Around(A(compute)), Around(Around(A(compute))))
    reason = "A calls no SDPA, and no softmax whose result averages values"
    assert not_seen(model) == {"1.attn": reason, "2.attn.attn": reason}


def test_projections_of_queries_are_a_clue_where_nothing_is_multiplied() -> None:
    assert list(not_seen(nn.Sequential(A(by_softmax), Around(Sums())))) == ["1.attn"]


def test_attention_inside_a_wrapper_is_listed_by_the_wrapper() -> None:
    inside = nn.Sequential(nn.LayerNorm(4), A(sigmoid))
    assert list(not_seen(nn.Sequential(A(by_softmax), Around(inside)))) == ["1.attn.1"]

    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn = A(sigmoid)

        def forward(self, x: Tensor) -> Tensor:
            return self.fn(F.layer_norm(x, (4,)))

    assert list(not_seen(nn.Sequential(A(by_softmax), Around(PreNorm())))) == ["1.attn"]


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()


class Gate(nn.Module):
    """A squeeze-and-excitation gate, which some vision models call attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean(1, keepdim=True)).sigmoid()


class Mixer(nn.Module):
    """A layer that mixes positions by constants: a parameter and a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(5))
        self.register_buffer("average", torch.full((5, 5), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.average @ (self.weight.mT @ x)


class Scores(nn.Module):
    """The weights alone, whose parent averages the values."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT / 2).softmax(-1)


class Averages(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x) @ x


QUIET = {
    "recorded inside": nn.Sequential(nn.LayerNorm(4), A(by_sdpa)),
    "no computation": nn.Identity(),
    "an identity of one's own": A(lambda x: x),
    "a projection": nn.Linear(4, 4),
    "a list of layers": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
    "a norm": Norm(),
    "dropout": nn.Dropout(0.5),
    "a gate": Gate(),
    "constants": Mixer(),
}


@pytest.mark.parametrize("kind", QUIET)
def test_what_is_called_attention_and_is_none_is_not_listed(kind: str) -> None:
    assert not_seen(nn.Sequential(A(by_softmax), Around(QUIET[kind]))) == {}


def test_a_module_that_is_not_called_is_not_listed() -> None:
    model = nn.Sequential(A(by_softmax))
    model[0].attn = A(sigmoid)
    assert not_seen(model) == {}


def test_weights_that_a_parent_uses_are_seen() -> None:
    x = random_normal(2, 5, 4)
    model = nn.Sequential(Averages(Scores()))
    with torch.no_grad(), attention(model) as seen:
        model(x)
    assert seen.not_seen == {}
    torch.testing.assert_close(seen.passes[0]["0"].squeeze(), eager_entropy(x), atol=1e-6, rtol=0)


def test_a_model_in_which_nothing_else_is_recorded_is_refused_by_the_name_of_its_module() -> None:
    model = nn.Sequential(Around(A(sigmoid)))
    message = r"must compute attention that can be measured, got Sequential: 0.attn \(A calls no SDPA"
    with pytest.raises(InputError, match=message), attention(model):
        model(random_normal(2, 5, 4))


@pytest.mark.parametrize("name", NAMES)
def test_names_of_attention(name: str) -> None:
    assert attention_kind(nn.Identity(), name) is BY_NAME
    assert attention_kind(nn.Identity(), f"layers.0.{name}") is BY_NAME


@pytest.mark.parametrize("name", PARTS)
def test_names_of_parts_of_attention(name: str) -> None:
    assert attention_kind(nn.Identity(), f"layers.0.{name}") is None
