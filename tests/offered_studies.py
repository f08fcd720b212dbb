"""Offer made-up studies in place of the catalogue's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from joma import studies
from joma.studies import catalogue


def offer(patch: pytest.MonkeyPatch, modules: Mapping[str, str]) -> None:
    """Replace the names of all studies and their modules; `patch` undoes it.

    The package reads its table from the catalogue on first use, so that it is patched first: its own value is then the
    one that is restored.
    """
    for module in (studies, catalogue):
        patch.setattr(module, "STUDIES", dict(modules), raising=False)
