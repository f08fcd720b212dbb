import re
import subprocess
from importlib.metadata import version

import joma
from joma import stamp
from joma.stamp import STAMP, now, provenance


def test_a_stamp_names_versions_time_and_commit():
    fields = provenance()
    assert tuple(fields) == STAMP
    assert fields["numpy_version"] == version("numpy")
    assert fields["joma_version"] == joma.__version__  # of the code, whatever is installed
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


def test_an_environment_inside_another_repository_does_not_take_its_commit(monkeypatch, tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / ".venv" / "joma"
    package.mkdir(parents=True)
    (package / "stamp.py").touch()
    git("init")
    git("commit", "--allow-empty", "--message", "theirs")
    monkeypatch.setattr(stamp, "__file__", str(package / "stamp.py"))
    assert provenance()["git_commit"] == "unknown"
    git("add", ".venv")
    git("commit", "--message", "ours")
    assert provenance()["git_commit"] == git("rev-parse", "HEAD")
