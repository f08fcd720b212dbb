"""What the claims of `bounce-cause` measure: how far entropy recovers in an arm, beyond chance and beside another."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.studies import entropy_return
from joma.studies.text.bounce_cause_arms import UNCHANGED
from joma.studies.text.entropy_bounce import MIN_BOUNCE, bounce_p_value, is_complete
from joma.study import NotInRun, select

TRAIN = "train_"  # before the names of measures on the training text
TENTH = 0.1  # of the steps: whether entropy is still falling is seen in the last two of them
MAX_EXCESS = 0.1  # nats above the floor of a training loss that counts as memorised; the choice is ours


def p_value(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return how often noise on a curve that never rises would rise as clearly as an arm's entropy, per seed."""
    return bounce_p_value(select(run.entropy, arm=arm))


def recovery(run: xr.Dataset, arm: str, text: str = "", *, late: bool = False) -> xr.DataArray:
    """Return the entropy at the end less its minimum, in nats, per seed; NaN for a seed that diverged.

    Args:
        run: the trajectory.
        arm: the arm's name.
        text: empty for the validation text, or `TRAIN`.
        late: whether the minimum is that since probes are evenly spaced. Before they are logarithmic, and see a dip of
            the first few hundred steps, which ends before the loss has fallen far and is the minimum of some seeds.
    """
    arm_run = select(run, arm=arm)
    if not late:
        return arm_run[f"{text}recovery"].where(is_complete(arm_run[f"{text}entropy"]))
    curve = arm_run[f"{text}entropy"].mean(("layer", "head"))
    late_curve = curve.isel(step=slice(_first_even_probe(curve.step.values), None))
    return entropy_return.recovery(late_curve, "step")


def has_even_probes(run: xr.Dataset) -> bool:
    """Return whether the run has evenly spaced probes, among which a late minimum is searched."""
    try:
        _first_even_probe(run.step.values)
    except NotInRun:
        return False
    return True


def _first_even_probe(steps: np.ndarray) -> int:
    """Return the number of the probe from which they are evenly spaced, but for the last, which is at the end."""
    spacing = np.diff(steps)[:-1]
    uneven = np.flatnonzero(spacing != spacing[-1:])
    first = int(uneven[-1]) + 1 if uneven.size else 0
    if first >= spacing.size - 1:
        raise NotInRun("probes that are evenly spaced")
    return first


def beyond_chance(run: xr.Dataset, arm: str, text: str = "", *, late: bool = False) -> xr.DataArray:
    """Return the recovery of entropy less that of noise alone, in nats, per seed; arguments are those of `recovery`.

    `NotInRun` if entropy never fell by `MIN_BOUNCE` of its start in some seed: what did not fall cannot come back.
    """
    arm_run = select(run, arm=arm)
    fall, start = arm_run[f"{text}fall"], arm_run[f"{text}fall"] + arm_run[f"{text}least"]
    if bool((fall < MIN_BOUNCE * start).any()):
        raise NotInRun(f"fall of entropy by {100 * MIN_BOUNCE:.0f} % in every seed of arm {arm}")
    return recovery(run, arm, text, late=late) - arm_run[f"{text}chance"]


def relative_return(run: xr.Dataset, arm: str, text: str = "", *, late: bool = False) -> xr.DataArray:
    """Return the recovery of entropy beyond that of noise, over the entropy at the start, per seed.

    Entropy that never rises has 0 on average, on either side of which seeds fall: so "it does not come back" means less
    than `MIN_BOUNCE`, the least that counts as a bounce. Arguments and `NotInRun` are those of `beyond_chance`.
    """
    arm_run = select(run, arm=arm)
    return beyond_chance(run, arm, text, late=late) / (arm_run[f"{text}fall"] + arm_run[f"{text}least"])


