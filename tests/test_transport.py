"""Folders as bytes: what arrives is what was sent, and anything else is named and leaves nothing behind."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import toy_study
from joma import open_run, transport
from joma.files import DamagedFile, FolderLocked, StorageError
from joma.manifest import MANIFEST, read_manifest, write_manifest
from joma.runs import check_run, find_runs, read_claims
from joma.study import execute
from joma.transport import pack, unpack


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return execute(toy_study.STUDY, out=tmp_path_factory.mktemp("sent")).path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_arrives_as_it_was_sent(run, tmp_path):
    place = tmp_path / "toy" / run.name
    assert unpack(pack(run), place)
    assert contents(place) == contents(run)
    check_run(place)
    assert find_runs(tmp_path) == [place]
    assert read_claims(place) == read_claims(run)
    xr.testing.assert_identical(open_run(place), open_run(run))
    assert execute(toy_study.STUDY, out=tmp_path).reused


def test_checkpoints_stay_behind(tmp_path):
    run = execute(toy_study.STUDY, out=tmp_path).path
    (run / "checkpoints" / "a").mkdir(parents=True)
    (run / "checkpoints" / "a" / "1.safetensors").write_bytes(b"weights")
    assert set(pack(run)) == {*contents(run)} - {"checkpoints/a/1.safetensors"}


@given(data=st.data())
def test_damage_anywhere_is_named_and_leaves_nothing_behind(run, tmp_path_factory, data):
    files, place = pack(run), tmp_path_factory.mktemp("received") / "toy" / run.name
    name = data.draw(st.sampled_from(sorted({*files} - {"log.txt"})))
    content = bytearray(files[name])
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    damaged = data.draw(st.sampled_from([bytes(content), files[name][:where], files[name] + b" ", None]))
    sent = {**files, name: damaged}
    with pytest.raises(DamagedFile) as error:
        unpack({name: content for name, content in sent.items() if content is not None}, place)
    assert error.value.file == place / name
    assert not place.parent.exists()


@pytest.mark.parametrize("name", ["../toy.txt", "/tmp/toy.txt", "checkpoints/a/1.safetensors"])
def test_a_file_that_no_manifest_lists_is_refused(run, tmp_path, name):
    with pytest.raises(DamagedFile, match=r"is not listed in manifest\.json"):
        unpack({**pack(run), name: b"content"}, tmp_path / "toy")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_run_is_not_sent(tmp_path):
    run = execute(toy_study.STUDY, out=tmp_path).path
    (run / "figures" / "1-line.svg").write_text("<svg/>")
    with pytest.raises(DamagedFile, match=r"1-line\.svg"):
        pack(run)
    (run / MANIFEST).unlink()
    with pytest.raises(StorageError, match=r"nothing in it is finished"):
        pack(run)


def test_what_is_there_already_is_kept(run, tmp_path):
    place = tmp_path / "toy" / run.name
    source = execute(toy_study.STUDY, out=tmp_path).path
    assert source == place
    before = contents(place)
    assert not unpack(pack(run), place)
    assert contents(place) == before


def test_what_is_damaged_or_less_complete_is_replaced(run, tmp_path):
    place = execute(toy_study.STUDY, out=tmp_path).path
    (place / "trajectory.nc").write_bytes(b"damaged")
    assert unpack(pack(run), place)
    assert contents(place) == contents(run)
    manifest = read_manifest(place)
    assert manifest is not None
    write_manifest(place, manifest.identity, ["config.json", "trajectory.nc"], complete=False)
    assert unpack(pack(run), place)
    assert contents(place) == contents(run)


def test_other_work_and_another_process_are_respected(run, tmp_path):
    other = execute(toy_study.STUDY, out=tmp_path, seeds=2).path
    before = contents(other)
    with pytest.raises(StorageError, match="holds other work than what arrived"):
        unpack(pack(run), other)
    assert contents(other) == before
    with transport.lock(tmp_path / "toy" / "busy"), pytest.raises(FolderLocked):
        unpack(pack(run), tmp_path / "toy" / "busy")


def test_a_refused_write_leaves_nothing_behind(run, tmp_path, monkeypatch):
    written = []

    def full_disk(path, content):
        if len(written) == 2:
            raise StorageError(os.strerror(errno.ENOSPC))
        written.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    monkeypatch.setattr(transport, "write_bytes", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        unpack(pack(run), tmp_path / "toy" / run.name)
    assert len(written) == 2
    assert contents(tmp_path) == {}


def test_a_process_that_dies_while_it_writes_leaves_an_unfinished_run(run, tmp_path):
    """The receiver is killed before each of its writes in turn; the next attempt completes the folder."""
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from joma import transport
        files, place = transport.pack(sys.argv[1]), Path(sys.argv[2])
        write = transport.write_bytes
        for count in range(len(files)):
            if os.fork() == 0:
                left = iter(range(count))
                def dying(path, content):
                    if next(left, None) is None:
                        os._exit(9)
                    write(path, content)
                transport.write_bytes = dying
                transport.unpack(files, place / str(count))
            assert os.wait()[1] == 9 << 8
    """)
    subprocess.run([sys.executable, "-c", script, str(run), str(tmp_path)], check=True, timeout=60)
    files = pack(run)
    places = sorted(tmp_path.iterdir())
    assert len(places) == len(files)
    for place in places:
        assert read_manifest(place) is None
        assert unpack(files, place)
        assert contents(place) == contents(run)
