"""What a study is: claims as data, the context of a run, and its execution."""

from joma.study.claim import Absent, Claim, Verdict, above, at_least, at_most, below, between, near, only
from joma.study.context import Arms, Context
from joma.study.execute import Drawing, Outcome, Preset, Study, execute, judge

__all__ = [
    "Absent",
    "Arms",
    "Claim",
    "Context",
    "Drawing",
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
    "only",
]
