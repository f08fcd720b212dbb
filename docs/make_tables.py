"""Write the tables of `docs/ladder.md` and `docs/bounce-cause.md` from stored runs. Run by `make runs-page`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import xarray as xr
from scipy import stats

from generated import paragraph, table, with_generated_parts
from joma.runs import find_runs, open_run
from joma.studies import entropy_return
from joma.studies.entropy_return import fall
from joma.studies.text import bounce_cause_arms
from joma.studies.text.bounce_cause_measures import recovery
from joma.studies.theorems import ladder_arms
from joma.studies.theorems.ladder_training import (
    STEP,
    at_own_rate,
    bounced,
    judged_rate,
    judged_trajectory,
    long_enough,
    share_regained,
)
from joma.studies.theorems.ladder_training_figures import RUNG_NAMES
from joma.study import NotInRun

DOCS = Path(__file__).parent


class Pilot(NamedTuple):
    """What a pilot saw of an arm at its own learning rate: how many of its four seeds came back."""

    bounced: int
    steps: int = 1500


PILOT_SEEDS = 4
PILOT = {
    "base": Pilot(4),
    "constant": Pilot(0),
    "relu": Pilot(2),
    "mlp": Pilot(4),
    "adam": Pilot(4),
    "norm": Pilot(1),
    "embeddings": Pilot(4),
    "product": Pilot(4),
    "positions": Pilot(0),
    "top": Pilot(4),
    "top-linear": Pilot(4),
    "top-fixed": Pilot(3),
    "top-no-norm": Pilot(4),
    "top-sgd": Pilot(0),
    "top-free": Pilot(0),
    "top-one": Pilot(4),
    "all-product": Pilot(3, steps=3000),
}


def with_range(values: xr.DataArray) -> str:
    """Return the mean and the range over seeds as text.

    >>> with_range(xr.DataArray([0.5, 1.0]))
    '0.75 (0.50 to 1.00)'
    """
    return f"{float(values.mean()):.2f} ({float(values.min()):.2f} to {float(values.max()):.2f})"


def bounce_cause_arms_part(run: xr.Dataset) -> str:
    """Return the table of the arms on text: recovery of entropy, what noise alone recovers, and the loss."""
    rows = []
    for arm in run.arm.values.tolist():
        recoveries = [with_range(recovery(run, arm, late=late)) for late in (False, True)]
        chance, loss = run.chance.sel(arm=arm), run.valid_loss.sel(arm=arm).isel(step=-1)
        means = [f"{float(values.mean()):.2f}" for values in (chance, loss)]
        rows.append([bounce_cause_arms.ARMS[arm].label, *recoveries, *means])
    columns = ["changed", "recovery", "late recovery", "noise alone", "loss"]
    return table(columns, rows, numbers=False) + "\n"


def ladder_label(name: str) -> str:
    """Return what differs in an arm of the ladder, and from what."""
    arm = ladder_arms.ARMS[name]
    return f"{RUNG_NAMES.get(arm.rung, '')}{arm.about}"


def ladder_arms_part(run: xr.Dataset) -> str:
    """Return the table of the trained arms of the ladder, each at the learning rate at which it is judged."""
    columns = ["what differs", "arm", "learning rate", "long enough", "fall", "share of it regained", "come back"]
    rows = [[ladder_label(arm), f"`{arm}`", *_ladder_cells(run, arm)] for arm in run.arm.values.tolist()]
    return table(columns, rows) + "\n"


def _ladder_cells(run: xr.Dataset, arm: str) -> list[str]:
    try:
        trajectory, rate = judged_trajectory(run, arm), judged_rate(run, arm)
    except NotInRun:
        return ["diverged", *4 * ["–"]]
    entropy = trajectory.trained_entropy
    return [
        f"{rate * ladder_arms.ARMS[arm].rate:.2g}",
        _of_seeds(long_enough(trajectory)),
        with_range(fall(entropy, STEP)),
        with_range(share_regained(entropy)),
        _of_seeds(bounced(trajectory)),
    ]


def _of_seeds(flags: xr.DataArray) -> str:
    return f"{int(flags.sum())} of {flags.sizes['seed']}"


def pilot_counts(run: xr.Dataset, arm: str) -> tuple[int, int]:
    """Return how many seeds of an arm come back at its own learning rate, after the pilot's steps and at the end."""
    trajectory = at_own_rate(run, arm)
    early = trajectory.sel(trained_step=slice(0, PILOT[arm].steps))
    return int(bounced(early).sum()), int(bounced(trajectory).sum())