def settled_return(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return `relative_return`; `NotInRun` if entropy is still falling, so that it may yet come back."""
    check_settled(run, arm, late=False)
    return relative_return(run, arm)


def check_settled(run: xr.Dataset, arm: str, *, late: bool) -> None:
    """Raise `NotInRun` if an arm's entropy never fell in some seed or, mean over seeds, is still falling.

    It is if it has not come back by `MIN_BOUNCE`, and lies in the last tenth of the steps so far below the tenth before
    that at this pace, in as many steps again, it would fall by `MIN_BOUNCE` of its start.
    """
    if float(relative_return(run, arm, late=late).mean()) >= MIN_BOUNCE:
        return
    curve = select(run.entropy, arm=arm).mean(("layer", "head", "seed"))
    share = curve.step / curve.step[-1]
    last = curve.where(share > 1 - TENTH).mean("step")
    before = curve.where((share > 1 - 2 * TENTH) & (share <= 1 - TENTH)).mean("step")
    if bool(before - last > TENTH * MIN_BOUNCE * curve[0]):
        raise NotInRun(f"final entropy of arm {arm}: it is still falling at the end")


def memorised_return(run: xr.Dataset, *, late: bool = False) -> xr.DataArray:
    """Return `relative_return` of the memorised text on that text; `NotInRun` if some seed did not memorise it."""
    if bool((excess_loss(run) > MAX_EXCESS).any()):
        raise NotInRun("model that memorised its text in every seed")
    return relative_return(run, "memorised", TRAIN, late=late)


def recovery_difference(run: xr.Dataset, arm: str, reference: str = UNCHANGED) -> xr.DataArray:
    """Return the recovery of the reference less that of an arm from the same start, in nats, per seed."""
    return recovery(run, reference) - recovery(run, arm)


def half_margin(run: xr.Dataset, arm: str, reference: str = UNCHANGED, *, late: bool = False) -> xr.DataArray:
    """Return the recovery of an arm less half of the reference's from the same start, in nats, per seed.

    `NotInRun` if the reference recovers no more than noise in some seed: there is nothing to have a share of.
    """
    arm_recovery = recovery(run, arm, late=late)
    if bool((beyond_chance(run, reference, late=late) <= 0).any()):
        raise NotInRun(f"recovery beyond chance in every seed of arm {reference}")
    return arm_recovery - recovery(run, reference, late=late) / 2


def less_than_half(run: xr.Dataset, arm: str, *, late: bool = False) -> xr.DataArray:
    """Return `half_margin` of an arm of which we claim that less than half of the recovery remains.

    `NotInRun` also if the arm's entropy never fell in some seed, or is still falling: there is nothing to come back, or
    not yet.
    """
    margin = half_margin(run, arm, late=late)
    check_settled(run, arm, late=late)
    return margin


def excess_loss(run: xr.Dataset, arm: str = "memorised") -> xr.DataArray:
    """Return the final training loss above its floor, that of a memorised text, in nats, per seed."""
    return select(run, arm=arm).train_loss.isel(step=-1) - run.floor


def best_entropy(run: xr.Dataset, start: str) -> xr.DataArray:
    """Return the final entropy of attention that was trained alone, per seed; `NotInRun` if it was not."""
    if "best_entropy" not in run:
        raise NotInRun("training of attention alone")
    return select(run.best_entropy, start=start).isel(attention_step=-1)


def approach(run: xr.Dataset, start: str) -> xr.DataArray:
    """Return how much nearer to that of the best attention entropy is at the end than at its minimum, per seed.

        min(end − least, |least − best|) − |end − best|

    It is positive if entropy ends nearer to the best attention for the frozen rest than to its minimum, and than it was
    at its minimum. It is at most the recovery, which it is where the best attention has the entropy of the end.

    `NotInRun` if in some seed the two starts end further apart than entropy recovers: then nothing shows that either is
    the best attention. Attention that does not move from the end would be as near to it as can be.
    """
    best, unchanged = best_entropy(run, start), select(run, arm=UNCHANGED)
    if bool((start_difference(run) >= 0).any()):
        raise NotInRun("entropy of the best attention on which both starts agree in every seed")
    end = unchanged.least + unchanged.recovery
    return np.minimum(unchanged.recovery, abs(unchanged.least - best)) - abs(end - best)


def start_difference(run: xr.Dataset) -> xr.DataArray:
    """Return the distance of the entropies that both starts of attention reach, less the recovery, per seed."""
    difference = abs(best_entropy(run, "end") - best_entropy(run, "fresh"))
    return difference - select(run.recovery, arm=UNCHANGED)


def final_position_entropy(run: xr.Dataset, arm: str) -> dict[str, xr.DataArray]:
    """Return entropy by position at the start, at each seed's minimum and at the end [seed, position]."""
    arm_run = select(run, arm=arm)
    curve, turn = arm_run.position_entropy, arm_run.turn
    known = turn.where(np.isfinite(turn), run.step[0])
    return {
        "start": curve.isel(step=0, drop=True),
        "minimum": curve.sel(step=known, drop=True),
        "end": curve.isel(step=-1, drop=True),
    }
