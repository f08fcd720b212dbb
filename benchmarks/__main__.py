"""`make benchmark`, or `python -m benchmarks [NAME...]`: measure every promised number and compare it with its target.

Each benchmark is a module with a function `rows`, which yields for each number what is measured, the target, the
result, and whether the target is met.
"""

import sys
import time
from importlib import import_module

NAMES = (
    "growth",
    "invariants",
    "hierarchy",
    "startup",
    "training",
    "text",
    "language",
    "probes",
    "summary",
    "bounce",
    "watch",
    "activations",
    "series",
    "probing",
    "weights",
    "symmetry",
    "storage",
    "engine",
    "side_by_side",
    "related",
    "lab",
)


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; return the exit code: 1 if a target is missed, 2 for an unknown name."""
    if unknown := [name for name in names if name not in NAMES]:
        known = ", ".join(NAMES)
        print(f"no benchmark is called {', '.join(unknown)}; choose from {known}, or give no name.", file=sys.stderr)
        return 2
    missed = 0
    print(f"{'what':<78} {'target':>16} {'result':>22}")
    for name in names or NAMES:
        start = time.perf_counter()
        for what, target, result, met in import_module(f"benchmarks.{name}").rows():
            missed += not met
            print(f"{what:<78} {target:>16} {result:>22}  {'ok' if met else 'MISSED'}", flush=True)
        print(f"({name}: {time.perf_counter() - start:.1f} s)", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
