"""Read the training step from the name of a checkpoint.

A regular expression from outside can take longer than the age of the universe on a name of thirty letters, and Python
cannot stop it. It is therefore compiled and matched in another process, whose time and memory are limited.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from joma.arguments import InputError

EPOCH = r"epoch[-_=]?(?P<step>\d+)"
# How the checkpoints of known series are named, each with the group `step`. Unless a pattern is given all are tried,
# except for epochs, which count something else than the others.
PATTERNS = {
    "step": r"(?:global_)?step[-_]?(?P<step>\d+)",  # Pythia, and many others
    "checkpoint": r"checkpoint-(?P<step>\d+)",  # folders of the Hugging Face Trainer
    "olmo": r"(?:stage1-)?step(?P<step>\d+)-tokens\d+B",  # stage 2 counts its steps from 0 again: give a pattern for it
    "epoch": EPOCH,
}
MAX_STEP = 2**63 - 1  # steps are stored as 64-bit numbers
MATCH_SECONDS, MATCH_BYTES = 2, 1 << 30  # of computing and of memory, for a pattern from outside
WALL_SECONDS = 60  # on a machine so busy that two seconds of computing take longer
_MATCH = """
import json, re, resource, sys
pattern, names, seconds, size = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
try:
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
except (ValueError, OSError):  # macOS refuses it, and so does a system whose limit is lower already
    pass
try:
    expression = re.compile(pattern)
    matches = [expression.fullmatch(name) for name in names] if "step" in expression.groupindex else None
    answer = {"steps": matches and [match and match["step"] for match in matches]}
except (re.error, RecursionError, OverflowError) as cause:
    answer = {"problem": str(cause)}
json.dump(answer, sys.stdout)
"""


def read_steps(names: Sequence[str], pattern: str | None) -> list[str | None]:
    r"""Return the text of the group `step` for each name; None where the name as a whole does not match.

    Args:
        names: the names of checkpoints.
        pattern: a regular expression, or a key of `PATTERNS`; None tries all of those but `epoch`.

    >>> read_steps(["step10", "checkpoint-7", "main"], None), read_steps(["run3b"], r"run(?P<step>\d+)\w")
    (['10', '7', None], ['3'])
    """
    if pattern is not None and pattern not in PATTERNS:
        return _match_apart(names, pattern)
    keys = [key for key in PATTERNS if key != "epoch"] if pattern is None else [pattern]
    expressions = [re.compile(PATTERNS[key]) for key in keys]
    matches = [[match for expression in expressions if (match := expression.fullmatch(name))] for name in names]
    return [candidates[0]["step"] if candidates else None for candidates in matches]


def step_number(text: str) -> int | None:
    """Return the step that a name contains; None if it is no whole number or too large to be stored.

    >>> step_number("0512"), step_number("final"), step_number("9" * 20)
    (512, None, None)
    """
    digits = text.lstrip("0") or "0"
    if not text.isdecimal() or len(digits) > len(str(MAX_STEP)) or int(digits) > MAX_STEP:
        return None
    return int(digits)


def _match_apart(names: Sequence[str], pattern: str) -> list[str | None]:
    """Match the names in a process with limits; raise `InputError` if the pattern is wrong or takes too long."""
    question = json.dumps([pattern, list(names), MATCH_SECONDS, MATCH_BYTES])
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", _MATCH]
    try:
        result = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=WALL_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        got = f"{_shown(pattern)}, which tries too many ways of matching a name"
        remedy = "write it without repetitions inside repetitions, such as (a+)+"
        raise InputError("pattern", f"matched within {MATCH_SECONDS} seconds", got, remedy) from None
    answer = json.loads(result.stdout)
    if "problem" in answer:
        raise InputError("pattern", "a regular expression", f"{_shown(pattern)} ({answer['problem']})", "correct it")
    if answer["steps"] is None:
        remedy = r"write for example 'step(?P<step>\d+)'"
        raise InputError("pattern", "a group `step`", _shown(pattern), remedy, must="have")
    return answer["steps"]


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 200 else f"{pattern[:200]} …")
