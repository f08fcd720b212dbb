"""The page `docs/bounce-cause.md` says what the stored run says: its table, and the numbers of its sentences."""

import pytest

from joma.studies.text.bounce_cause_arms import ARMS
from joma.studies.text.bounce_cause_measures import recovery
from test_deviations import Stored
from test_docs import ROOT, load_script

PAGE = (ROOT / "docs" / "bounce-cause.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split()).replace("−", "-")


@pytest.fixture(scope="module")
def stored():
    return Stored("bounce-cause")


def with_range(values):
    return f"{float(values.mean()):.2f} ({float(values.min()):.2f} to {float(values.max()):.2f})"


def test_the_table_has_every_arm_of_the_stored_run(stored):
    run = stored.run
    _, *rows = (line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| "))
    expected = []
    for arm in run.arm.values.tolist():
        both = [with_range(recovery(run, arm, late=late)) for late in (False, True)]
        other = (run.chance.sel(arm=arm), run.valid_loss.sel(arm=arm).isel(step=-1))
        expected.append([ARMS[arm].label, *both, *(f"{float(values.mean()):.2f}" for values in other)])
    assert rows == expected
    assert load_script("make_tables").page("bounce-cause", PAGE, run) == PAGE


def sentences(run, measured):
    fall, final = run.fall.mean("seed"), run.isel(step=-1).mean(("seed", "layer", "head"))
    yield f"the least of {run.sizes['step']} recorded values"
    falls = fall.sel(arm=["no-positions", "free"]).values
    yield f"entropy falls by {falls[0]:.2f} nats instead of {falls[1]:.2f}"
    yield f"({float(final.entropy.sel(arm='sgd')):.3f} nats are left)"
    linear = sorted(100 * value for value in measured["returns-linear"]["values"])
    yield f"as clearly in {linear[2]:.1f} % and {linear[1]:.1f} % of cases"
    distance = run.distance.sel(arm="free").mean(("seed", "layer"))
    nearest = int(distance.idxmin("step"))
    yield f"At the start attention reaches {float(distance[0]):.1f} tokens back"
    yield f"At step {nearest:,} it reaches {float(distance.min()):.1f} tokens"
    low, high = float(run.least.sel(arm="free").mean()), float(final.entropy.sel(arm="free"))
    yield f"has risen from {low:.2f} nats to {high:.2f}, {float(distance[-1]):.1f} tokens"
    best = run.best_entropy.isel(attention_step=-1).mean("seed")
    yield f"come back from {low:.2f} to {high:.2f} nats: at {float(best[0]):.2f} and {float(best[1]):.2f}"
    for claim, words in {
        "nonlinear-more": "adds {0:.2f} to {1:.2f} nats",
        "late-less-value-path": "of the difference {0:.2f} to {1:.2f})",
        "less-value-path": "do not decide it ({0:.2f} to {1:.2f})",
    }.items():
        yield words.format(*measured[claim]["interval"])
    for claim, words in {
        "memorised": "with an interval of {0:.0f} % to {1:.0f} %",
        "late-memorised": "it is {0:.1f} % to {1:.1f} %",
    }.items():
        yield words.format(*(100 * bound for bound in measured[claim]["interval"]))
    yield f"entropy returns by {100 * measured['memorised']['mean']:.0f} % of its start"
    late = {arm: recovery(run, arm, late=True) for arm in run.arm.values.tolist()}
    spans = {arm: f"{float(values.min()):.2f} to {float(values.max()):.2f}" for arm, values in late.items()}
    yield f"still returns by {spans['query-key-later']} nats"
    yield (
        f"from there on {spans['embedding-later']} nats return, with the MLP {spans['mlp-later']}, with the head "
        f"{spans['head-later']}, with W_V and W_O {spans['value-path-later']} (late recovery, range over seeds; "
        f"{spans['free']} with nothing frozen)"
    )
    means = {arm: float(values.mean()) for arm, values in late.items() if arm.endswith("-later")}
    assert min(means, key=lambda arm: means[arm]) == "value-path-later"
    assert run.turn.sel(arm="free").min() == 125
    dips = sum(bool(step < 500) for step in run.turn.sel(arm="free"))
    assert dips == 1
    yield "of the unchanged model in one seed of three"


def test_the_numbers_of_its_sentences_are_those_of_the_stored_run(stored):
    assert [sentence for sentence in sentences(stored.run, stored.measured) if sentence not in TEXT] == []
