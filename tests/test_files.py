import errno
import fcntl
import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress

import jaxtyping
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma import files
from joma.arguments import InputError
from joma.data.text import corpus
from joma.files import (
    DamagedFile,
    FolderLocked,
    StorageError,
    check_writable,
    checksum,
    checksum_file,
    lock,
    read_checked,
    read_json,
    remove,
    remove_leftovers,
    write_bytes,
    write_checked,
    write_json,
    write_text,
    write_whole,
)
from joma.runs import open_run
from joma.study import execute, judge
from joma.study.shards import shard_of
from joma.sweeps import open_sweep
from joma.transport import pack, unpack
from toy_study import STUDY as TOY


def refuse(number):
    """Return a function that fails as a system call does."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


class Killed(BaseException):
    """Ends what runs where SIGKILL would, without any clean-up of ours: it is raised once everything is in place."""


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "tempfile.mkstemp"])
def test_whatever_the_file_system_refuses_is_named_and_the_old_file_stays(tmp_path, monkeypatch, call, number):
    write_text(tmp_path / "a.txt", "old")
    module, name = call.split(".")
    monkeypatch.setattr(getattr(files, module), name, refuse(number))
    with pytest.raises(StorageError, match=rf"cannot write .*a\.txt: {os.strerror(number)}"):
        write_text(tmp_path / "a.txt", "new")
    assert os.listdir(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_clean_up_that_fails_too_hides_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", refuse(errno.ENOSPC))
    monkeypatch.setattr(files.Path, "unlink", refuse(errno.EROFS))
    monkeypatch.setattr(files.os, "close", refuse(errno.EIO))
    with pytest.raises(StorageError, match=r"cannot write .*a\.txt"):
        write_text(tmp_path / "a.txt", "new")


def test_an_error_of_the_writer_that_is_already_clear_stays_as_it_is(tmp_path):
    def fail(_):
        raise StorageError("cannot read the source; check the path.")

    with pytest.raises(StorageError, match=r"^cannot read the source; check the path\.$"):
        write_whole(tmp_path / "a.txt", fail)


def test_a_file_system_without_locks_can_be_written_to_and_nothing_is_removed_there(tmp_path, monkeypatch):
    (tmp_path / ".joma-a-x.txt").write_text("may be in use")
    monkeypatch.setattr(files.fcntl, "flock", refuse(errno.ENOLCK))
    write_text(tmp_path / "a.txt", "new")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".joma-a-x.txt", "a.txt"]
    with pytest.raises(StorageError, match=r"cannot lock .*: No locks available"), lock(tmp_path):
        pass


def test_a_folder_that_vanishes_while_a_file_is_written_is_one_clear_error(tmp_path):
    folder = tmp_path / "folder"

    def write(temporary):
        temporary.unlink()
        folder.rmdir()

    with pytest.raises(StorageError, match=r"cannot write .*a\.txt: No such file or directory; check the path"):
        write_whole(folder / "a.txt", write)
    assert os.listdir(tmp_path) == []


@settings(max_examples=50)
@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=250))
def test_every_name_that_the_file_system_takes_can_be_written(tmp_path_factory, name):
    file = tmp_path_factory.mktemp("names") / name[:1].replace(".", "_") / name
    if len(name.encode()) <= 255 and name not in (".", ".."):
        write_text(file, "text")
        assert [path.name for path in file.parent.iterdir()] == [name]


def test_leftovers_are_removed_and_files_that_are_being_written_are_not(tmp_path):
    (tmp_path / "below").mkdir()
    for leftover in (tmp_path / ".joma-a-1.txt", tmp_path / "below" / ".joma-b-2.txt"):
        leftover.write_text("half")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["below"]
    assert os.listdir(tmp_path / "below") == [".joma-b-2.txt"]

    def write(temporary):
        remove_leftovers(tmp_path, deep=True)
        temporary.write_text("whole")

    write_whole(tmp_path / "c.txt", write)
    assert (tmp_path / "c.txt").read_text() == "whole"
    assert os.listdir(tmp_path / "below") == []
    remove_leftovers(tmp_path / "nowhere", deep=True)


def test_a_leftover_that_cannot_be_removed_does_no_harm(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / ".joma-pipe")
    (tmp_path / ".joma-folder").mkdir()
    (tmp_path / ".joma-link").symlink_to(tmp_path / "nowhere")
    remove_leftovers(tmp_path, deep=True)
    (tmp_path / ".joma-a-1.txt").write_text("half")
    monkeypatch.setattr(files.Path, "unlink", refuse(errno.EROFS))
    remove_leftovers(tmp_path, deep=True)
    assert (tmp_path / ".joma-a-1.txt").exists()


def test_a_file_that_is_removed_before_its_writer_has_locked_it_is_made_again(tmp_path, monkeypatch):
    """Another process may clean up between the making of a temporary file and its lock."""
    flock, names = fcntl.flock, []

    def clean_up_first(handle, operation):
        names.extend(os.listdir(tmp_path))
        if len(names) == 1:
            (tmp_path / names[0]).unlink()
        flock(handle, operation)

    monkeypatch.setattr(files.fcntl, "flock", clean_up_first)
    write_text(tmp_path / "a.txt", "new")
    assert len(set(names)) == 2
    assert os.listdir(tmp_path) == ["a.txt"]


def test_cleaning_up_never_disturbs_writers(tmp_path):
    done = threading.Event()

    def clean_up():
        while not done.is_set():
            remove_leftovers(tmp_path)

    cleaner = threading.Thread(target=clean_up)
    cleaner.start()
    try:
        for number in range(40):
            write_text(tmp_path / "a.txt", str(number))
            assert (tmp_path / "a.txt").read_text() == str(number)
    finally:
        done.set()
        cleaner.join()
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("before", [None, b"old", b"new", b"damaged"])
@pytest.mark.parametrize("writes", range(4))
def test_a_checked_file_is_right_whenever_its_writer_dies(tmp_path, monkeypatch, before, writes):
    file = tmp_path / "a.bin"
    if before is not None:
        write_checked(file, before)
    if before == b"damaged":
        file.write_bytes(b"demaged")
    replace, done = os.replace, []

    def die_after(*paths):
        if len(done) == writes:
            raise Killed
        replace(*paths)
        done.append(paths)

    monkeypatch.setattr(files.os, "replace", die_after)
    with suppress(Killed):
        write_checked(file, b"new")
    monkeypatch.undo()
    if file.exists() and file.read_bytes() != b"demaged":
        assert read_checked(file, "write it again") in (before, b"new")
    elif file.exists():
        with pytest.raises(DamagedFile, match="altered"):
            read_checked(file, "write it again")
    write_checked(file, b"new")
    assert read_checked(file, "write it again") == b"new"
    assert checksum_file(file).read_text() == f"{checksum(file)}  a.bin\n"
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.bin.sha256"]


@pytest.mark.parametrize("name", ["é.nc", "two  spaces.nc", "a\nb.nc", "a\\b\r.nc", os.fsdecode(b"\xff.nc")])
def test_a_checked_file_may_have_any_name(name, tmp_path):
    file = tmp_path / name
    for content in (b"old", b"new"):
        write_checked(file, content)
        assert read_checked(file, "write it again") == content
    subprocess.run(["sha256sum", "--check", "--strict", checksum_file(file).name], cwd=tmp_path, check=True)
    file.write_bytes(b"now")
    with pytest.raises(DamagedFile, match="altered"):
        read_checked(file, "write it again")


def test_however_often_a_replacement_is_cut_off_the_file_stays_right(tmp_path, monkeypatch):
    """Checksums must not pile up until the right one is out of sight."""
    file = tmp_path / f"{'a' * 200}.bin"
    write_checked(file, b"0")
    for number in range(1, 30):
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_bytes", lambda path, content: _die_if(path == file, path, content))
            with pytest.raises(Killed):
                write_checked(file, b"%d" % number)
        assert read_checked(file, "write it again") == b"0"
    assert len(checksum_file(file).read_text().splitlines()) == 2


def _die_if(dies, path, content):
    if dies:
        raise Killed
    write_bytes(path, content)


def test_a_checked_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    replace = os.replace
    monkeypatch.setattr(
        files.os, "replace", lambda *paths: replace(*paths) if paths[1].suffix == ".sha256" else refuse(errno.ENOSPC)()
    )
    with pytest.raises(StorageError, match=r"cannot write .*a\.bin: No space left on device"):
        write_checked(tmp_path / "a.bin", b"new")
    assert os.listdir(tmp_path) == []


def test_a_checked_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "a.bin"
    write_checked(file, b"old")
    read, reads = files._content, []

    def replaced_after(path):
        content = read(path)
        if path == file and not reads:
            reads.append(path)
            write_checked(file, b"new")
        return content

    monkeypatch.setattr(files, "_content", replaced_after)
    assert read_checked(file, "write it again") == b"new"
    assert reads == [file]


@settings(max_examples=40)
@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_changed_bit_is_refused_and_a_changed_checksum_makes_no_other_content_good(tmp_path_factory, content, data):
    file = tmp_path_factory.mktemp("checked") / "a.bin"
    write_checked(file, content)
    damaged = data.draw(st.sampled_from([file, checksum_file(file)]))
    raw = bytearray(damaged.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged.write_bytes(raw)
    if damaged == file:
        with pytest.raises(DamagedFile, match=r"a\.bin is cut short or altered"):
            read_checked(file, "write it again")
    else:  # the content is right all the same
        with suppress(DamagedFile):
            assert read_checked(file, "write it again") == content


def test_removing_names_the_file_that_stays(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("")
    remove(tmp_path / "a")
    remove(tmp_path / "a")
    monkeypatch.setattr(files.Path, "unlink", refuse(errno.EROFS))
    with pytest.raises(StorageError, match=r"cannot remove .*: Read-only file system; remove it by hand"):
        remove(tmp_path / "a")


def test_a_folder_is_known_to_be_writable_before_any_work(tmp_path):
    check_writable(tmp_path / "new" / "folder")
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        check_writable(tmp_path / "file")
    with pytest.raises(StorageError, match="File name too long"):
        check_writable(tmp_path / ("x" * 300))


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Whoever had locked it may have removed it: a lock on a folder without a name would guard nothing."""
    flock, calls = fcntl.flock, []

    def remove_first(handle, operation):
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / "run").rmdir()
        flock(handle, operation)

    monkeypatch.setattr(files.fcntl, "flock", remove_first)
    with lock(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
        with pytest.raises(FolderLocked), lock(tmp_path / "run"):
            pass
    assert len(calls) == 3


def test_a_temporary_file_that_the_file_system_denies_is_not_left(tmp_path, monkeypatch):
    exists, answers = os.path.exists, [False]
    monkeypatch.setattr(files.os.path, "exists", lambda path: answers.pop() if answers else exists(path))
    write_text(tmp_path / "a.txt", "new")
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("value", [None, 3, b"runs", ["runs"]])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("path", open_run),
        ("path", open_sweep),
        ("path", pack),
        ("path", lambda value: unpack({}, value)),
        ("path", lambda value: judge(TOY, value)),
        ("out", lambda value: execute(TOY, out=value)),
        ("out", lambda value: shard_of(TOY, [0], seed_count=2, out=value)),
        ("cache", lambda value: corpus(cache=value or 3.0)),
    ],
)
def test_what_is_no_path_is_refused_by_the_name_of_the_argument(name, call, value, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside the tests
    with pytest.raises(InputError, match="must be the path of a file or folder") as refusal:
        call(value)
    assert refusal.value.name == name
