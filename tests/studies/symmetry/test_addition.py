from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.data import addition as data
from joma.models.transformer import Decoder, DecoderConfig
from joma.noise import key
from joma.runs import open_run
from joma.studies import load
from joma.studies.symmetry import addition, addition_training
from joma.studies.symmetry.addition import (
    CLAIMS,
    KINDS,
    STUDY,
    Config,
    digits_of,
    draw_accuracy,
    draw_own,
    draw_positions,
    draw_slices,
    final,
    four_in_five,
    groups,
    keeps_place,
    own_share,
    progress,
    run,
    sampling_error,
    slower_in_one,
    steps_to,
)
from joma.study import Context, NotInRun, execute
from joma.train import fit

SMALL = Config(
    digits=1, layers=2, heads=2, width=8, batch=8, steps=6, every=3, rate=1e-2, warm_up=2, held=0.3, glance=10,
    probed=10, together=4, arms=("none causal", "none full", "learned full", "attention all", "mlp 1", "both all"),
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def a_model(mask, positions="none", seeds=2, scale=3.0):
    """Two models whose likeliest digits differ from place to place."""
    parts = DecoderConfig(12, 8, 2, 2, length=6, mask=mask, positions=positions, activation="gelu")
    model = Decoder(parts, generators=[torch.Generator().manual_seed(seed) for seed in range(seeds)])
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.mul_(scale)
    return model


def made_up(**changes):
    """A run in which all that is said holds: accuracy, decodability and shares by arm; none of the rest varies."""
    names, steps = list(addition_training.arms(6)), np.arange(0, 3001, 250)
    ends = dict.fromkeys(names, 1.0) | {"none full": 0.05, "attention all": 0.001, "mlp all": 0.02, "both all": 0.001}
    ends |= {name: 0.9 for name in names if name.split()[1].isdigit()}
    ends |= {"none causal": 0.9999, "attention 0": 0.999} | changes.get("accuracy", {})
    gain = dict.fromkeys(names, 0.5) | {"none full": 0.01} | changes.get("gain", {})
    own = {name: 1.0 if name == "none causal" else 0.4 for name in names} | changes.get("own", {})
    shape, seeds = (len(names), 5, len(steps)), np.ones((1, 5, 1))
    rise = np.minimum(steps / 1250, 1.0)
    read = np.full((*shape, 7), 0.3)
    read[..., 4] += np.array([gain[name] for name in names])[:, None, None]
    shares = np.ones((*shape, 2, 7, 7)) * np.array([own[name] for name in names])[:, None, None, None, None, None]
    variables = {
        "accuracy": (("arm", "seed", "step"), np.array([ends[name] for name in names])[:, None, None] * rise * seeds),
        "decodability": (("arm", "seed", "step", "level"), read),
        "own": (("arm", "seed", "step", "kind", "level", "higher"), shares),
        "similarity": (("location", "other"), np.zeros((11, 11))),
    }
    coordinates = {"arm": names, "seed": range(5), "step": steps, "kind": list(KINDS)}
    made = xr.Dataset(variables, coords=coordinates).assign(ceiling=0.053188, error=0.01, chance=1 / 11)
    made["steps_to_99"] = steps_to(made.accuracy, 0.99)
    return made


def verdicts(made, preset="paper"):
    return {claim.name: claim.judge(made, preset)["verdict"] for claim in CLAIMS}


def test_there_are_29_arms():
    table = addition_training.arms(6)
    assert len(table) == 29
    assert sum(arm.residual is None for arm in table.values()) == 8
    removed = [arm.residual for arm in table.values() if arm.residual is not None]
    assert len(set(removed)) == 21
    assert sorted(12 - sum(map(sum, residual)) for residual in removed) == [1] * 12 + [2] * 6 + [6] * 2 + [12]
    assert table["mlp 4"].residual == ((True, True),) * 4 + ((True, False), (True, True))


@given(st.lists(st.sampled_from(sorted(addition_training.arms(3))), min_size=1), st.integers(1, 7))
def test_groups_hold_every_arm_once_and_fit_together(names, most):
    found = list(groups(addition_training.pick(names, 3), most))
    assert sorted(name for group in found for name in group) == sorted(set(names))
    assert all(len(group) <= most and len({one.kind for one in group.values()}) == 1 for group in found)
    alike = [(arm.positions == "rotary", arm.mask) for arm in addition_training.pick(names, 3).values()]
    sizes = [alike.count(kind) for kind in set(alike)]
    assert len(found) == sum(math.ceil(size / most) for size in sizes)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_surprisal_is_that_of_every_prefix_alone(mask):
    """Digit by digit, each prefix in a pass of its own and the logits of its last position."""
    model = a_model(mask, "learned")
    tokens = data.sequences(torch.tensor([[[3, 4], [9, 9]], [[1, 0], [5, 8]]]), digits=1)
    found = addition_training.surprisal(model, tokens, 1)
    for place, n in enumerate((4, 5)):
        told = model(tokens[..., :n])[:, :, -1].log_softmax(dim=-1)
        expected = -told.gather(-1, tokens[..., n : n + 1])[..., 0]
        torch.testing.assert_close(found[..., place], expected)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_no_digit_is_seen_before_it_is_told(mask):
    model, tokens = a_model(mask), data.encode(["3+4=07", "3+4=17"]).expand(2, 2, 6)
    first = addition_training.surprisal(model, tokens, 1)[..., 0]
    logits = model(tokens[..., :4])[:, :, -1].log_softmax(dim=-1)
    torch.testing.assert_close(first, -torch.stack([logits[:, 0, 0], logits[:, 1, 1]], dim=1))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_exact_match_is_that_of_a_model_that_reads_its_own_digits(mask, monkeypatch):
    """The right sums are those that greedy generation writes: made likely by training on a few pairs."""
    model = a_model(mask, "learned")
    pairs = torch.tensor([[3, 4], [9, 9], [1, 0], [5, 8]])
    tokens = data.sequences(pairs, digits=1)

    def loss(model, step):
        del step
        return addition_training.surprisal(model, tokens[:3], 1).mean(dim=(1, 2))

    rule = addition_training._optimiser(replace(SMALL, steps=60, rate=2e-2))
    fit(model, loss, optimiser=rule, steps=60, at=[0])
    written = tokens[:, :4].expand(2, 4, 4)
    with torch.no_grad():
        for _ in range(2):
            written = torch.cat([written, model(written)[:, :, -1:].argmax(dim=-1)], dim=-1)
    expected = (written == tokens).all(dim=-1).double().mean(dim=-1)
    assert 0 < float(expected.min()) < 1
    for at_once in (1, 1 << 13):  # one pair a pass, and all in one
        monkeypatch.setitem(addition_training.AT_ONCE, "cpu", at_once)
        torch.testing.assert_close(addition_training.exact_match(model, tokens, 1), expected)


def test_arms_that_train_together_train_as_they_do_alone(trajectory):
    """Without residuals around attention: a model whose config says so, of one seed, with torch's own AdamW."""
    context = Context((1,))
    pairs = addition_training.pairs(SMALL, context)
    parts = replace(addition_training.decoder(SMALL, addition_training.Arm()), residual=((False, True),) * 2)
    model = Decoder(parts, generators=context.generators())
    rule = torch.optim.AdamW(model.parameters(), lr=SMALL.rate, weight_decay=SMALL.weight_decay)
    expected = {}
    for step in range(SMALL.steps + 1):
        drawn = data.draw(pairs.train, size=SMALL.batch, key=key(torch.tensor([1]), step))
        loss = addition_training.surprisal(model, data.sequences(drawn, digits=1), 1).mean()
        expected[step] = float(loss.detach())
        rule.param_groups[0]["lr"] = SMALL.rate * min((step + 1) / 2, (1 + math.cos(math.pi * step / SMALL.steps)) / 2)
        rule.zero_grad()
        loss.backward()
        rule.step()
    found = trajectory.loss.sel(arm="attention all", seed=1)
    np.testing.assert_allclose(found, [expected[int(step)] for step in found.step], rtol=1e-4)


def test_a_run_has_every_arm_with_its_measures(trajectory):
    assert sorted(trajectory.arm.values) == sorted(SMALL.arms or ())
    assert dict(trajectory.sizes) == {
        "arm": 6, "seed": 2, "step": 5, "level": 3, "higher": 3, "kind": 2, "location": 5, "other": 5,
    }  # fmt: skip
    assert float(trajectory.ceiling) == data.ceiling(1).exact
    start = trajectory.isel(step=0)
    for one in ("none full", "mlp 1"):  # the embeddings are the same whatever stands above them
        np.testing.assert_array_equal(start.decodability.sel(arm=one)[:, 0], start.decodability[0, :, 0])
    assert not np.allclose(start.loss.sel(arm="mlp 1"), start.loss.sel(arm="none causal"))


def test_a_diverged_seed_is_nan_and_changes_no_other():
    model = a_model("causal")
    tokens = data.sequences(torch.cartesian_prod(torch.arange(5), torch.arange(2)), digits=1)
    before = addition._record(model, 0, tokens=tokens, config=SMALL)
    with torch.no_grad():
        model.embedding[0] = torch.nan
    after = addition._record(model, 0, tokens=tokens, config=SMALL)
    for name, values in after.items():
        assert name == "accuracy" or bool(values[0].isnan().all()), name
        torch.testing.assert_close(values[1], before[name][1], equal_nan=True)


def test_the_rate_rises_and_falls():
    factor = addition_training._optimiser(replace(SMALL, steps=100, warm_up=10)).schedules["*"]
    found = [float(factor(torch.tensor(step))) for step in (0, 4, 50, 75, 100)]
    np.testing.assert_allclose(found, [0.1, 0.5, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0], atol=1e-7)


def test_twins_count_once_in_the_error():
    pairs = torch.tensor([[1, 2], [2, 1], [3, 3], [4, 5]])
    assert sampling_error(0.25, pairs) == pytest.approx(math.sqrt(0.25 * 0.75 / 3))


def test_steps_to_a_level_are_the_first_or_none():
    steps = [0, 10, 20, 30]
    curves = xr.DataArray([[0, 0.99, 0.5, 1], [0, 0.1, 0.98, 0.9]], dims=("seed", "step"), coords={"step": steps})
    np.testing.assert_array_equal(steps_to(curves, 0.99), [10, np.nan])


def test_progress_is_the_mean_over_steps_not_over_records(trajectory):
    curve = xr.DataArray([[[0.0, 0.0, 1.0]]], dims=("arm", "seed", "step"), coords={"step": [0, 8, 10], "arm": ["x"]})
    assert float(progress(xr.Dataset({"accuracy": curve}), "x")[0]) == pytest.approx(0.1)
    with pytest.raises(NotInRun):
        final(trajectory, "rotary full")


def test_a_location_is_compared_with_itself_at_every_pair_of_levels(trajectory):
    """Seed 1 before training, by a loop over locations and units; "+" and "=" do not vary in the embeddings."""
    context = Context((1,))
    tokens = data.sequences(addition_training.pairs(SMALL, context).test[:10], digits=1)[:, :-1]
    model = Decoder(addition_training.decoder(SMALL, addition_training.Arm()), generators=context.generators())
    states = addition_training.levels(model, tokens)[0].double().numpy()
    found = trajectory.self_similarity.sel(arm="none causal", seed=1, kind="correlation").isel(step=0)
    for low, high in ((0, 1), (0, 2), (1, 2)):
        alike = [
            np.mean([np.corrcoef(states[low, :, at, unit], states[high, :, at, unit])[0, 1] for unit in range(8)])
            for at in range(5)
            if low > 0 or at not in (1, 3)
        ]
        np.testing.assert_allclose(found[low, high], np.mean(alike), atol=1e-5)


def test_what_four_in_five_reach():
    assert four_in_five(xr.DataArray([0.9, 1.0, 0.1, 0.8, 0.95])) == 0.8
    assert four_in_five(xr.DataArray([0.7, 0.6, 0.5])) == 0.5


def test_shares_are_over_pairs_of_different_levels():
    made = made_up()
    made.own[{"arm": 0}] = np.triu(np.full((7, 7), 0.75), 1) + np.tril(np.full((7, 7), 9.0))
    np.testing.assert_allclose(own_share(made, "none causal", "cka"), 0.75)
    np.testing.assert_allclose(keeps_place(made, "cka"), 0.35)


def test_all_that_is_said_can_hold():
    paper = {claim.name for claim in CLAIMS if "paper" in claim.presets} - {"ceiling-2"}
    assert {name for name, verdict in verdicts(made_up()).items() if verdict == "holds"} == paper


SPOILT = {
    "causal": {"accuracy": {"none causal": 0.06}},
    "causal-learns": {"accuracy": {"none causal": 0.98}},
    "full": {"accuracy": {"none full": 0.07}},
    "full-encoded": {"accuracy": {"rotary full": 0.98}},
    "positions-causal": {"gain": {"none causal": 0.1}},
    "positions-full": {"gain": {"none full": 0.1}},
    "attention-residuals": {"accuracy": {"attention all": 1.0}},
    "mlp-residuals": {"accuracy": {"mlp all": 1.0}},
    "both-residuals": {"accuracy": {"both all": 1.0}},
    "one-layer-residuals": {
        "accuracy": {f"{part} {layer}": 1.0 for part in addition_training.REMOVED for layer in range(4)}
    },
    "slices": {"own": {"none causal": 0.8}},
    "slices-without": {"own": {"both all": 0.99}},
    "slices-cka": {"own": {"none causal": 0.8}},
    "slices-without-cka": {"own": {"mlp all": 0.99}},
    "pilot-causal": {"accuracy": {"none causal": 0.99}},
    "pilot-learned": {"accuracy": {"learned causal": 0.99}},
    "pilot-learned-soon": {"accuracy": {"learned causal": 0.98}},
    "pilot-attention": {"accuracy": {"attention all": 0.05}},
    "pilot-mlp": {"accuracy": {"mlp all": 0.1}},
    "pilot-first": {"accuracy": {"attention 0": 0.9}},
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_wrong_is_seen(name):
    assert verdicts(made_up(**SPOILT[name]))[name] == "does not hold"


def test_a_seed_that_was_lost_has_learnt_nothing():
    made = made_up()
    made.accuracy.loc[{"arm": "none causal", "seed": [0, 1], "step": slice(500, None)}] = np.nan
    assert verdicts(made)["causal"] == "does not hold"
    assert verdicts(made)["causal-learns"] == "does not hold"


@given(
    st.sets(st.sampled_from(sorted(addition_training.arms(6))), max_size=4),
    st.booleans(),
    st.sampled_from(["quick", "paper"]),
)
@settings(max_examples=25)
def test_what_was_not_trained_is_not_judged(few, kept, preset):
    """A few arms alone, or all but a few: a claim is judged as with all of them if it has what it needs."""
    made, names = made_up(), few if kept else {*addition_training.arms(6)} - few
    whole_run, found = verdicts(made, preset), verdicts(made.sel(arm=sorted(names)), preset)
    for name, arms in NEEDED.items():
        assert found[name] == (whole_run[name] if arms <= names else "not tested at this preset")
    some = {"none causal"} <= names and bool({f"{part} all" for part in addition_training.REMOVED} & names)
    for name in ("slices-without", "slices-without-cka"):
        assert found[name] == ("holds" if some else "not tested at this preset")
    assert set(NEEDED) | {"slices-without", "slices-without-cka"} == {claim.name for claim in CLAIMS}


SINGLE = {f"{part} {layer}" for part in addition_training.REMOVED for layer in range(6)}
NEEDED = {
    "ceiling-2": set(),
    "ceiling-3": set(),
    "full": {"none full"},
    "positions-full": {"none full"},
    "full-encoded": {"learned full", "sinusoidal full", "rotary full"},
    "one-layer-residuals": {"none causal"} | SINGLE,
    **{f"{part}-residuals": {"none causal", f"{part} all"} for part in addition_training.REMOVED},
    **{
        name: {"none causal"}
        for name in ("causal", "causal-learns", "positions-causal", "slices", "slices-cka", "pilot-causal")
    },
    "pilot-learned": {"learned causal"},
    "pilot-learned-soon": {"learned causal"},
    "pilot-attention": {"attention all"},
    "pilot-mlp": {"mlp all"},
    "pilot-first": {"attention 0"},
}  # fmt: skip


@pytest.mark.parametrize("preset", ["quick", "paper"])
@pytest.mark.parametrize(("digits", "reached"), [(1, 1.0), (2, 0.285), (3, 0.053188)])
def test_the_ceiling_is_judged_by_the_digits_of_the_run(preset, digits, reached):
    made = made_up().isel(location=slice(3 * digits + 2)).assign(ceiling=reached)
    assert digits_of(made) == digits
    found = verdicts(made, preset)
    tested = {n for n in (2, 3) if found[f"ceiling-{n}"] == "holds"}
    assert tested == {digits} & {2, 3}
    assert "does not hold" not in {found["ceiling-2"], found["ceiling-3"]}


def test_the_loss_of_one_layer_is_the_mean_over_such_arms():
    made = made_up(accuracy={name: 0.5 if name.startswith("both") else 1.0 for name in SINGLE})
    way = float(progress(made_up(accuracy={"none full": 1.0}), "none full")[0])  # of an arm that ends at 1
    np.testing.assert_allclose(slower_in_one(made), way * (0.9999 - 2.5 / 3), rtol=1e-9)


def test_reversed_sums_are_asked_judged_and_drawn(tmp_path, monkeypatch):
    config = replace(SMALL, digits=2, reverse=True, held=0.01, arms=("none causal", "none full"))
    seen, drawn = [], []
    exact_match, marks = addition_training.exact_match, addition._mark_places

    def asked(model, tokens, digits):
        seen.append(tokens)
        return exact_match(model, tokens, digits)

    def marked(panel, digits):
        marks(panel, digits)
        drawn.append("".join(label.get_text() for label in panel.get_xticklabels()))

    monkeypatch.setattr(sums, "exact_match", asked)
    monkeypatch.setattr(addition, "_mark_places", marked)
    outcome = execute(STUDY, out=tmp_path, seeds=2, config=config)
    made = open_run(outcome.path)
    for text in {text for tokens in seen for text in data.decode(tokens)}:
        asks, total = text.split("=")
        assert int(total[::-1]) == sum(map(int, asks.split("+")))
    limits = data.ceiling(2, reverse=True)
    assert limits.greedy != data.ceiling(2).greedy
    assert (float(made.ceiling), float(made.greedy)) == (limits.exact, limits.greedy)
    found = {claim["name"]: claim["verdict"] for claim in outcome.claims}
    assert (found["ceiling-2"], found["ceiling-3"]) == ("holds", "not tested at this preset")
    assert set(drawn) == {"aa+bb=cc"}
    context = Context((0, 1))  # and what is trained on: the loss before the first step
    batch = data.draw(addition_training.pairs(config, context).train, size=8, key=key(torch.tensor([0, 1]), 0))
    model = Decoder(addition_training.decoder(config, addition_training.Arm()), generators=context.generators())
    loss = addition_training.surprisal(model, data.sequences(batch, digits=2, reverse=True), 2).mean(dim=(1, 2))
    np.testing.assert_allclose(made.loss.sel(arm="none causal").isel(step=0), loss.detach(), rtol=1e-5)


@pytest.mark.parametrize("draw", [draw_accuracy, draw_slices, draw_positions, draw_own])
def test_it_is_drawn_from_the_dataset_alone(trajectory, draw):
    figure = draw(trajectory)
    assert {text for axes in figure.axes for text in (axes.get_title(loc="left"), axes.get_title())} - {""}
    shown = {"draw_accuracy": 4, "draw_slices": 4 * 6 + 1, "draw_positions": 4, "draw_own": 2}
    assert len(figure.axes) == shown[draw.__name__]


def test_any_arms_can_be_drawn(trajectory):
    """One arm, and that not among those that the figures are made for."""
    alone = trajectory.sel(arm=["mlp 1"])
    for drawing in STUDY.figures.values():
        assert drawing.draw(alone).axes
    assert [axes.get_title(loc="left") for axes in draw_positions(alone).axes] == ["(a)  no residuals: MLP 1"]
    assert draw_slices(trajectory.sel(arm=["learned full"])).axes[0].get_ylabel() == "learned, full"


def test_the_ceiling_is_drawn(trajectory):
    heights = [np.asarray(line.get_ydata()) for line in draw_accuracy(trajectory).axes[1].lines]
    assert any(len(own) == 2 and (own == float(trajectory.ceiling)).all() for own in heights)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arms": ("none diagonal",)}, "arms"),
        ({"arms": ()}, "arms"),
        ({"digits": 4}, "digits"),
        ({"digits": 0}, "digits"),
        ({"held": 0.0}, "held"),
        ({"held": 1.0}, "held"),
        ({"held": 0.02}, "held"),
        ({"held": -1.0}, "held"),
        ({"layers": 0}, "layers"),
        ({"width": 0}, "width"),
        ({"init": "zeros"}, "init"),
        ({"batch": 0}, "batch"),
        ({"steps": 0}, "steps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"precision": "double"}, "precision"),
        ({"glance": 0}, "glance"),
        ({"glance": -1}, "glance"),
        ({"probed": -1}, "probed"),
        ({"probed": 4}, "probed"),
        ({"warm_up": 0}, "warm_up"),
        ({"rate": -1.0}, "rate"),
        ({"every": 0}, "every"),
        ({"together": 0}, "together"),
        ({"asked": 4}, "asked"),
        ({"heads": 3}, "heads"),
    ],
)
def test_bad_settings_are_named(change, named):
    with pytest.raises(InputError, match=f"`{named}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_arms_of_several_masks_do_not_train_as_one():
    context = Context((0,))

    def nothing(model: Decoder, step: int) -> dict[str, torch.Tensor]:
        del model, step
        return {}

    with pytest.raises(InputError, match="arms of one kind"):
        addition_training.train(SMALL, context, addition_training.pairs(SMALL, context).train, addition_training.pick(["none full", "none causal"], 2),
                   label="x", record=nothing, dims={})  # fmt: skip


def test_presets_name_known_arms_and_it_is_registered():
    assert load("addition") is STUDY
    for preset in STUDY.presets.values():
        assert addition_training.pick(preset.config.arms, preset.config.layers)
    assert len(addition_training.pick(STUDY.presets["paper"].config.arms, 6)) == 29
