"""A unit survives its way through JSON, and `run` submits before it yields."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from joma.engine import Engine, Needs, Result, Unit

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.text(), st.dictionaries(st.text(), VALUES, max_size=3), st.integers(1, 64), st.floats(0, 8))
def test_a_unit_is_the_same_after_json(name, arguments, cores, gpus):
    unit = Unit(name, "module:function", arguments, Path("folder"), Needs(cores, gpus, 7))
    assert Unit.from_json(json.loads(json.dumps(unit.as_json()))) == unit


class InOrder(Engine):
    """Ends every unit at once."""

    def __init__(self):
        self.queued, self.closed = [], False

    def submit(self, unit):
        self.queued.append(unit)

    def results(self):
        while self.queued:
            yield Result(self.queued.pop(0))

    def cancel(self):
        self.queued.clear()

    def close(self):
        self.closed = True


def test_run_yields_a_result_for_each_unit_and_the_block_closes_the_engine():
    units = [Unit(str(number), "module:function") for number in range(3)]
    engine = InOrder()
    with engine:
        assert [result.unit for result in engine.run(units)] == units
    assert engine.closed
