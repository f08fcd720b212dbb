"""`--grid KEY=VALUES`: the points of a sweep, each value parsed as `--set` parses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_origin, get_type_hints

from joma.arguments import InputError, choice
from joma.commands.parsing import alternatives, config_with
from joma.sweeps import Draws, Grid, Range

EXAMPLE = "write for example --grid steps=500,1000"


def parse_plan(
    study: Any, preset: str, grids: Sequence[str], *, changes: Sequence[str], random: int | None, seed: int
) -> tuple[Any, Grid | Draws]:
    """Return the config that all points share, and the points.

    Args:
        study, preset: what is swept.
        grids: `KEY=A,B,C`, with `;` between lists; for random points also `KEY=LOW:HIGH` and `KEY=LOW:HIGH:log`.
        changes: `KEY=VALUE`, for all points.
        random: how many points to draw; None for the product of all values.
        seed: of the draws.
    """
    config = config_with(study, preset, tuple(changes))
    fixed = [change.partition("=")[0].replace("-", "_") for change in changes]
    sources: dict[str, Any] = {}
    for text in grids:
        key, equals, values = text.partition("=")
        if not equals:
            raise InputError("--grid", "KEY=VALUES", repr(text), EXAMPLE)
        names = {field.name: field.name for field in dataclasses.fields(config)}
        key = choice(f"--grid key of {study.name}", key.replace("-", "_"), names)
        if key in sources:
            raise InputError("--grid", "different keys", f"{key} twice", "join their values in one --grid", must="have")
        if key in fixed:
            raise InputError(f"--set {key}", "left out", f"--grid {key} too", "choose one of them")
        sources[key] = _Field(study, preset, key).source(values, ranges=random is not None)
    if not sources:
        raise InputError("--grid", "given at least once", "none", EXAMPLE)
    return config, Grid(sources) if random is None else Draws(sources, random, seed)


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field of a study's config, and how text becomes its value."""

    study: Any
    preset: str
    key: str

    @property
    def types(self) -> tuple[Any, ...]:
        config = choice("preset", self.preset, self.study.presets).config
        return alternatives(get_type_hints(type(config))[self.key])

    def source(self, text: str, *, ranges: bool) -> Range | list[Any]:
        """Return the values that a text lists, or the range that it gives."""
        is_number = {int, float} & {*self.types}
        if is_number and ":" in text:
            if not ranges:
                remedy = "add --random N to draw from the range"
                raise InputError(f"--grid {self.key}", "a list of values", text, remedy)
            return self._range(text)
        is_list = any(get_origin(kind) is tuple for kind in self.types)
        parts = text.split(";" if is_list else ",")
        if text == "" or (not is_list and "" in parts):
            got = "an empty one" if text else "none"
            raise InputError(f"--grid {self.key}", "values between commas", got, EXAMPLE, must="have")
        return [self.value(part) for part in parts]

    def value(self, text: str) -> Any:
        """Return the value of the field that a text stands for, as `--set` reads it."""
        return getattr(config_with(self.study, self.preset, (f"{self.key}={text}",)), self.key)

    def _range(self, text: str) -> Range:
        low, high, *scale = text.split(":")
        if scale not in ([], ["log"]):
            raise InputError(
                f"--grid {self.key}", "low:high or low:high:log", text, "write for example rate=0.01:1:log"
            )
        return Range(self.value(low), self.value(high), logarithmic=bool(scale))
