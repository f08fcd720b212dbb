"""What a recording did not see: each module that seems to be attention and was not recorded has a reason."""

from __future__ import annotations

import re
import threading
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXModel

from joma.arguments import InputError
from joma.watch import AttentionNotSeen, attention
from joma.watch.unseen import PARTS_WITHOUT_ATTENTION, attention_kind, calls_no_attention, describe
from tiny_models import CausalBlock, random_normal


def test_parts_of_the_models_of_transformers_that_are_not_watched_build_and_call_no_attention() -> None:
    calls = re.compile(r"(?i)softmax|scaled_dot_product|attention_interface|\w(attention|attn|MHA)\(")
    names, attending = [], []
    for path in Path(str(find_spec("transformers").origin)).parent.glob("models/*/modeling_*.py"):  # pyright: ignore[reportOptionalMemberAccess]
        for source in path.read_text(encoding="utf-8").split("\nclass ")[1:]:
            name = re.split(r"\W", source, maxsplit=1)[0]
            body = source.partition("\ndef ")[0].partition("\n@")[0]
            if PARTS_WITHOUT_ATTENTION.search(name):
                names.append(name)
                attending += [name] if calls.search(body) else []
    assert len(names) > 300
    assert not attending


def test_known_parts_are_not_watched_unless_they_are_changed() -> None:
    config = GPTNeoXConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=8)
    model = GPTNeoXModel(config)
    layer: Any = model.layers[0]
    with attention(model):
        assert watched_modules(model) == ["", "layers.0", "layers.0.attention"]
        model(torch.zeros(1, 4, dtype=torch.int64))
    layer.mlp.forward = layer.mlp.forward
    with attention(model):
        assert watched_modules(model) == ["", "layers.0", "layers.0.attention", "layers.0.mlp"]
        model(torch.zeros(1, 4, dtype=torch.int64))

    class OwnMLP(type(layer.mlp)):
        """A part of a user's own model."""

    assert not calls_no_attention(OwnMLP)


def watched_modules(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_hooks]


class Seen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


class SinkAttention(nn.Module):
    """Attention with a column of sinks, which is dropped after the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.cat([x @ x.mT, torch.ones(*x.shape[:2], 1)], -1)
        return logits.softmax(-1)[..., :-1] @ x


class SigmoidAttention(nn.Module):
    """Attention whose weights are no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).sigmoid() @ x


class ChannelAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x.mT, x.mT, x.mT).mT


class XCA(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ((x.mT @ x).softmax(-1) @ x.mT).mT


class MambaMixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class SelfAttention(nn.Module):
    """A wrapper around attention of any kind, which is listed only by what is in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


REASONS = {
    SigmoidAttention: "SigmoidAttention calls no SDPA, and no softmax whose result averages values",
    ChannelAttention: "ChannelAttention attends to channels, not to positions",
    XCA: "XCA attends to channels, not to positions",
    MambaMixer: "MambaMixer is a state-space model: it has no attention weights",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_partial_recording_lists_what_it_did_not_see_and_warns_once(kind: type[nn.Module]) -> None:
    model = nn.Sequential(Seen(), *(SelfAttention(kind()) for _ in range(3)), SelfAttention(Seen()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attention(model) as seen:
            for _ in range(2):
                model(random_normal(1, 4, 3))
    assert list(seen.passes[0]) == ["0", "4.inner"]
    assert seen.not_seen == {f"{index}.inner": REASONS[kind] for index in (1, 2, 3)}
    (warning,) = caught
    assert warning.category is AttentionNotSeen
    assert f"3 modules 1.inner … 3.inner ({REASONS[kind]}); see `not_seen`" in str(warning.message)


def test_a_model_without_attention_is_told_so() -> None:
    model = nn.Sequential(MambaMixer(), MambaMixer())
    message = r"`model` must compute attention, got Sequential: 0 and 1 \(MambaMixer is a state-space model"
    with pytest.raises(InputError, match=message), attention(model):
        model(random_normal(1, 4, 3))
    unseen = nn.Sequential(SigmoidAttention())
    message = "must compute attention that can be measured, got Sequential: 0 .*; let it call `torch.nn.functional"
    with pytest.raises(InputError, match=message), attention(unseen):
        unseen(random_normal(1, 4, 3))


def test_a_module_that_fails_is_not_listed() -> None:
    class FailingAttention(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise RuntimeError("stop")

    model = nn.Sequential(Seen(), FailingAttention())
    with attention(model) as seen:
        with pytest.raises(RuntimeError, match="stop"):
            model(random_normal(1, 4, 3))
        model[0](random_normal(1, 4, 3))
    assert not seen.not_seen


def test_calls_from_other_threads_are_told_in_one_line() -> None:
    model, x = CausalBlock(nn.functional.scaled_dot_product_attention), random_normal(1, 4, 8)
    context = attention(model)
    seen = context.__enter__()
    for _ in range(2):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    model(x)
    with pytest.warns(AttentionNotSeen, match="calls of the model from other threads are not recorded; call it in"):
        context.__exit__(None, None, None)
    assert len(seen.passes) == 1


@pytest.mark.parametrize("meta", [True, False])
def test_meta_and_fake_tensors_go_on(meta: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, x = nn.Sequential(Seen(), SelfAttention(SinkAttention())), random_normal(1, 4, 3)
    mode = torch.device("meta") if meta else FakeTensorMode()
    context = attention(model)
    seen = context.__enter__()
    with mode:
        assert model(torch.zeros(1, 4, 3)).shape == x.shape
    model(x)
    with pytest.warns(AttentionNotSeen, match="it ran on meta or fake tensors"):
        context.__exit__(None, None, None)
    assert list(seen.not_seen) == ["0", "1.inner"]
    assert len(seen.passes) == 1
    with pytest.raises(InputError, match=r"0 and 1.inner .*meta or fake tensors"), attention(model), mode:
        model(torch.zeros(1, 4, 3))


@pytest.mark.parametrize("name", ["BertAttentionOutput", "AttentionDropout", "AttentionMask", "Linear", "LlamaMLP"])
def test_parts_of_attention_are_no_attention(name: str) -> None:
    assert attention_kind(type(name, (nn.Module,), {})()) is None


def test_modules_are_grouped_by_their_reason() -> None:
    assert describe({"a": "A", "b": "A"}) == "a and b (A)"
