"""What a study is: claims as data, the context of a run, and its execution."""

from joma.study.claim import Claim, NotInRun, Verdict, above, at_least, at_most, below, between, near, select
from joma.study.context import Arms, Context
from joma.study.execute import Drawing, Outcome, Preset, Study, execute, judge

__all__ = [
    "Arms",
    "Claim",
    "Context",
    "Drawing",
    "NotInRun",
    "Outcome",
    "Preset",
    "Study",
    "Verdict",
    "above",
    "at_least",
    "at_most",
    "below",
    "between",
    "execute",
    "judge",
    "near",
    "select",
]
