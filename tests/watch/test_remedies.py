"""Every remedy that is tried here works: a refused call is made again as its message says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joma.arguments import InputError, StateError
from joma.watch import ProbeFailed, Recorder, activations, attention, gradient_norms

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore::joma.watch.AttentionSwitched")


class Sdpa(nn.Module):
    """A block without an attention module: no list of blocks is found in a model of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.scaled_dot_product_attention(*self.project(x).chunk(3, dim=-1)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.h = nn.Linear(8, 8), nn.ModuleList([Sdpa(), Sdpa(), Sdpa()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.h:
            x = block(x)
        return x


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Sdpa()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


BLOCKS = {Stack: ["h.0", "h.1", "h.2"], Single: ["block"], lambda: nn.Sequential(Sdpa(), Sdpa()): ["0", "1"]}


@pytest.mark.parametrize("build", BLOCKS)
@pytest.mark.parametrize("blocks", [None, "nothing", r"layers\.\d+$"])
def test_the_pattern_that_a_refusal_of_blocks_suggests_names_blocks(
    build: Callable[[], nn.Module], blocks: str | None
) -> None:
    for watch in (
        lambda pattern: Recorder(build(), X, residual=True, blocks=pattern),
        lambda pattern: activations(build(), blocks=pattern).__enter__(),
    ):
        with pytest.raises(InputError, match=r"name (them|one) by a regular expression, such as") as refusal:
            watch(blocks)
        suggested = re.search(r"`blocks=r'(.*)'`", refusal.value.remedy)
        assert suggested is not None
        watch(suggested[1])
    model = build()
    recorder = Recorder(model, X, residual=True, gradients=True, blocks=suggested[1], strict=True)
    model(X).sum().backward()
    keys = [key for key in recorder(0) if key.startswith("residual_norm/")]
    assert keys == [f"residual_norm/{name}" for name in BLOCKS[build]]


def test_a_model_that_is_a_single_function_is_told_to_be_put_into_another() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Alone()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(InputError, match="put the model into a module that calls it, and name it by a regular"):
        Recorder(Alone(), X, residual=True)
    assert "residual_norm/inner" in Recorder(Around(), X, residual=True, blocks="inner", strict=True)(0)


def recorder(**options: Any) -> Recorder:
    after_a_probe = Recorder(encoder(), X, **{"at": 1, "strict": True, **options})
    after_a_probe(0)
    return after_a_probe


def watched(model: nn.Module | None = None, **options: Any) -> Any:
    model = model or encoder()
    with attention(model, **options) as recording, torch.no_grad():
        model(X)
    return recording


def trained() -> nn.Module:
    model = encoder()
    model(X).sum().backward()
    return model


ROWS = torch.ones(2, 5, dtype=torch.bool)
TRIED: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "at, a type": (lambda: recorder(at="x"), "write at=100 for every 100 steps", lambda: recorder(at=100)),
    "at, none": (lambda: recorder(at=[]), "write at=100 for every 100 steps", lambda: recorder(at=100)),
    "forward": (
        lambda: recorder(forward=3),
        r"write forward=lambda model, batch: model\(batch\)",
        lambda: recorder(forward=lambda model, batch: model(batch)),
    ),
    "measures": (lambda: recorder(measures="entrop"), "did you mean 'entropy'", lambda: recorder(measures="entropy")),
    "options": (lambda: recorder(precision="hig"), "did you mean 'high'", lambda: recorder(precision="high")),
    "top": (lambda: recorder(top=0), "give a number inside the range", lambda: recorder(top=1)),
    "ranks": (lambda: recorder(ranks="x"), r"the matrices are .*linear1", lambda: recorder(ranks="linear1")),
    "ranks, pattern": (lambda: recorder(ranks="("), "correct it", lambda: recorder(ranks="()")),
    "blocks, pattern": (lambda: recorder(blocks="("), "correct it", lambda: recorder(blocks=r"(\d)")),
    "rows": (lambda: recorder(rows="some"), 'use "masks" for the rows', lambda: recorder(rows="masks")),
    "rows, shape": (
        lambda: recorder(rows=ROWS[:, :3]),
        'use rows="masks", which follows',
        lambda: recorder(rows="masks"),
    ),
    "sinks": (
        lambda: recorder(sinks=torch.tensor([0.5])),
        "give key numbers",
        lambda: recorder(sinks=torch.tensor([0]), measures="sink_mass"),
    ),
    "log": (lambda: recorder(log=3), "pass one of them", lambda: recorder(log=lambda scalars, step: (scalars, step))),
    "step": (lambda: recorder()(2.5), "give one whole number", lambda: recorder()(2)),
    "step, range": (lambda: recorder()(-1), "give a number inside the range", lambda: recorder()(1)),
    "step, order": (
        lambda: [recorder.probe(step) for recorder in [recorder()] for step in (5, 3)],
        "count steps upwards, and use a new Recorder for a new training",
        lambda: [recorder.probe(step) for recorder in [recorder()] for step in (3, 5)],
    ),
    "batch": (
        lambda: Recorder(encoder(), X[:, :1], at=1, strict=True)(0),
        "give a batch of longer sequences",
        lambda: Recorder(encoder(), X[:, :2], at=1, strict=True)(0),
    ),
    "no probe": (
        lambda: Recorder(encoder(), X).dataset(),
        "call it at a step that is due",
        lambda: recorder().dataset(),
    ),
    "gradients": (
        lambda: gradient_norms(encoder()),
        r"call it after `loss.backward\(\)`",
        lambda: gradient_norms(trained()),
    ),
    "distributed": (
        lambda: recorder(distributed=True),
        "call `torch.distributed.init_process_group`, or leave `distributed` out",
        recorder,
    ),
    "nothing watched": (
        lambda: activations(encoder(), residual=False, ranks=False).__enter__(),
        "set one of them",
        lambda: activations(encoder(), residual=True, ranks=False).__enter__(),
    ),
    "no pass": (
        lambda: attention(encoder()).__enter__().dataset(),
        r"call `model\(...\)` inside the context",
        lambda: watched().dataset(),
    ),
    "model": (lambda: attention("gpt2").__enter__(), "load it first", lambda: watched(encoder())),
    "no maps": (
        lambda: watched().maps(0),
        r"watch with `attention\(model, maps=True\)`",
        lambda: watched(maps=True).maps(0),
    ),
    "maps": (lambda: watched(maps="x"), "write maps=True for 256 MiB", lambda: watched(maps=True).maps(0)),
    "tokens": (
        lambda: watched(maps=True).maps(0, tokens=torch.zeros(5, dtype=torch.long)),
        "pass `tokenizer=` as well, with a method `decode`",
        lambda: watched(maps=True).maps(0, tokens=torch.zeros(5, dtype=torch.long), tokenizer=Tokenizer()),
    ),
    "window": (
        lambda: watched(maps=True).maps(0, queries=[]),
        "choose at least one",
        lambda: watched(maps=True).maps(0, queries=[0]),
    ),
    "TorchScript": (
        lambda: attention(torch.jit.trace(Sdpa(), X)).__enter__(),
        "watch the original module",
        lambda: watched(Sdpa()),
    ),
    "no attention": (
        lambda: watched(nn.Linear(8, 8)).dataset(),
        "average(s)? values by a softmax|call the model itself",
        lambda: watched(Sdpa()).dataset(),
    ),
}


class Tokenizer:
    def decode(self, numbers: list[int]) -> str:
        return str(numbers)


@pytest.mark.parametrize("case", TRIED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_remedy_says_works(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is outside the tests
    refused, remedy, mended = TRIED[case]
    with pytest.raises((InputError, StateError)) as refusal:
        refused()
    assert re.search(remedy, refusal.value.remedy), refusal.value
    mended()


def test_the_bytes_that_a_refusal_of_maps_names_are_enough() -> None:
    with pytest.raises(InputError, match="watch with maps=") as refusal:
        watched(maps=1).maps(0)
    needed = re.search(r"maps=(\d+) to keep all layers", refusal.value.remedy)
    assert needed is not None
    recording = watched(maps=int(needed[1]))
    assert all(recording.maps(layer).sizes["head"] == 2 for layer in (0, 1))


def test_a_recorder_without_gradients_is_told_where_they_are() -> None:
    model = encoder()
    probes = Recorder(model, X, at=1, gradients=True)
    probes(0)
    with pytest.warns(ProbeFailed, match=r"call it after `loss.backward\(\)`, before `optimizer.zero_grad\(\)`"):
        probes(1)
    model(X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProbeFailed)
        assert "gradient_norm/layers.0" in probes(2)
