"""Pretrained models: a tiny series is trained, saved, probed and judged; faults and bad settings are named."""

import builtins
import json
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import load_file, save_file

from joma.arguments import InputError
from joma.commands.parsing import config_with
from joma.progress import Task
from joma.studies import pretrained
from joma.studies.pretrained import CLAIMS, STUDY, Config
from joma.study import Context
from joma.watch import Checkpoints
from joma.watch.configs import quiet

transformers = pytest.importorskip("transformers")
SMALL = Config(layers=2, heads=2, width=16, length=16, batch=4, steps=12, every=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pretrained")


@pytest.fixture(scope="module")
def trajectory(folder):
    return pretrained.run(SMALL, Context((0, 1), checkpoints=folder))


def test_checkpoints_are_saved_under_pythias_names(trajectory, folder):
    assert trajectory.sizes["seed"] == 2
    series = Checkpoints(folder / "seed1")
    assert series.steps == (0, 1, 2, 4, 5, 8, 10, 12)
    assert sorted(path.name for path in folder.iterdir()) == ["measures", "seed0", "seed1"]
    files = {path.name for path in (folder / "seed0" / "step4").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}


def test_the_first_two_checkpoints_are_the_same_as_the_learning_rate_warms_up_from_zero(trajectory, folder):
    states = [load_file(folder / "seed0" / f"step{step}" / "model.safetensors") for step in (0, 1, 2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[1][name], states[2][name]) for name in states[0])
    assert trajectory.left_out.values.tolist() == [[0, 0]]


def test_seeds_differ_and_the_same_seed_gives_the_same_bits(trajectory, folder, tmp_path):
    last = folder / "seed0" / "step12" / "model.safetensors"
    assert last.read_bytes() != (folder / "seed1" / "step12" / "model.safetensors").read_bytes()
    before = torch.random.get_rng_state()
    pretrained.train(SMALL, 0, tmp_path / "again", Task())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert last.read_bytes() == (tmp_path / "again" / "step12" / "model.safetensors").read_bytes()
    assert trajectory.entropy.dims == ("model", "seed", "step", "layer", "head")


def test_a_killed_run_resumes_with_the_remaining_seeds(trajectory, tmp_path, monkeypatch):
    class Killed(Task):
        steps = 0

        def advance(self, amount=1):
            self.steps += amount
            if self.steps == 17:  # while the second seed trains
                raise KeyboardInterrupt

    task = Killed()
    pretrained.train(SMALL, 0, tmp_path / "seed0", task)
    with pytest.raises(KeyboardInterrupt):
        pretrained.train(SMALL, 1, tmp_path / "seed1", task)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".seed1", "seed0"]
    trained = []
    architecture = pretrained._architecture
    monkeypatch.setattr(pretrained, "_architecture", lambda config: trained.append(config) or architecture(config))
    again = pretrained.run(SMALL, Context((0, 1), checkpoints=tmp_path))
    xr.testing.assert_identical(again, trajectory)
    assert len(trained) >= 1
    assert not (tmp_path / ".seed1").exists()
    trained.clear()
    xr.testing.assert_identical(pretrained.run(SMALL, Context((0, 1), checkpoints=tmp_path)), trajectory)
    assert trained == []


