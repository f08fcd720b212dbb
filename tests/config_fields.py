"""Whether every field of a study's config changes its run: what the tests of config fields have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import xarray as xr

from joma.study import Context


@dataclass(frozen=True)
class Fields:
    """A module of a study, a small config, and another value for each field of it."""

    module: Any
    config: Any
    changes: dict[str, Any]
    seed: int = 0

    def run(self, **changes: Any) -> xr.Dataset:
        """Run the study with one seed and the small config, changed."""
        return self.module.run(replace(self.config, **changes), Context((self.seed,)))

    @cached_property
    def baseline(self) -> xr.Dataset:
        """The run of the small config."""
        return self.run()

    def assert_all_are_changed(self) -> None:
        """Every field of the config has another value here."""
        assert set(self.changes) == {field.name for field in fields(self.module.Config)}

    def assert_changes_the_run(self, name: str) -> None:
        """Another value of the field gives another run."""
        value = self.changes[name]
        assert value != getattr(self.config, name)
        assert not self.run(**{name: value}).identical(self.baseline)

    def assert_repeats(self) -> None:
        """The same config gives the same run."""
        xr.testing.assert_identical(self.run(), self.baseline)
