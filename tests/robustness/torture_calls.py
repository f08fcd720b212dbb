"""Calls of public functions with hostile arguments: each answers, or refuses with one line that names the argument.

Every call of `call_table` is repeated with one or two arguments replaced. Calls run in forked processes with limits on
memory and processor time, so that none can end the harness. A call fails if it takes too long, dies, leaks a warning,
or raises anything but `InputError`, `StateError` or `IntegrationError`. It is printed as code to paste into a test.

    python -m robustness.torture_calls [CALLS]      (with tests/ on the path)
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import joma
from joma.arguments import InputError, StateError
from joma.theory.integration import IntegrationError
from robustness.call_table import CALLS

COUNT = 8000  # calls at scale 1
BATCH = 100  # calls of one process
MEMORY = 3 * 2**30  # bytes that a process may allocate
SECONDS = 5.0  # of processor time for a call
INTEGRATOR_SECONDS = 20.0  # its bound counts evaluations, which take longer on a slow machine
SILENCE = 300.0  # seconds without an answer after which a process counts as hung
REFUSALS = (InputError, StateError, IntegrationError)
# What the integrator, the optimiser and the command line call arguments that they were given under other names.
SYNONYMS = (
    *("optimiser", "rhs", "y0", "times", "gradient", "embedding", "skip", "kink_width", "temperature"),
    *("--grid", "--random"),
)

VALUES = (
    *("None", "True", "0", "-1", "-0.0", "2**62", "2**63", "10**400", "1e308", "-1e308", "5e-324", "0.5"),
    *(
        "float('nan')",
        "float('inf')",
        "1j",
        "''",
        "'abc'",
        "'12'",
        "b'1'",
        "['1', '2']",
        "object()",
        "[]",
        "[[]]",
        "()",
    ),
    *("[[1.0], [1.0, 2.0]]", "[1.0, None]", "[float('nan')] * 3", "{}", "{1}", "len", "(lambda *given: None)", "dict"),
    *("[1e308, -1e308]", "[5e-324, 1.0]", "[0.0, 0.0]", "[-1.0, 2.0]", "[True, False]", "[1e200, 1e-200, 1.0]"),
    *("np.datetime64('2020-01-01')", "np.array(['2020'], dtype='M8[D]')", "np.timedelta64(1, 's')"),
    *("np.array([True, False])", "np.zeros((0, 3))", "np.ones((2, 3, 4, 5))", "np.float16(1)", "np.array(['a'])"),
    *(
        "np.array([1, 2], dtype='>f8')",
        "np.array([1.0, None])",
        "np.zeros(2, dtype=[('a', float)])",
        "np.longdouble(1)",
    ),
    *("np.ma.masked_array([1.0, 2.0], [False, True])", "np.broadcast_to(1.0, (10**6, 10**6))", "np.array(2)"),
    *("np.broadcast_to(1, 10**12)", "torch.ones(1).expand(10**6, 10**6)", "torch.ones(2, 3, requires_grad=True)"),
    *("torch.ones(2, 3, device='meta')", "torch.eye(3).to_sparse()", "torch.ones(3, 3, dtype=torch.bfloat16)"),
    *("torch.ones(2, 2).to(torch.float8_e4m3fn)", "torch.ones(2, 2, dtype=torch.complex64)", "torch.tensor([1, 2])"),
    *("torch.zeros(0)", "torch.tensor(1.0)", "torch.nn.Linear(2, 2)", "torch.Generator()", "torch.float32", "joma"),
)


# Functions of the user, whose own errors are not the harness's business.
FUNCTIONS = ("rhs", "model", "gradient", "measure")
ANY_FUNCTION = ("len", "(lambda *given: None)", "dict", "torch.nn.Linear(2, 2)")


def array(value: Any) -> np.ndarray:
    """Return a value of any kind as an array, to be made hostile."""
    return value.numpy() if isinstance(value, torch.Tensor) else np.array(value)


def frozen(value: Any) -> np.ndarray:
    """Return a read-only array."""
    copy = array(value)
    copy.flags.writeable = False
    return copy


def strided(value: Any) -> np.ndarray:
    """Return an array of the same numbers that is not contiguous in memory."""
    original = array(value)
    return np.repeat(original, 2, axis=-1)[..., ::2] if original.ndim else original


class Labelled(np.ndarray):
    """A subclass of arrays, as those of other libraries are."""


def with_nan(value: Any) -> np.ndarray:
    """Return the array with NaN in place of its first number."""
    copy = np.array(array(value), dtype=float)
    copy.flat[:1] = np.nan
    return copy


WAYS = (
    *("frozen({})", "strided({})", "np.asfortranarray(array({}))", "array({}).view(Labelled)", "with_nan({})"),
    *(
        "torch.from_numpy(np.array(array({})))",
        "-array({})",
        "array({}) * 1e300",
        "array({}) * 1e-300",
        "array({})[None]",
    ),
    *("array({}).T", "array({}).ravel()[:1]", "array({}).astype(np.float32)", "array({}).astype(str)", "array({}) > 0"),
    *("array({}).tolist()", "array({}).astype(object)", "np.broadcast_to(array({}), (2, *np.shape({})))", "[{}]"),
)
NAMESPACE = {
    **{"np": np, "torch": torch, "joma": joma, "array": array, "frozen": frozen, "strided": strided},
    **{"Labelled": Labelled, "with_nan": with_nan},
}


@dataclass(frozen=True)
class Call:
    """A function and its arguments, as source code; `changed` names the arguments that are not as in the table."""

    function: str
    arguments: dict[str, str]
    changed: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Return the call as code."""
        return f"{self.function}({', '.join(f'{name}={source}' for name, source in self.arguments.items())})"

    @property
    def seconds(self) -> float:
        """Return the limit on its processor time."""
        uses_integrator = any(name in self.function for name in ("theory.flows", "integrate", ").solve"))
        return INTEGRATOR_SECONDS if uses_integrator else SECONDS

    def change(self, name: str, source: str) -> Call:
        """Return the call with another argument."""
        return replace(self, arguments={**self.arguments, name: source}, changed=(*self.changed, name))


