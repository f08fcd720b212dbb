"""Training on CUDA: a captured step does what an eager one does, however it is recorded and whatever is halved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from joma import noise
from joma.models.steady import FrozenAttentionDecoder
from joma.models.transformer import Decoder, DecoderConfig
from joma.train import Compute, Optimiser, Record, Saving, fit, packed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's compiler has its own to say
]


def trained(*, gradients=True, **options):
    config = DecoderConfig(vocabulary=7, width=32, layers=2, heads=2, positions="learned", length=6)
    model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in range(3)]).cuda()
    tokens = torch.randint(7, (20, 6), generator=torch.Generator().manual_seed(0)).cuda()

    def loss(model: Decoder, step: Tensor) -> Tensor:
        rows = tokens[(torch.arange(8, device="cuda") + step) % 20]
        return model.surprisal(rows[:, :-1], rows[:, 1:]).mean(dim=(1, 2))

    def measure(model: Decoder, _: int) -> dict[str, Tensor]:
        return {"norm": model.layers[0].lower.weight.norm(dim=(1, 2))}  # pyright: ignore[reportAttributeAccessIssue]

    optimiser = Optimiser("adamw", 1e-2, weight_decay=0.01, clip=1.0)
    record = Record(measure, at=(0, 3, 10, 29, 30), gradients=gradients)
    return fit(model, loss, optimiser=optimiser, steps=30, record=record, compute=Compute(**options))


@pytest.mark.parametrize("precision", ["highest", "bf16"])
def test_a_recorded_step_may_be_a_replay(precision):
    eager, replayed = (trained(precision=precision, compiled=False, gradients=gradients) for gradients in (True, False))
    for name in ("loss", "norm"):
        assert float(abs(eager[name] - replayed[name]).max()) < (1e-5 if precision == "highest" else 2e-2)
    assert bool((eager.loss.isel(step=-1) < 0.8 * eager.loss.isel(step=0)).all())


@pytest.mark.parametrize("compiled", [False, True])
def test_halved_weights_train_as_whole_ones(monkeypatch, compiled):
    whole = trained(precision="bf16", compiled=compiled, gradients=False)
    monkeypatch.setattr(packed, "LARGE", 1000)
    names, halve = [], packed.PackedAdam.half_copies

    def noted(self, given):
        found = halve(self, given)
        names.extend(found)
        return found

    monkeypatch.setattr(packed.PackedAdam, "half_copies", noted)
    halved = trained(precision="bf16", compiled=compiled, gradients=False)
    assert "layers.0.lower.weight" in names
    exact = trained(precision="highest", compiled=False)
    early = slice(0, 10)  # a step moves either by 0.05 and more; later on rounding has parted any two runs
    for name in ("loss", "norm"):
        assert float(abs(whole[name] - halved[name]).sel(step=early).max()) < 5e-3
        assert float(abs(exact[name] - halved[name]).sel(step=early).max()) < 2e-2
    assert bool((halved.loss.isel(step=-1) < 0.8 * halved.loss.isel(step=0)).all())


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("shape", [(4,), (2, 50)])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_lost_seed_is_held_where_it_was_in_every_replay(monkeypatch, rule, shape, clip):
    """Its gradients are NaN from step 3 on, those of the others as they would be without it; large ones and packed."""
    monkeypatch.setattr(packed, "LARGE", 200)

    def train(steps, first=3):
        model = torch.nn.Module()
        model.p = torch.nn.Parameter(torch.linspace(1, 2, 3).cuda().view(3, *(1,) * len(shape)).repeat(1, *shape))

        def loss(model, step):
            gone = (torch.arange(3, device="cuda") == 1) & (step >= first)
            return (model.p.flatten(1) ** 2).sum(-1) * torch.where(gone, torch.nan, 1.0)

        optimiser = Optimiser(rule, 0.01, weight_decay=0.1, clip=clip)
        run = fit(model, loss, optimiser=optimiser, steps=steps, record=Record(at=(steps,)))
        return run, model.p.detach()

    (run, there), (_, before), (free, without) = train(9), train(3), train(9, first=100)
    assert free.diverged.values.tolist() == [-1, -1, -1]
    assert run.diverged.values.tolist() == [-1, 3, -1]
    assert there[1].equal(before[1])
    assert there[[0, 2]].equal(without[[0, 2]])
    assert (there[[0, 2]] < before[[0, 2]]).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["highest", "bf16"])
def test_attention_that_is_held_stays_in_every_replay_and_after_a_stop(tmp_path, compiled, precision):
    parts = {"norm": "post", "positions": "sinusoidal", "dropout": 0.2}
    config = DecoderConfig(vocabulary=11, width=16, layers=2, length=7, **parts)
    tokens = torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(0)).cuda()

    def loss(model, step):
        model.set_step(step)
        key = noise.key(torch.arange(2, device="cuda"), step)
        return model.surprisal(tokens[:, :-1], tokens[:, 1:], noise=key).mean((1, 2))

    def train(stop=None):
        generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
        model = FrozenAttentionDecoder(config, generators=generators, freeze_steps=torch.tensor([4, 6])).cuda()

        def measure(model, step):
            if step == stop:
                raise RuntimeError("stopped")
            with torch.no_grad():
                own = model.activations(tokens[:, :-1], ["attention"])["attention"]
            return {"attention": torch.stack([one.flatten(1) for one in own], dim=1)}

        return fit(
            model,
            loss,
            optimiser=Optimiser("adam", 1e-2),
            steps=10,
            record=Record(measure, dims={"attention": ("layer", "number")}, gradients=False),
            saving=Saving(tmp_path, range(10)),
            compute=Compute(precision, compiled=compiled),
        )

    for stop in (3, 5, 8):
        with pytest.raises(RuntimeError, match="stopped"):
            train(stop)
    found = train()
    for seed, until in enumerate((4, 6)):
        own = found.attention.isel(seed=seed)
        moves = abs(own.diff("step", label="lower")).max(("layer", "number"))
        assert bool((moves.sel(step=slice(0, until - 1)) > 1e-4).all())
        assert float(moves.sel(step=slice(until, None)).max()) < 1e-6
    assert bool((found.loss.isel(step=-1) < 0.8 * found.loss.isel(step=0)).all())
