"""The options that choose an engine: each belongs to one engine, and is refused with the other."""

import pytest

from joma.arguments import InputError
from joma.commands.engines import open_engine
from joma.engine import LocalEngine
from joma.progress import SILENT


def test_the_local_engine_has_as_many_jobs_as_are_given():
    with open_engine("local", jobs=3, address=None, progress=SILENT) as engine:
        assert isinstance(engine, LocalEngine)
        assert engine.jobs == 3


def test_options_of_the_other_engine_are_refused():
    with pytest.raises(
        InputError, match=r"`--address` must be left out with --engine local, got auto; add --engine ray"
    ):
        open_engine("local", jobs=None, address="auto", progress=SILENT)
    with pytest.raises(InputError, match="`--jobs` must be left out with --engine ray, got 2"):
        open_engine("ray", jobs=2, address=None, progress=SILENT)
    with pytest.raises(InputError, match="`--shared` must be left out with --engine local"):
        open_engine("local", jobs=None, address=None, progress=SILENT, shared=True)
