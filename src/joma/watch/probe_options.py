"""The options of a `Recorder`, which the callbacks take too: each is checked before the training begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from numbers import Number
from typing import Any, cast

from joma.arguments import InputError, choice, flag, scalar, whole
from joma.kernels.entropy_choice import PRECISIONS
from joma.probes.summary import MAX_TOP, check_measures
from joma.watch.loggers import check_log
from joma.watch.recording import check_sinks
from joma.watch.rows import check_rows

Policy = int | Collection[int] | Callable[[int], bool]


def doubling(step: int) -> bool:
    """Return whether to probe at `step` by default: at 0, 8, 16, 32 … 512, then every 1,000.

    These are nine probes in a thousand steps, each cheaper than a step: less than one per cent of the training.

    >>> [step for step in range(3001) if doubling(step)]
    [0, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000]
    """
    return step % 1000 == 0 or (8 <= step < 1000 and step & (step - 1) == 0)


def _check_policy(at: Any) -> Callable[[int], bool]:
    """Return the function that says whether a step is due."""
    if at is None:
        return doubling
    if callable(at):
        return cast(Callable[[int], bool], at)
    if isinstance(at, Number):
        interval = whole("at", at)
        return lambda step: step % interval == 0
    if isinstance(at, str | bytes) or not isinstance(at, Iterable):
        got = type(at).__name__
        raise InputError("at", "steps, an interval or a function", got, "write at=100 for every 100 steps")
    steps = frozenset(whole("at", step, low=0) for step in at)
    if not steps:
        raise InputError("at", "at least one step", "none", "write at=100 for every 100 steps")
    return steps.__contains__


def _check_ranks(ranks: Any) -> bool | str:
    """Return `ranks` if it selects weights: a bool or a regular expression."""
    try:
        return ranks if isinstance(ranks, bool) else re.compile(ranks).pattern
    except (TypeError, re.error) as cause:
        got = f"{ranks!r} ({cause})"
        raise InputError("ranks", "True, False or a regular expression", got, "correct it") from None


def _check_blocks(blocks: Any) -> str | None:
    """Return `blocks` if it is None or a regular expression."""
    try:
        return None if blocks is None else re.compile(blocks).pattern
    except (TypeError, re.error) as cause:
        raise InputError("blocks", "a regular expression", f"{blocks!r} ({cause})", "correct it") from None


def _check_forward(forward: Any) -> Any:
    if forward is None or callable(forward):
        return forward
    remedy = "write forward=lambda model, batch: model(batch)"
    raise InputError("forward", "a function of the model and the batch", repr(forward), remedy)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "at": _check_policy,
    "forward": _check_forward,
    "measures": check_measures,
    "top": lambda value: whole("top", value, low=1, high=MAX_TOP),
    "sinks": check_sinks,
    "ranks": _check_ranks,
    "residual": lambda value: flag("residual", value),
    "activation_ranks": lambda value: flag("activation_ranks", value),
    "gradients": lambda value: flag("gradients", value),
    "blocks": _check_blocks,
    "rows": check_rows,
    "precision": lambda value: choice("precision", value, {name: name for name in PRECISIONS}),
    "floor": lambda value: scalar("floor", value, low=0.0),
    "rank_floor": lambda value: scalar("rank_floor", value, low=0.0),
    "patience": lambda value: whole("patience", value),
    "log": check_log,
    "summary": lambda value: flag("summary", value),
    "distributed": lambda value: None if value is None else flag("distributed", value),
    "strict": lambda value: flag("strict", value),
}


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a `Recorder` as it uses them; an unknown name or a bad value raises `InputError`."""
    return {name: choice("options", name, CHECKS)(value) for name, value in options.items()}


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` as they are if all are valid options of a `Recorder`; callbacks do so before training."""
    checked_options(options)
    return options
