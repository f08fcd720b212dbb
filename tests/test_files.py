import json
import os
import subprocess
import sys
import textwrap

import pytest

from joma.files import (
    FolderLocked,
    StorageError,
    checksum,
    lock,
    read_json,
    write_bytes,
    write_json,
    write_text,
    write_whole,
)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    target = tmp_path / "claims.json"
    write_text(target, "old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"No space left on device; free some space"):
        write_whole(target, fail)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["claims.json"]


def test_a_written_file_has_its_content_and_can_be_read_by_others(tmp_path):
    write_bytes(tmp_path / "a.bin", memoryview(b"\x00\xff"))
    write_text(tmp_path / "a.txt", "μ\n")
    write_whole(tmp_path / "a.log", lambda temporary: temporary.write_text("line"))
    assert (tmp_path / "a.bin").read_bytes() == b"\x00\xff"
    assert (tmp_path / "a.txt").read_bytes() == b"\xce\xbc\n"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_a_file_size_limit_of_the_system_is_one_clear_error(tmp_path):
    """A real refusal by the kernel in mid-write, as a full disk gives."""
    script = textwrap.dedent(
        f"""
        import pathlib, resource
        from joma.files import StorageError, write_text
        target = pathlib.Path({str(tmp_path)!r}) / "a.txt"
        write_text(target, "old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            write_text(target, "x" * 10_000)
        except StorageError as problem:
            assert "File too large" in str(problem), problem
            assert target.read_text() == "old"
            raise SystemExit(7)
        """
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_below_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*Not a directory; choose a folder"):
        write_text(tmp_path / "file" / "x.txt", "text")
    with pytest.raises(StorageError, match="Not a directory"), lock(tmp_path / "file" / "run"):
        pass


def test_json_refuses_what_is_no_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(StorageError, match=r"b\.json is not valid JSON"):
        read_json(tmp_path / "b.json")
    with pytest.raises(StorageError, match=r"c\.json: No such file"):
        read_json(tmp_path / "c.json")


def test_json_round_trip_and_checksum(tmp_path):
    value = {"μ": [1.5, None, "x"], "flag": True}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    again = subprocess.run(["sha256sum", str(tmp_path / "a.json")], capture_output=True, text=True, check=True)
    assert checksum(tmp_path / "a.json") == again.stdout.split()[0]
    assert json.loads((tmp_path / "a.json").read_text()) == value


def test_a_lock_is_seen_by_another_process_and_goes_with_its_holder(tmp_path):
    attempt = textwrap.dedent(
        f"""
        import pathlib
        from joma.files import FolderLocked, lock
        try:
            with lock(pathlib.Path({str(tmp_path)!r})):
                pass
        except FolderLocked:
            raise SystemExit(7)
        """
    )
    with lock(tmp_path):
        assert subprocess.run([sys.executable, "-c", attempt], check=False).returncode == 7
    assert subprocess.run([sys.executable, "-c", attempt], check=False).returncode == 0
    assert os.listdir(tmp_path) == []


def test_a_second_lock_in_one_process_is_refused(tmp_path):
    with lock(tmp_path), pytest.raises(FolderLocked, match="locked by another process"), lock(tmp_path):
        pass