def test_folders_or_repositories_are_probed_side_by_side(folder, trajectory, tmp_path):
    config = replace(
        SMALL, models=(str(folder / "seed0"), str(folder / "seed1" / "step12")), revisions=("step0", "step8")
    )
    both = pretrained.run(config, Context((0,), checkpoints=tmp_path))
    assert both.sizes["model"] == 2
    assert both.step.values.tolist() == [0, 8]
    step_8 = trajectory.sel(seed=0, step=8).isel(model=0)
    np.testing.assert_array_equal(both.entropy.isel(model=0, seed=0).sel(step=8), step_8.entropy)
    last = trajectory.sel(seed=1, step=12).isel(model=0)
    np.testing.assert_array_equal(both.entropy.isel(model=1, seed=0).sel(step=0), last.entropy)
    verdicts = {claim.name: claim.judge(both, "paper")["verdict"] for claim in CLAIMS}
    untested = {name for name, verdict in verdicts.items() if verdict == "not tested"}
    too_short = {"falls", "bounces", "not-noise"}  # a series of two cannot fall and recover
    assert untested == too_short | {"toy-falls", "toy-stable-rank", "toy-orthogonal"}
    reasons = {claim.name: claim.judge(both, "paper")["reason"] for claim in CLAIMS}
    assert reasons["falls"] == "this run has no series with enough checkpoints"
    assert reasons["toy-falls"] == "this run has no tiny GPT-NeoX"
    single = pretrained.draw(both).axes[3:]
    assert [axes.get_ylabel() for axes in single] == ["entropy / nats", "stable rank", "root mean square cosine"]
    assert {axes.get_xlabel() for axes in single} == {"relative depth"}
    (line,) = single[0].lines
    assert line.get_xdata().tolist() == [0, 1]
    np.testing.assert_allclose(line.get_ydata(), last.entropy.mean("head"))


def test_a_series_is_drawn_over_step_plus_one_with_the_spread_of_seeds(trajectory):
    figure = pretrained.draw(trajectory)
    entropy, ranks, cosines = figure.axes
    for axes, ylabel in ((entropy, "entropy / nats"), (ranks, "stable rank"), (cosines, "root mean square cosine")):
        assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "step + 1", ylabel)
        assert axes.lines[0].get_xdata().tolist() == [1, 2, 3, 5, 6, 9, 11, 13]
    assert entropy.get_title(loc="left") == "(a)  tiny GPT-NeoX: entropy of attention"
    assert [line.get_label() for line in entropy.lines] == ["layer 0", "layer 1"]
    mean = trajectory.entropy.isel(model=0).mean(("seed", "head"))
    np.testing.assert_allclose(entropy.lines[1].get_ydata(), mean.isel(layer=1))
    assert len(entropy.collections) == 2  # a band over the seeds for each layer
    legend = [text.get_text() for text in cosines.get_legend().get_texts()]
    assert legend == ["hidden, depth 0", "hidden, depth 1", "hidden, depth 2", "embeddings"]
    assert cosines.lines[-1].get_ydata() == [float(trajectory.embedding_random.max())] * 2


def test_all_checkpoints_of_a_folder_are_probed_unless_revisions_are_given(folder, trajectory, tmp_path):
    context = Context((0,), checkpoints=tmp_path)
    config = replace(SMALL, models=(str(folder / "seed0"),))
    assert config.revisions is None
    all_steps = pretrained.run(config, context)
    assert all_steps.step.values.tolist() == trajectory.step.values.tolist()
    assert all_steps.left_out.values.tolist() == [[0]]
    assert pretrained.run(replace(config, revisions=()), context).identical(all_steps)
    assert config_with(STUDY, "quick", ("revisions=",)).revisions == ()
    assert config_with(STUDY, "paper", ("revisions=step0,step8",)).revisions == ("step0", "step8")


def test_faults_are_warned_of_with_names_and_remedies_and_stored(folder, tmp_path):
    shutil.copytree(folder / "seed0", tmp_path / "series")
    half = tmp_path / "series" / "step2" / "model.safetensors"
    half.write_bytes(half.read_bytes()[:4000])
    (tmp_path / "series" / "step4" / "model.safetensors").unlink()
    torch.save({"w": torch.ones(2), "x": tmp_path}, tmp_path / "series" / "step5" / "pytorch_model.bin")
    (tmp_path / "series" / "step5" / "model.safetensors").unlink()
    save_file({"other": torch.ones(2, 2)}, tmp_path / "series" / "step8" / "model.safetensors")
    config = replace(SMALL, models=(str(tmp_path / "series"),))
    with pytest.warns(UserWarning, match="series") as caught:
        both = pretrained.run(config, Context((0,), checkpoints=tmp_path / "run"))
    texts = [str(warning.message) for warning in caught]
    for step, part in {2: "download it again", 4: "leave it out", 5: "safetensors", 8: "another architecture"}.items():
        assert sum(f"step{step}" in text and part in text for text in texts) == 1
    stored = {fault["checkpoints"][0]: fault for fault in json.loads(both.attrs["faults"])}
    assert {name: fault["kind"] for name, fault in stored.items()} == {
        "step0": "identical",
        "step2": "unreadable",
        "step4": "unreadable",
        "step5": "unreadable",
        "step8": "architecture",
    }
    assert all(fault["message"] and fault["remedy"] for fault in stored.values())
    assert both.left_out.values.tolist() == [[4]]


