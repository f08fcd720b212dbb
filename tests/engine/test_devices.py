"""The visible GPUs, from the environment or from a program that stands for nvidia-smi."""

from __future__ import annotations

import os

import pytest

from joma.engine.devices import usable_cores, visible_devices


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        ("", []),
        ("-1", []),
        ("3,1", ["3", "1"]),
        ("GPU-1f, MIG-2", ["GPU-1f", "MIG-2"]),
        ("0,-1,2", ["0"]),
        ("1,1", ["1"]),
    ],
)
def test_the_environment_names_them(monkeypatch, names, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert visible_devices() == devices


@pytest.mark.parametrize(
    ("program", "devices"),
    [
        ("echo 'GPU 0: H200 (UUID: GPU-a)'; echo 'GPU 1: H200 (UUID: GPU-b)'", ["0", "1"]),
        ("exit 9", []),
        ("echo no", []),
    ],
)
def test_the_driver_counts_them(monkeypatch, tmp_path, program, devices):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    query = tmp_path / "nvidia-smi"
    query.write_text(f'#!/bin/sh\n[ "$1" = -L ] && {program}\n')
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_devices() == devices


def test_a_machine_without_the_driver_has_none(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices() == []


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("150000 100000", 2), ("900000 100000", 8), ("9 100000", 1)]
)
def test_a_container_with_fewer_cores_than_the_machine_counts(monkeypatch, tmp_path, limit, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("joma.engine.devices.GROUPS", tmp_path)
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores() == cores


def test_without_a_limit_the_cores_are_those_of_the_process(monkeypatch, tmp_path):
    monkeypatch.setattr("joma.engine.devices.GROUPS", tmp_path)
    assert usable_cores() == len(os.sched_getaffinity(0))
