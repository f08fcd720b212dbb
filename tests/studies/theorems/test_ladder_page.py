"""What `docs/ladder.md` says of the stored run is what the run says: its tables, and the argument about speed."""

import doctest

import numpy as np
import pytest
from scipy import stats

from joma.studies.theorems.ladder_arms import ARMS
from joma.studies.theorems.ladder_measures import arrived, came_back, predicted_return
from joma.studies.theorems.ladder_training import (
    bounced,
    judged_trajectory,
    optimal_entropy,
    settled_entropy,
    share_regained,
)
from joma.studies.theorems.ladder_worlds import KINDS
from test_deviations import Stored
from test_docs import ROOT, load_script

TEXT = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
PAGE = " ".join(TEXT.split()).replace("−", "-")
make_tables = load_script("make_tables")


@pytest.fixture(scope="module")
def stored():
    return Stored("ladder")


def sentences(stored):
    run, measured = stored.run, stored.measured
    steps = "same-optimum", "early-weights", "product-speed", "overshoot", "no-overshoot", "speed-free", "speed-product"
    assert {stored.verdicts[name] for name in steps} == {"holds"}
    back = {arm: int(bounced(judged_trajectory(run, arm)).sum()) for arm in run.arm.values.tolist()}
    assert not any(back[name] for name, arm in ARMS.items() if arm.rung == "two-in")
    assert back["repeated"] == 7
    yield "attention comes back in none; with a fixed batch alone it comes back in seven seeds of eight"
    yield "Each step of the argument is a claim, and each holds"

    assert float(run.trained_optimum_gradient.max()) < 1e-6
    yield "in the stored run it is below 1e-6"
    yield f"differ by at most {measured['same-optimum']['max']:.3f} ln M"
    optima = run.trained_optimum_entropy
    yield f"The optimum's entropy is {float(optima.min()):.2f} to {float(optima.max()):.2f} ln M in the eight seeds"

    slow = {arm: share_regained(settled_entropy(run, arm)) for arm in ("all-free", "all-product-slow")}
    assert float(slow["all-free"].max()) == 0
    assert float(slow["all-product-slow"].max()) <= 1e-3
    yield "product logits with a tenth of the learning rate at most 0.1 %"
    for claim, words in {
        "speed-free": "ten times the learning rate {0:.0f} % (95 % interval {1:.0f} to {2:.0f} %)",
        "speed-product": "product logits {0:.0f} % ({1:.0f} to {2:.0f} %)",
    }.items():
        yield words.format(*(100 * value for value in (measured[claim]["mean"], *measured[claim]["interval"])))

    low, high = measured["early-weights"]["interval"]
    yield f"by {measured['early-weights']['mean']:.2f} ln M ({low:.2f} to {high:.2f}; `early-weights`)"
    yield f"Product logits grow {measured['product-speed']['mean']:.0f} times as fast as free ones"
    low, high = measured["overshoot"]["interval"]
    yield f"by {measured['overshoot']['mean']:.3f} ln M ({low:.3f} to {high:.3f}; `overshoot`)"
    high, low = measured["no-overshoot"]["interval"]
    yield f"by {-measured['no-overshoot']['mean']:.3f} ln M ({-low:.3f} to {-high:.3f}; `no-overshoot`)"

    last = {"free": settled_entropy(run, "all-free-fast"), "product": settled_entropy(run, "all-product")}
    left = {logits: entropy.isel(trained_step=-1) - optimal_entropy(run, logits) for logits, entropy in last.items()}
    free, product = abs(left["free"]).max(), left["product"]
    yield f"free ones within {float(free):.3f} ln M of it"
    yield f"product logits {float(product.min()):.3f} to {float(product.max()):.3f} above"


