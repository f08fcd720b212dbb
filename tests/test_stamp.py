import re
from importlib.metadata import version

from joma import stamp
from joma.stamp import now, provenance


def test_a_stamp_names_versions_time_and_commit():
    fields = provenance()
    assert fields["numpy_version"] == version("numpy")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", fields["created"])
    assert now() >= fields["created"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", fields["git_commit"])
    assert all(isinstance(value, str) for value in fields.values())  # netCDF stores no other attributes


def test_a_package_or_program_that_is_missing_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "PACKAGES", ("no-such-package",))
    monkeypatch.setenv("PATH", str(tmp_path))
    fields = provenance()
    assert fields["no-such-package_version"] == "not installed"
    assert fields["git_commit"] == "unknown"