def valid_calls() -> list[Call]:
    """Return the calls of the table."""
    return [Call(function, arguments) for function, arguments in CALLS.items()]


def single_changes() -> list[Call]:
    """Return every call with every hostile value in place of each of its arguments."""
    return [
        call.change(name, source)
        for call in valid_calls()
        for name, usual in call.arguments.items()
        for source in (*VALUES, *(way.format(*(usual,) * way.count("{}")) for way in WAYS))
        if name not in FUNCTIONS or source not in ANY_FUNCTION
    ]


def drawn_calls(count: int, chance: random.Random) -> list[Call]:
    """Return `count` calls at random: three of four with one argument changed, the others with two."""
    singles = single_changes()
    chosen = chance.sample(singles, min(len(singles), count))
    for index in range(0, len(chosen), 4):
        call = chosen[index]
        name = chance.choice(list(call.arguments))
        chosen[index] = call.change(name, chance.choice([source for source in VALUES if source not in ANY_FUNCTION]))
    return chosen


def judge(call: Call) -> tuple[str, str]:
    """Make a call and return "answered" or "refused", or else what is wrong and the details."""
    try:
        function, arguments = eval(call.function, NAMESPACE), {}
        for name, source in call.arguments.items():
            arguments[name] = eval(source, NAMESPACE)
    except Exception:
        return "impossible", ""  # such as a string times a number: there is nothing to call with
    signal.setitimer(signal.ITIMER_PROF, call.seconds, 1.0)  # and again, where an exception is lost in a callback
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(**arguments)
    except REFUSALS as refusal:
        return _refused(call, refusal)
    except TooSlowError:
        return "too slow", f"more than {call.seconds:g} s"
    except Exception as error:
        return type(error).__name__, str(error)[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return "answered", ""


def _refused(call: Call, refusal: Exception) -> tuple[str, str]:
    message = str(refusal)
    if not message.isprintable():
        return "several lines", message[:300]
    if isinstance(refusal, InputError) and not any(name in refusal.name for name in (*call.arguments, *SYNONYMS)):
        return "unnamed", message[:300]
    return "refused", ""


class TooSlowError(BaseException):
    """A call has used up its processor time; not an `Exception`, which the code under test might catch."""


def _raise_too_slow(*_: Any) -> None:
    raise TooSlowError


def _child(calls: list[Call], pipe: int) -> None:
    """Make the calls, and write an outcome for each, one line of JSON; run in a forked process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _raise_too_slow)
    for call in calls:
        start = time.process_time()
        outcome, details = judge(call)
        line = json.dumps([outcome, details, time.process_time() - start]) + "\n"
        os.write(pipe, line.encode())


def outcomes(calls: list[Call]) -> Iterator[tuple[Call, str, str, float]]:
    """Yield each call with its outcome, details and seconds; a call that ends its process has outcome "died"."""
    position = 0
    while position < len(calls):
        batch = calls[position : position + BATCH]
        answers, end = _answers(batch)
        for call, answer in zip(batch, answers, strict=False):
            yield call, *json.loads(answer)
        position += len(answers)
        if len(answers) < len(batch):
            yield batch[len(answers)], *end, 0.0
            position += 1


def _answers(batch: list[Call]) -> tuple[list[bytes], tuple[str, str]]:
    """Run a batch in a forked process; return its answers, and how it ended if they are too few."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            _child(batch, writing)
        finally:
            os._exit(0)
    os.close(writing)
    received, end = b"", ("died", "")
    while True:
        if not select.select([reading], [], [], SILENCE)[0]:
            os.kill(process, signal.SIGKILL)
            end = "hung", f"no answer in {SILENCE:g} s"
        part = os.read(reading, 2**16)
        if not part:
            break
        received += part
    os.close(reading)
    _, status = os.waitpid(process, 0)
    if end[0] == "died":
        end = "died", f"status {status}"
    return received.splitlines(), end


def prepare() -> None:
    """Import every function of the table, so that the forked processes need not."""
    torch.set_num_threads(1)
    for call in valid_calls():
        for depth in range(1, call.function.count(".") + 1):
            name = ".".join(call.function.split(".")[:depth])
            if name.isidentifier() or all(part.isidentifier() for part in name.split(".")):
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError:
                    break
        eval(call.function, NAMESPACE)


def run(calls: list[Call]) -> tuple[Counter[str], float]:
    """Make the calls, print those that fail as code, and return the counts of outcomes and the longest time."""
    prepare()
    counts: Counter[str] = Counter()
    slowest = 0.0
    for call, outcome, details, seconds in outcomes(calls):
        counts[outcome] += 1
        slowest = max(slowest, seconds)
        if outcome not in ("answered", "refused", "impossible"):
            print(f"# {outcome}: {details!r}, changed {', '.join(call.changed)}\n{call.code}\n", flush=True)  # noqa: T201
    return counts, slowest


def torture(scale: float) -> dict[str, int]:
    """Make about 8,000 calls at scale 1, of which the hostile values are drawn anew every time."""
    print("# from robustness.torture_calls import *; import joma, numpy as np, torch\n")  # noqa: T201
    counts, _ = run(drawn_calls(int(COUNT * scale), random.Random()))
    good = {name: counts.pop(name, 0) for name in ("answered", "refused", "impossible")}
    return {
        "calls with hostile arguments": good["answered"] + good["refused"] + sum(counts.values()),
        "answered": good["answered"],
        "refused": good["refused"],
        "failed": sum(counts.values()),
    }


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    start = time.perf_counter()
    every = [*valid_calls(), *drawn_calls(number, random.Random(0))] if number else valid_calls()
    results, longest = run(every)
    print(dict(results), f"longest {longest:.1f} s, in all {time.perf_counter() - start:.0f} s")  # noqa: T201
    sys.exit(any(name not in ("answered", "refused", "impossible") for name in results))