def sentences_of_worlds(stored):
    """What the page says of the worlds that are solved."""
    run, measured = stored.run, stored.measured
    assert run.sizes["seed"] == 8
    yield "The [stored run](findings/ladder.md) has eight seeds"
    yield f"The loss ends at most {measured['bayes']['max']:.0e} above the Bayes risk"
    yield f"the weights at most {100 * measured['naive-bayes']['max']:.0f} % from naive Bayes"
    yield f"follows the flow to {measured['sgd-flow']['max']:.3f}"
    denser = measured["gelu-optimum"]
    yield f"by {denser['mean']:.2f} on average, which is undecided"
    assert stored.verdicts["gelu-optimum"] == "not tested"
    yield "(95 % interval -{:.2f} to {:.2f})".format(-denser["interval"][0], denser["interval"][1])
    low, high = measured["gelu-to-the-optimum"]["min"], measured["gelu-to-the-optimum"]["max"]
    yield f"in each seed by {low:.2f} to {high:.2f}"
    yield from sentences_of_random_worlds(run, measured)
    shares = run.isel(case=run.family == "shares")
    has_arrived, back = arrived(shares), came_back(shares) & arrived(shares)
    ends = shares.case_optimum.isel(case=[0, -1]).mean("seed").values
    assert shares.setting.values[[0, -1]].tolist() == [0.0, 0.9]
    assert ends[0] == pytest.approx(1)
    yield f"from uniform (share 0) to {ends[1]:.2f} (share 0.9)"
    few, many = shares.setting <= 0.05, shares.setting >= 0.75
    counts = [int(flags.where(part, 0).sum()) for part in (few, many) for flags in (back, has_arrived)]
    yield "at shares up to 0.05 attention comes back in {} of {} worlds, from 0.75 on in {} of {}".format(*counts)
    missing = [int((~arrived(run.isel(case=run.family == name))).sum()) for name in ("random", "shares", "planted")]
    yield "{} random worlds, {} mixtures and {} planted world had not arrived".format(*missing)
    assert int((shares.case_excess < -1e-6).sum()) == 1
    yield "In one mixture the flow ended at a lower loss than the searches"
    assert sum(value < 0.05 for value in measured["fall"]["values"]) == 2
    yield f"Entropy falls by less than 0.05 in two seeds (`fall`, least {measured['fall']['min']:.3f})"
    assert sum(value < 0.9 for value in measured["gelu-bounce"]["values"]) == 1
    yield f"GELU units regain {100 * measured['gelu-bounce']['min']:.0f} % in one"
    assert sum(value > 0.01 for value in measured["sgd-lengths"]["values"]) == 1
    yield f"comes back by {100 * measured['sgd-lengths']['max']:.0f} % in one seed that SGD trains"


def sentences_of_random_worlds(run, measured):
    random = run.isel(case=run.family == "random")
    counted, returned = arrived(random), came_back(random)
    count, back = int(counted.sum()), int((counted & returned).sum())
    distance = abs(random.case_end - random.case_optimum).where(counted)
    yield f"**Random worlds** ({counted.size}; "
    yield f"{count} arrive at their optimum, {back} of them come back"
    near = 100 * int((distance <= 0.02).sum()) / count
    yield f"in {near:.1f} % of these, on average {float(distance.mean()):.3f} from it"
    yield f"explains {100 * measured['random-explained']['mean']:.0f} % of the variance"
    below = predicted_return(random) & counted
    right = 100 * int(((predicted_return(random) == returned) & counted).sum()) / count
    yield f"The verdict is predicted in {right:.0f} %; always to say"
    yield f'"comes back" is right in {100 * back / count:.0f} %'
    yield f'"with linear units never", in {100 * (1 - back / count):.0f} %'
    yield f"Of {int(below.sum())} random worlds whose path had gone below"
    yield f"90 % of its fall, {int((below & returned).sum())} came back"
    later = int((~predicted_return(random) & returned & counted).sum())
    yield f"Of those whose path had not, {later} went below it later"
    planted = run.isel(case=run.family == "planted")
    late = int((~predicted_return(planted) & came_back(planted) & arrived(planted)).sum())
    yield f"With planted optima this is so common ({late} of {int(arrived(planted).sum())})"
    far = (distance > 0.02).values
    assert {KINDS[kind] for kind in random.case_kind.values[far]} == {"planted"}
    yield f"In {far.sum()} random worlds that count as arrived, all planted"
    yield f"at most by {float(distance.max()):.2f}"


def test_the_page_has_the_numbers_of_the_stored_run(stored):
    assert [sentence for sentence in sentences(stored) if sentence not in PAGE] == []
    assert [sentence for sentence in sentences_of_worlds(stored) if sentence not in PAGE] == []


def test_the_tables_are_those_of_the_stored_run(stored):
    assert make_tables.page("ladder", TEXT, stored.run) == TEXT
    arms = stored.run.arm.values.tolist()
    assert arms == [name for name in ARMS if name in arms]
    *others, last = [f"`{name}`" for name in ARMS if name not in arms] or [""]
    sentence = f"It lacks five arms that the preset `paper` has got since: {', '.join(others)} and {last}."
    assert (sentence in PAGE) == bool(last)
    assert doctest.testmod(make_tables).failed == 0


