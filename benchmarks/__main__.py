"""`make benchmark` (or `python -m benchmarks [NAME...]`): every promised number beside what this run reached."""

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
    "watch",
    "series",
    "symmetry",
)


def main(names: list[str]) -> int:
    """Print one line a number; exit 1 if one was not reached, 2 for a name that is none."""
    if unknown := [name for name in names if name not in NAMES]:
        print(
            f"names: expected some of {', '.join(NAMES)}, got {', '.join(unknown)}; leave them out for all",
            file=sys.stderr,
        )
        return 2
    missed = 0
    print(f"{'what':<78} {'asked':>16} {'reached':>22}")
    for name in names or NAMES:
        begun = time.perf_counter()
        for what, asked, reached, met in import_module(f"benchmarks.{name}").rows():
            missed += not met
            print(f"{what:<78} {asked:>16} {reached:>22}  {'ok' if met else 'MISSED'}", flush=True)
        print(f"({name}: {time.perf_counter() - begun:.1f} s)", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
