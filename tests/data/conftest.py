from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
