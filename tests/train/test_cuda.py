"""Training on CUDA: a captured step does what an eager one does, however it is recorded and whatever is halved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from joma import noise
from joma.models.steady import FrozenAttentionDecoder
from joma.models.transformer import Decoder, DecoderConfig
from joma.train import Compute, Job, Optimiser, Record, Saving, fit, fit_together, loop, packed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's compiler has its own to say
]


class Layers(torch.nn.Module):
    """Two layers for each of two seeds; the sums of the lower one are long, so that cuBLAS splits them."""

    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.lower = torch.nn.Parameter(torch.randn(2, 8192, 32 * (number + 1), generator=generator) / 90)
        self.upper = torch.nn.Parameter(torch.randn(2, 32 * (number + 1), 16, generator=generator))


def squares():
    """Return a loss on inputs that depend on the step."""
    inputs = torch.randn(30, 64, 8192, generator=torch.Generator().manual_seed(0)).cuda()

    def loss(model, step):
        batch = inputs.index_select(0, (step % 30)[None])[0]
        return (torch.relu(batch @ model.lower) @ model.upper).square().mean((1, 2))

    return loss


def trained_together(folder, loss, **options):
    """Train four models of different sizes, for different numbers of steps, and return their trajectories."""
    jobs = []
    for number, steps in enumerate((150, 40, 150, 200)):
        record = Record(
            lambda model, _: {"lower": model.lower[:, :50, 0], "upper": model.upper[:, 0]},
            at=range(0, steps + 1, 7),
            dims={"lower": ("dim",), "upper": ("output",)},
            gradients=number == 0,
        )
        optimiser = Optimiser(*(("sgd", 0.1) if number == 1 else ("adam", 3e-4)), clip=None if number == 2 else 1.0)
        shared = {"optimiser": optimiser, "record": record, "compute": Compute(**options)}
        jobs.append(Job(Layers(number).cuda(), loss, steps=steps, saving=Saving(folder / str(number), (20,)), **shared))
    return fit_together(jobs)


@pytest.mark.parametrize("precision", ["highest", "bf16"])
def test_side_by_side_trainings_have_the_bits_that_they_have_one_after_the_other(tmp_path, monkeypatch, precision):
    loss = squares()
    side_by_side = trained_together(tmp_path / "together", loss, precision=precision)
    monkeypatch.setattr(loop, "_interleaves", lambda _: False)
    separate = trained_together(tmp_path / "separate", loss, precision=precision)
    assert all(first.identical(second) for first, second in zip(side_by_side, separate, strict=True))
    assert all(bool((run.loss.isel(step=-1) < 0.9 * run.loss.isel(step=0)).all()) for run in separate)
    for file in (tmp_path / "separate").rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "together" / file.relative_to(tmp_path / "separate")).read_bytes()


def test_side_by_side_trainings_resume_after_an_error_in_one_of_them(tmp_path):
    loss = squares()

    def jobs(stop=None):
        def measure(model, step):
            if step == stop:
                raise RuntimeError("stopped")
            return {"lower": model.lower[:, :50, 0]}

        options = {"optimiser": Optimiser("adam", 1e-2), "steps": 100}
        record = Record(measure, range(0, 101, 10), {"lower": ("dim",)}, gradients=False)
        return [
            Job(Layers(number).cuda(), loss, record=record, saving=Saving(tmp_path / str(number), (20,)), **options)
            for number in range(2)
        ]

    with pytest.raises(RuntimeError, match="stopped"):
        fit_together(jobs(stop=50))
    assert (tmp_path / "1" / "50.safetensors").exists()  # the first raised the error; the second had made step 49
    whole = [fit(job.model, loss, optimiser=job.optimiser, steps=job.steps, record=job.record) for job in jobs()]
    resumed = fit_together(jobs())
    assert all(first.identical(second) for first, second in zip(resumed, whole, strict=True))


def trained(*, gradients=True, last=0, **options):
    config = DecoderConfig(vocabulary=7, width=32, layers=2, heads=2, positions="learned", length=6)
    model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in range(3)]).cuda()
    tokens = torch.randint(7, (20, 6), generator=torch.Generator().manual_seed(0)).cuda()

    def loss(model: Decoder, step: Tensor) -> Tensor:
        rows = tokens[(torch.arange(8, device="cuda") + step) % 20]
        return model.surprisal(rows[:, :-1], rows[:, 1:][:, -last:], last=last).mean(dim=(1, 2))

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


def test_a_compiled_step_with_one_query_a_sequence_is_the_eager_one():
    """The last layer is then not compiled, and the others are."""
    eager, compiled = (trained(precision="highest", compiled=compiled, last=1) for compiled in (False, True))
    for name in ("loss", "norm"):
        assert float(abs(eager[name] - compiled[name]).max()) < 1e-4


def test_the_first_loss_with_one_query_a_sequence_is_the_eager_one_in_half_precision():
    """Later losses differ: in 30 steps of Adam roundings of bfloat16 have grown to 0.09."""
    eager, compiled = (trained(precision="bf16", compiled=compiled, last=1) for compiled in (False, True))
    assert abs(float((eager.loss - compiled.loss).isel(step=0).max())) < 3e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_halved_weights_train_as_whole_ones(monkeypatch, compiled):
    whole = trained(precision="bf16", compiled=compiled, gradients=False)
    monkeypatch.setattr(packed, "LARGE", 1000)
    names, halve = [], packed.PackedAdam.half_copies

    def noted(self, given):
        copies = halve(self, given)
        names.extend(copies)
        return copies

    monkeypatch.setattr(packed.PackedAdam, "half_copies", noted)
    halved = trained(precision="bf16", compiled=compiled, gradients=False)
    assert "layers.0.lower.weight" in names
    exact = trained(precision="highest", compiled=False)
    early = slice(0, 5)  # a step moves either by 0.05 and more; later on rounding has parted any two runs
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
            diverged = (torch.arange(3, device="cuda") == 1) & (step >= first)
            return (model.p.flatten(1) ** 2).sum(-1) * torch.where(diverged, torch.nan, 1.0)

        optimiser = Optimiser(rule, 0.01, weight_decay=0.1, clip=clip)
        run = fit(model, loss, optimiser=optimiser, steps=steps, record=Record(at=(steps,)))
        return run, model.p.detach()

    (run, trained_weights), (_, before), (free, without) = train(9), train(3), train(9, first=100)
    assert free.diverged.values.tolist() == [-1, -1, -1]
    assert run.diverged.values.tolist() == [-1, 3, -1]
    assert trained_weights[1].equal(before[1])
    assert trained_weights[[0, 2]].equal(without[[0, 2]])
    assert (trained_weights[[0, 2]] < before[[0, 2]]).all()


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
                attention = model.activations(tokens[:, :-1], ["attention"])["attention"]
            return {"attention": torch.stack([layer.flatten(1) for layer in attention], dim=1)}

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
    trajectory = train()
    for seed, until in enumerate((4, 6)):
        attention = trajectory.attention.isel(seed=seed)
        moves = abs(attention.diff("step", label="lower")).max(("layer", "number"))
        assert bool((moves.sel(step=slice(0, until - 1)) > 1e-4).all())
        assert float(moves.sel(step=slice(until, None)).max()) < 1e-6
    assert bool((trajectory.loss.isel(step=-1) < 0.8 * trajectory.loss.isel(step=0)).all())
