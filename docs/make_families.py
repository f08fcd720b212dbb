"""Write `docs/families.md`, the models whose attention is watched, from the tests. Run by `make reference`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("families.md")
TESTS = str(Path(__file__).parents[1] / "tests")
HEAD = """# Families of models whose attention is watched

`joma.watch.attention` was compared with the attention weights of tiny random models of these families, row by row and
head by head: the entropies agree to 1e-5 nats, the outputs are the same bits, and every attention of a pass is recorded
(`tests/watch/test_families.py`, `tests/watch/test_timm_models.py`; `make torture` tries all of them). A family is a
model type of transformers. This page is generated: `make reference`.
"""


def paragraph(text: str, names: Iterable[str] = ()) -> str:
    """Return a text and names as one paragraph."""
    names = ", ".join(sorted(names))
    return textwrap.fill(f"{text} {names}." if names else text, 118, break_on_hyphens=False, break_long_words=False)


def exact() -> Iterator[str]:
    """Yield the part on families that are recorded completely."""
    from watch.families import EXACT, GROUPS, WITHOUT_SDPA

    yield f"## Recorded exactly: {len(EXACT)} families of transformers"
    yield paragraph(
        "With `sdpa` attention the calls of SDPA are measured, with `eager` attention the softmax that the model takes "
        "itself; soft-capping, learned sinks, ALiBi, relative biases and sliding windows are in its logits."
    )
    for title, group in GROUPS.items():
        yield paragraph(f"**{title}, by SDPA or by their softmax:**", set(group) - WITHOUT_SDPA)
        if set(group) & WITHOUT_SDPA:
            yield paragraph(f"**{title} without SDPA, by their softmax:**", set(group) & WITHOUT_SDPA)


def not_exact() -> Iterator[str]:
    """Yield the parts on families with layers that have no weights, and on those that have none at all."""
    from watch.families import PARTIAL, WITHOUT_WEIGHTS

    yield f"## Recorded where there is attention: {len(PARTIAL)} families"
    yield "The other layers are listed in `not_seen`, and one warning names them."
    yield table("the other layers are", {name: family.why for name, family in PARTIAL.items()})
    yield f"## Refused: {len(WITHOUT_WEIGHTS)} families"
    yield "An error names the modules and the reason."
    yield table("reason", {name: family.why for name, family in WITHOUT_WEIGHTS.items()})


def timm() -> Iterator[str]:
    """Yield the part on timm."""
    from watch.timm_models import PARTIAL, TIMM, WITHOUT_WEIGHTS

    yield f"## timm: {len(TIMM)} models recorded exactly"
    yield paragraph("With fused attention by SDPA, without by their softmax:", TIMM)
    yield "Layers that are listed in `not_seen`:"
    yield table("the other layers are", {name: why for name, (_, _, why) in PARTIAL.items()})
    yield "Refused:"
    yield table("reason", {name: why for name, (_, why) in WITHOUT_WEIGHTS.items()})


def table(heading: str, rows: dict[str, str]) -> str:
    """Return a table of families."""
    lines = [f"| family | {heading} |", "|---|---|", *(f"| {name} | {why} |" for name, why in sorted(rows.items()))]
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    if TESTS not in sys.path:
        sys.path.insert(0, TESTS)
    return "\n\n".join([HEAD.strip(), *exact(), *not_exact(), *timm()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