def counts_by_rate(run: xr.Dataset, arm: str) -> list[int]:
    """Return how many seeds of an arm come back at the end, for each learning rate from the smallest on."""
    trajectories = run[["trained_entropy", "trained_loss"]].sel(arm=arm, drop=True)
    return [int(bounced(trajectories.sel(rate=rate)).sum()) for rate in sorted(run.rate.values.tolist())]


def pilot_chance(run: xr.Dataset, arm: str) -> float:
    """Return the two-sided p of Fisher's exact test: pilot and run at the same learning rate and steps."""
    seeds, count = run.sizes["seed"], pilot_counts(run, arm)[0]
    seen = PILOT[arm].bounced
    return float(stats.fisher_exact([[seen, PILOT_SEEDS - seen], [count, seeds - count]])[1])


def ladder_pilot_part(run: xr.Dataset) -> str:
    """Return the table of the arms that a pilot trained too: how many seeds come back there and in the run."""
    rates = ", ".join(f"{rate:g}×" for rate in sorted(run.rate.values.tolist()))
    columns = [
        "what differs", "pilot", "same rate, same steps", "same rate, at the end", f"at the end, at {rates} the rate",
        "judged", "p",
    ]  # fmt: skip
    rows, chances = [], {}
    for arm, pilot in PILOT.items():
        chances[arm] = pilot_chance(run, arm)
        seeds = [f"{count} of {run.sizes['seed']}" for count in pilot_counts(run, arm)]
        by_rate = ", ".join(map(str, counts_by_rate(run, arm)))
        judged = _of_seeds(bounced(judged_trajectory(run, arm)))
        row = [ladder_label(arm), f"{pilot.bounced} of {PILOT_SEEDS}", *seeds, by_rate, judged, f"{chances[arm]:.2f}"]
        rows.append(row)
    least = min(chances.values())
    sentence = f"The least p of these {len(PILOT)} comparisons is {least:.2f}."
    return f"{table(columns, rows)}\n\n{paragraph([sentence])}\n"


WORLDS = {
    "overlap": "one length, every token in every class",
    "separable": "tokens separate the classes",
    "lengths": "*lengths*: contexts of 1 or 5 tokens, half each",
    "noise": "*noise*: in half of the contexts a third of the tokens is equally likely in all classes",
}
UNITS = {"linear": "linear", "gelu": "GELU"}


def ladder_worlds_part(run: xr.Dataset) -> str:
    """Return the table of the worlds that are solved: entropy at the optimum, its fall and what it regains."""
    columns = ["world", "units", "optimum's entropy", "fall", "share of it regained"]
    rows = []
    for world, description in WORLDS.items():
        for activation, units in UNITS.items():
            solution = run.sel(world=world, activation=activation)
            if bool(solution.entropy.isnull().all()):
                continue
            fallen, share = fall(solution.entropy, "time"), entropy_return.share_regained(solution.entropy, "time")
            optimum = "at infinity" if world == "separable" else _span(solution.optimum_entropy, 2)
            rows.append([description, units, optimum, _span(fallen, 2), _span(share, 3)])
    return table(columns, rows, numbers=False) + "\n"


def _span(values: xr.DataArray, digits: int) -> str:
    """Return the least and the greatest value as text, once where they are the same."""
    low, high = (f"{float(bound):.{digits}f}" for bound in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


PAGES: dict[str, dict[str, Callable[[xr.Dataset], str]]] = {
    "ladder": {"worlds": ladder_worlds_part, "arms": ladder_arms_part, "pilot": ladder_pilot_part},
    "bounce-cause": {"arms": bounce_cause_arms_part},
}
"""The parts of the page of a study, which has the study's name."""


def page(study: str, text: str, run: xr.Dataset) -> str:
    """Return the page of a study with its tables as the run has them."""
    return with_generated_parts(text, {name: partial(part, run) for name, part in PAGES[study].items()})


def stored_runs() -> Mapping[str, xr.Dataset]:
    """Return the stored run of each study that has a page with tables."""
    return {path.parent.name: open_run(path) for path in find_runs(DOCS / "runs") if path.parent.name in PAGES}


def main() -> None:
    """Write the tables into the pages."""
    for study, run in stored_runs().items():
        path = DOCS / f"{study}.md"
        path.write_text(page(study, path.read_text(encoding="utf-8"), run), encoding="utf-8")


if __name__ == "__main__":
    main()
