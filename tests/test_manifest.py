"""A manifest: what it lists is checked, what it does not list is refused, and it checks itself."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma import manifest as module
from joma.files import DamagedFile, StorageError
from joma.manifest import MANIFEST, Manifest, read_manifest, write_manifest

IDENTITY = {"study": "toy", "version": 1, "config": {"μ": 0.5, "names": ["a", None]}, "seeds": [0, 1]}


def read(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "a.bin").write_bytes(bytes(range(256)))
    (tmp_path / "figures" / "1-é.svg").write_text("<svg/>")
    write_manifest(tmp_path, IDENTITY, ["figures/1-é.svg", "a.bin"])
    return tmp_path


def test_what_was_written_is_what_is_read(folder):
    manifest = read(folder)
    assert (manifest.identity, manifest.complete) == (IDENTITY, True)
    assert list(manifest.files) == ["a.bin", "figures/1-é.svg"]
    manifest.check()
    assert manifest.read("figures/1-é.svg") == b"<svg/>"
    with manifest.checking("a.bin"):
        pass


def test_a_folder_without_a_manifest_has_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None


def test_equal_folders_have_equal_manifests(folder):
    first = (folder / MANIFEST).read_bytes()
    write_manifest(folder, IDENTITY, ["a.bin", "figures/1-é.svg"])
    assert (folder / MANIFEST).read_bytes() == first


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    """A folder, and the two manifests that it may have."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "a.bin").write_bytes(b"content")
    texts = []
    for complete in (False, True):
        write_manifest(folder, IDENTITY, ["a.bin"], complete=complete)
        texts.append((folder / MANIFEST).read_bytes())
    return folder, texts


@settings(max_examples=300)
@given(st.data())
def test_any_change_of_a_manifest_is_refused_by_name(manifests, data):
    folder, texts = manifests
    content = bytearray(data.draw(st.sampled_from(texts)))
    place = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert", "remove"])):
        case "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[place:]
        case "insert":
            content.insert(place, data.draw(st.integers(0, 255)))
        case "remove":
            del content[place]
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedFile, match=r"manifest\.json is cut short or altered") as caught:
        read_manifest(folder)
    assert caught.value.file == folder / MANIFEST


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '"x"', "[" * 100_000, '{"sha256": 1}'])
def test_other_json_is_no_manifest(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DamagedFile, match="cut short or altered"):
        read_manifest(tmp_path)


def test_a_huge_file_is_no_manifest_and_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_JSON", 100)
    (tmp_path / MANIFEST).write_text('"' + "x" * 1000 + '"')
    with pytest.raises(DamagedFile, match="cut short or altered"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "figures/../../a.bin", "a\0b"])
def test_names_that_lead_out_of_the_folder_are_refused(folder, name):
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    content["files"][name] = {"size": 1, "sha256": "0" * 64}
    (folder / MANIFEST).write_text(module._serialised(content))
    with pytest.raises(DamagedFile, match="cut short or altered"):
        read_manifest(folder)


@pytest.mark.parametrize(("field", "value"), [("identity", 5), ("files", []), ("files", {"a": {"size": 1}})])
def test_a_manifest_with_other_fields_is_refused_though_its_checksum_is_right(folder, field, value):
    content = {**json.loads((folder / MANIFEST).read_text()), field: value}
    del content["sha256"]
    (folder / MANIFEST).write_text(module._serialised(content))
    with pytest.raises(DamagedFile, match="cut short or altered"):
        read_manifest(folder)


def test_a_manifest_of_a_later_format_is_named(folder):
    content = {**json.loads((folder / MANIFEST).read_text()), "format": 2}
    del content["sha256"]
    (folder / MANIFEST).write_text(module._serialised(content))
    with pytest.raises(DamagedFile, match="has the format 2, not 1; update joma"):
        read_manifest(folder)


