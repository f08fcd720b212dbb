"""The schedule never exceeds the machine, starts units in order, and lets none of them starve."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.engine import Needs, Unit
from joma.engine.scheduling import TYPICAL_MEMORY, Machine, Schedule, check_arguments, check_needs, gpu_shares

GPUS = st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0, 2.0])
NEEDS = st.builds(Needs, cores=st.integers(1, 6), gpus=GPUS, memory=st.sampled_from([0, 1, 7, 10**9, 10**12]))
JOBS, CORES, MEMORY = st.integers(1, 6), st.integers(1, 4), st.sampled_from([10, 10**9, 4 * 10**9])
DEVICES = st.sampled_from([("0", "1"), ("GPU-b", "GPU-a", "7")])


def check_within(machine, running):
    assert len(running) <= machine.jobs
    assert sum(grant.cores for grant in running) <= machine.cores
    assert sum(grant.memory for grant in running) <= machine.memory
    for device in machine.devices:
        assert sum(min(grant.unit.needs.gpus, 1) for grant in running if device in grant.devices) <= 1 + 1e-9


@given(st.tuples(JOBS, CORES, MEMORY, DEVICES), st.lists(NEEDS, max_size=25), st.data())
def test_units_start_in_order_within_the_machine_and_each_of_them_once(capacities, needs, data):
    machine = Machine(*capacities)
    schedule, running, started = Schedule(machine), [], []
    units = [Unit(str(number), "module:function", needs=need) for number, need in enumerate(needs)]
    arriving = list(units)
    while arriving or schedule.waiting or running:
        if arriving and data.draw(st.booleans()):
            schedule.submit(arriving.pop(0))
        while (grant := schedule.start()) is not None:
            running.append(grant)
            started.append(grant.unit)
            check_within(machine, running)
            check_given(machine, grant)
        assert running or not schedule.waiting, "a machine without work starts whatever waits"
        if running and data.draw(st.booleans()):
            schedule.end(running.pop(data.draw(st.integers(0, len(running) - 1))))
    assert started == units


def check_given(machine, grant):
    needs = grant.unit.needs
    assert grant.cores == min(needs.cores, machine.cores)
    assert grant.memory == min(needs.memory or TYPICAL_MEMORY, machine.memory)
    assert len(grant.devices) == -int(-needs.gpus // 1)
    assert len(set(grant.devices)) == len(grant.devices)
    assert set(grant.devices) <= set(machine.devices)


def test_a_large_unit_is_not_passed_by_small_ones():
    schedule = Schedule(Machine(jobs=4, cores=2, memory=10**10))
    for name, cores in (("small", 1), ("large", 2), ("next", 1)):
        schedule.submit(Unit(name, "module:function", needs=Needs(cores)))
    small = schedule.start()
    assert schedule.start() is None
    schedule.end(small)
    large = schedule.start()
    assert large.unit.name == "large"
    assert schedule.start() is None
    schedule.end(large)
    assert schedule.start().unit.name == "next"


def test_parts_of_gpus_are_spread_and_thirds_fill_one():
    schedule = Schedule(Machine(jobs=9, cores=9, memory=10**12, devices=("4", "5")))
    for number in range(7):
        schedule.submit(Unit(str(number), "module:function", needs=Needs(gpus=1 / 3)))
    grants = [schedule.start() for _ in range(6)]
    assert [grant.devices for grant in grants] == [("4",), ("5",)] * 3
    assert schedule.start() is None
    schedule.end(grants[3])
    assert schedule.start().devices == ("5",)


def test_the_units_that_wait_can_be_taken_back():
    schedule = Schedule(Machine(jobs=1, cores=1, memory=1))
    units = [Unit(name, "module:function") for name in "abc"]
    for unit in units:
        schedule.submit(unit)
    first = schedule.start()
    assert schedule.clear() == units[1:]
    schedule.end(first)
    assert schedule.start() is None


@given(st.floats(1e-6, 1))
def test_a_part_of_a_gpu_is_nearly_what_was_asked(gpus):
    count, share = gpu_shares(gpus)
    assert count == 1
    assert Fraction(1, 1000) <= share <= 1
    assert abs(share - gpus) <= 1 / 1000


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (Needs(cores=0), "must have one core at least, got 0 cores"),
        (Needs(gpus=1.5), "a part of one GPU or whole GPUs, got 1.5"),
        (Needs(gpus=-1), "whole GPUs"),
        (Needs(gpus=float("nan")), "whole GPUs"),
        (Needs(gpus=3), r"no more GPUs than there are \(2\), got 3"),
        (Needs(memory=-1), "a size of memory"),
    ],
)
def test_needs_that_cannot_be_met_are_refused(needs, message):
    with pytest.raises(InputError, match=message):
        check_needs(Unit("unit", "module:function", needs=needs), ["0", "1"])


def test_needs_that_can_be_met_are_accepted():
    for gpus in (0, 0.3, 1, 2):
        check_needs(Unit("unit", "module:function", needs=Needs(99, gpus, 10**15)), ["0", "1"])


def test_arguments_that_json_lacks_are_refused():
    check_arguments(Unit("unit", "module:function", {"a": [1, {"b": None}]}))
    with pytest.raises(InputError, match=r"`arguments of unit` must be what JSON has, got .*PosixPath"):
        check_arguments(Unit("unit", "module:function", {"a": Path("b")}))
