"""Waiting times of a user: `import joma` and `joma --help` against `import numpy`, `joma verify`, quick studies."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import Row

JOMA = str(Path(sys.executable).parent / "joma")


def seconds(command: list[str]) -> float:
    """Return the wall time of one command."""
    start = time.perf_counter()
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    commands = {
        "numpy": [sys.executable, "-c", "import numpy"],
        "import joma": [sys.executable, "-c", "import joma"],
        "joma --help": [JOMA, "--help"],
    }
    rounds = [{name: seconds(command) for name, command in commands.items()} for _ in range(15)]
    typical = {name: median(times[name] for times in rounds) for name in commands}
    for name in ("import joma", "joma --help"):
        ratio = typical[name] / typical["numpy"]
        yield f"{name}, against python -c 'import numpy'", "≤ 3 x", f"{ratio:.2f} x", ratio <= 3
    verify = seconds([JOMA, "verify"])
    yield "joma verify", "≤ 60 s", f"{verify:.1f} s", verify <= 60
    with tempfile.TemporaryDirectory() as out:
        studies = ["invariance", "winner", "sparse-dense", "critical-points", "cooccurrence"]
        quick = seconds([JOMA, "run", *studies, "--out", out])
    yield "the five theory studies, quick", "≤ 90 s", f"{quick:.1f} s", quick <= 90