def damage(file: Path, kind: str) -> None:
    content = file.read_bytes()
    file.unlink()
    match kind:
        case "flipped":
            file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "cut":
            file.write_bytes(content[:-1])
        case "longer":
            file.write_bytes(content + b"\0")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)


@pytest.mark.parametrize("kind", ["flipped", "cut", "longer", "missing", "folder", "pipe"])
@pytest.mark.parametrize("arrays", [[], [(0, 200)], [(10, 100), (120, 256)]])
def test_every_damage_is_named_by_every_reader(folder, kind, arrays):
    write_manifest(folder, IDENTITY, ["figures/1-é.svg", "a.bin"], arrays={"a.bin": arrays})
    damage(folder / "a.bin", kind)
    manifest = read(folder)
    manifest.check(["figures/1-é.svg"])
    with pytest.raises(DamagedFile) as caught:
        manifest.check()
    assert caught.value.file == folder / "a.bin"
    with pytest.raises(DamagedFile, match=r"a\.bin .*; restore it\.$"):
        manifest.read("a.bin")
    with pytest.raises(DamagedFile), manifest.checking("a.bin"):
        (folder / "a.bin").read_bytes()


@given(st.data())
def test_only_the_numbers_of_arrays_are_read_before_they_are_checked(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("arrays")
    content = bytes(range(256))
    bounds = sorted(data.draw(st.lists(st.integers(0, 256), min_size=2, max_size=6, unique=True)))
    arrays = list(zip(bounds[::2], bounds[1::2], strict=False))
    (folder / "a.bin").write_bytes(content)
    write_manifest(folder, IDENTITY, ["a.bin"], arrays={"a.bin": arrays})
    with read(folder).checking("a.bin"):
        pass
    place, began = data.draw(st.integers(0, 255)), False
    (folder / "a.bin").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(DamagedFile, match=r"a\.bin is altered"), read(folder).checking("a.bin"):
        began = True
    assert began == any(start <= place < stop for start, stop in arrays)


def test_an_error_that_damage_causes_is_replaced_by_the_damage(folder):
    write_manifest(folder, IDENTITY, ["a.bin"], arrays={"a.bin": [(0, 200)]})
    with pytest.raises(ZeroDivisionError), read(folder).checking("a.bin"):
        _ = 1 / 0
    damage(folder / "a.bin", "flipped")
    with pytest.raises(DamagedFile), read(folder).checking("a.bin"):
        _ = 1 / 0


def test_what_is_checked_is_what_is_returned(folder, monkeypatch):
    """A file that is replaced between its check and its reading must not be shown as a checked one."""
    manifest = read(folder)
    read_bytes = Path.read_bytes

    def replaced_before(path):
        path.write_bytes(b"x" * 256)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", replaced_before)
    with pytest.raises(DamagedFile, match="altered"):
        manifest.read("a.bin")


def test_files_that_are_not_listed_are_refused(folder):
    (folder / "b.bin").write_text("")
    with pytest.raises(DamagedFile, match=r"b\.bin is not listed in manifest\.json"):
        read(folder).read("b.bin")
    write_manifest(folder, IDENTITY, [], complete=False)
    with pytest.raises(DamagedFile, match=r"a\.bin was being written .*; run the command that writes it again"):
        read(folder).read("a.bin")


def test_entries_of_an_earlier_manifest_are_not_made_good_by_a_later_one(folder):
    damage(folder / "a.bin", "flipped")
    write_manifest(folder, IDENTITY, ["a.bin"], complete=False, earlier=read(folder))
    with pytest.raises(DamagedFile, match=r"a\.bin is altered"):
        read(folder).check()
    write_manifest(folder, IDENTITY, ["a.bin"])
    read(folder).check()


def test_a_missing_file_cannot_be_listed(folder):
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(StorageError, match=r"cannot read .*nowhere: No such file"):
        write_manifest(folder, IDENTITY, ["nowhere"])
    assert (folder / MANIFEST).read_bytes() == before