def columns_of(table, name):
    """Return the cells of the row of an arm, by their column."""
    titles, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|"))
    (row,) = (row for row in rows if row[0] == make_tables.ladder_label(name))
    return dict(zip(titles, row, strict=True))


def curves(run, arm, rate):
    """Return entropy and loss, [seed, step], and the steps."""
    at_rate = run.sel(arm=arm, rate=rate).transpose("seed", "trained_step", ...)
    return at_rate.trained_entropy.values, at_rate.trained_loss.values, run.trained_step.values


def come_back(entropy):
    """Return which seeds fall by 0.02 or more and regain a tenth of their fall."""
    fall, regained = entropy[:, 0] - entropy.min(axis=1), entropy[:, -1] - entropy.min(axis=1)
    return (fall >= 0.02) & (regained >= 0.1 * fall)


@pytest.mark.parametrize("arm", ["base", "relu", "top", "top-linear", "all-rank-1"])
def test_a_row_is_what_the_curves_of_the_arm_say(stored, arm):
    run = stored.run
    losses = {rate: curves(run, arm, rate)[1][:, -1].mean() for rate in run.rate.values.tolist()}
    best = min(losses, key=losses.get)
    entropy, loss, steps = curves(run, arm, best)
    falls = entropy[:, 0] - entropy.min(axis=1)
    shares = (entropy[:, -1] - entropy.min(axis=1)) / falls
    assert falls.min() >= 0.02
    fallen = [steps[np.argmax(row[0] - row >= 0.9 * (row[0] - row.min()))] for row in loss]
    cells = columns_of(make_tables.ladder_arms_part(run), arm)
    assert cells["learning rate"] == f"{best * ARMS[arm].rate:.2g}"
    assert cells["long enough"] == f"{sum(10 * step <= steps[-1] for step in fallen)} of {len(entropy)}"
    for title, values in {"fall": falls, "share of it regained": shares}.items():
        assert cells[title] == f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"
    assert cells["come back"] == f"{come_back(entropy).sum()} of {len(entropy)}"


@pytest.mark.parametrize("arm", ["relu", "norm", "top-fixed", "all-product"])
def test_a_row_of_the_pilot_is_what_the_curves_of_the_arm_say(stored, arm):
    entropy, _, steps = curves(stored.run, arm, 1.0)
    pilot, seeds = make_tables.PILOT[arm], len(entropy)
    early, end = (int(come_back(entropy[:, steps <= last]).sum()) for last in (pilot.steps, steps[-1]))
    cells = columns_of(make_tables.ladder_pilot_part(stored.run), arm)
    assert (cells["same rate, same steps"], cells["same rate, at the end"]) == (
        f"{early} of {seeds}",
        f"{end} of {seeds}",
    )
    table = [[pilot.bounced, 4 - pilot.bounced], [early, seeds - early]]
    assert cells["p"] == f"{stats.fisher_exact(table)[1]:.2f}"


def test_a_diverged_arm_has_a_row(stored):
    lost = stored.run.assign(trained_loss=stored.run.trained_loss.where(stored.run.arm != "relu"))
    assert columns_of(make_tables.ladder_arms_part(lost), "relu")["learning rate"] == "diverged"


def test_why_the_run_differs_from_the_pilot(stored):
    """The sentences below the table, as far as the run decides them."""
    run = stored.run
    seeds = run.sizes["seed"]
    assert min(make_tables.pilot_chance(run, arm) for arm in make_tables.PILOT) > 0.05
    for arm in ("relu", "norm"):
        early, end = make_tables.pilot_counts(run, arm)
        assert early < seeds / 2 < end
        assert make_tables.counts_by_rate(run, arm)[0] < end
    for arm in ("top-linear", "top-fixed"):
        judged = run.rate.values.tolist().index(make_tables.judged_rate(run, arm))
        counts = make_tables.counts_by_rate(run, arm)
        assert counts[judged] < counts[-1]
    for arm in ("base", "top", "top-linear"):
        assert make_tables.PILOT[arm].bounced == make_tables.PILOT_SEEDS
        assert make_tables.pilot_counts(run, arm)[0] < seeds