@pytest.mark.filterwarnings("ignore:.*attention to watch")
@pytest.mark.parametrize("kind", ["Mamba", "GPTJ", "T5"])
def test_a_model_that_lacks_a_measure_is_refused_in_one_line(kind, tmp_path):
    sizes = {
        "Mamba": {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 4},
        "GPTJ": {"n_embd": 8, "n_layer": 1, "n_head": 2, "rotary_dim": 2, "n_positions": 32},
        "T5": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    }
    config = getattr(transformers, f"{kind}Config")(vocab_size=256, **sizes[kind])
    with torch.random.fork_rng(), quiet():
        getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / kind)
    with pytest.raises(
        InputError, match=f"`models` must be models of which all measures can be taken, got .*{kind}.*; leave"
    ):
        pretrained.run(replace(SMALL, models=(str(tmp_path / kind),)), Context((0,), checkpoints=tmp_path / "run"))


def series(model="m", **changes):
    """Return a run with known values: the entropy 3, 1, 2 and the stable rank 10, 4, 5."""
    dims = ("model", "seed", "layer")
    fields = {
        "bounce_depth": (dims, np.full((1, 2, 1), 2.0)),
        "bounce_recovery": (dims, np.full((1, 2, 1), 1.0)),
        "bounce_p_value": (dims, np.full((1, 2, 1), 0.01)),
        "stable_rank": (("model", "seed", "step", "matrix"), np.tile([[10.0], [4.0], [5.0]], (1, 2, 1, 1))),
        "embedding_cosine": (("model", "seed", "step"), np.tile([0.1, 0.2, 0.13], (1, 2, 1))),
        "embedding_random": (("model", "seed", "step"), np.full((1, 2, 3), 0.1)),
        "left_out": (("model", "seed"), np.zeros((1, 2))),
    }
    return xr.Dataset({**fields, **changes}, {"seed": [0, 1], "model": [model], "step": [0, 1, 2]})


@pytest.mark.parametrize(
    ("claim", "value"),
    [("falls", 2.0), ("bounces", 1.0), ("not-noise", 0.01), ("stable-rank", 0.4), ("orthogonal", 1.3), ("sound", 0.0)],
)
def test_claims_measure_what_they_say(claim, value):
    chosen = next(candidate for candidate in CLAIMS if candidate.name == claim)
    record = chosen.judge(series(), "paper")
    assert record["measured"]["values"] == pytest.approx([value, value])
    assert record["verdict"] == "holds"


@pytest.mark.parametrize(
    ("claim", "field", "value"),
    [
        ("falls", "bounce_depth", 0.2),
        ("bounces", "bounce_recovery", 0.05),
        ("not-noise", "bounce_p_value", 0.3),
        ("sound", "left_out", 1.0),
    ],
)
def test_claims_can_fail(claim, field, value):
    plain = series()
    chosen = next(candidate for candidate in CLAIMS if candidate.name == claim)
    assert chosen.judge(plain.assign({field: plain[field] * 0 + value}), "paper")["verdict"] == "does not hold"


PUBLIC = {"falls", "bounces", "not-noise", "stable-rank", "orthogonal"}


@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_a_toy_tests_no_claim_about_pretrained_models_at_any_preset(preset):
    records = {claim.name: claim.judge(series(pretrained.TINY_MODEL), preset) for claim in CLAIMS}
    assert {name for name, record in records.items() if record["verdict"] == "not tested"} == PUBLIC
    reason = "this run has no pretrained model, only a tiny GPT-NeoX trained here"
    assert {records[name]["reason"] for name in PUBLIC} == {reason}
    assert {records[name]["kind"] for name in set(records) - PUBLIC} == {"check"}
    assert records["toy-stable-rank"]["measured"]["values"] == pytest.approx([0.4, 0.4])


def test_the_toy_says_so_in_its_title_and_outcome():
    assert STUDY.description("quick").title.startswith("A toy in place of OPT and Pythia")
    assert STUDY.description("paper").title == STUDY.title
    text = (
        "entropy of the lowest layer falls by 2.00 nats and comes back by 1.00, the stable rank falls to 40 % of its "
        "start, and embeddings end with 1.3 times the cosines of random directions"
    )
    assert pretrained.outcome(series(pretrained.TINY_MODEL)) == f"In the toy, {text}; no public model was probed."
    assert pretrained.outcome(series()) == f"On average over models, {text}."


def test_without_transformers_the_extra_is_named(monkeypatch, tmp_path):
    real_import = builtins.__import__

    def without_transformers(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    with pytest.raises(InputError, match=r"pip install 'joma\[hf\]'"):
        pretrained.run(SMALL, Context((0,), checkpoints=tmp_path))


@pytest.mark.parametrize(
    "changes", [{"steps": 0}, {"width": 0}, {"heads": 3}, {"length": 1}, {"rate": 0.0}, {"revisions": ("step0",)}]
)
def test_a_bad_setting_is_named(changes, tmp_path):
    (name,) = changes
    with pytest.raises(InputError, match=f"`{name}`"):
        pretrained.run(replace(SMALL, **changes), Context((0,), checkpoints=tmp_path))
    assert list(tmp_path.iterdir()) == []


CHANGES = {
    "corpus": "text.txt", "layers": 1, "heads": 4, "width": 24, "length": 12, "batch": 3, "steps": 11, "every": 3,
    "rate": 1e-2,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_field_changes_the_run(name, trajectory, tmp_path):
    (tmp_path / "text.txt").write_text("A text of which some words come again and some do not. " * 40)
    value = str(tmp_path / "text.txt") if name == "corpus" else CHANGES[name]
    assert value != getattr(SMALL, name)
    changed = pretrained.run(replace(SMALL, **{name: value}), Context((0,), checkpoints=tmp_path / "run"))
    assert not changed.equals(trajectory.sel(seed=[0]))  # `faults`, an attribute, names all seeds


def test_every_field_is_changed_in_some_test():
    assert {*CHANGES, "models", "revisions"} == {field.name for field in fields(Config)}  # the two have tests above


def test_a_corpus_shorter_than_a_window_is_named(tmp_path):
    (tmp_path / "short.txt").write_text("too short\n")
    with pytest.raises(InputError, match=r"`corpus` must be of at least 16 bytes, .* got 10 to train on .*longer text"):
        pretrained.run(replace(SMALL, corpus=str(tmp_path / "short.txt")), Context((0,), checkpoints=tmp_path / "out"))


def test_the_quick_preset_trains_here_and_the_paper_preset_uses_the_hub():
    assert STUDY.presets["quick"].seconds <= 40
    assert not STUDY.presets["quick"].config.models
    assert STUDY.presets["paper"].config.models
    assert f"on bytes for {STUDY.presets['quick'].config.steps} steps" in STUDY.about


def test_readings_are_declared_for_the_preset_that_can_decide_them():
    assert {claim.name for claim in CLAIMS if claim.presets == ("paper",)} == PUBLIC
    for claim in CLAIMS:
        record = claim.judge(series(), "quick")
        assert record["verdict"] == ("holds" if claim.name == "sound" else "not tested")
        assert (record["reason"] == "decided at preset paper only") == (claim.name in PUBLIC)
