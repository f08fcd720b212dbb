"""Where the checkpoints of a series are: in local folders, or in the revisions of a repository on the hub."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from joma.arguments import InputError, short_reason
from joma.watch.byte_ranges import ByteSource, Unreadable, local_file, reading
from joma.watch.weight_files import FileEntry

CONFIG = "config.json"  # describes the architecture
DESCRIPTIONS = ("*.json", "*.txt", "*.model")  # the files that describe a model and its tokenizer


SPECIAL_FILES = {"p": "a named pipe", "s": "a socket", "c": "a device", "b": "a device"}


def is_folder(source: str | Path) -> bool:
    """Return whether `source` is a folder; raise `InputError` for a file, or if the file system does not tell."""
    try:
        mode = _mode(Path(source))
        if mode is not None and mode != stat.S_IFDIR:  # else the hub would be asked for its name
            remedy = "give the folder that it is in"
            raise InputError("source", "a folder or a repository", f"{str(source)!r}, which is a file", remedy)
        return Path(source).is_dir()
    except OSError as cause:
        raise _unreadable_source(source, cause) from None


def _unreadable_source(source: str | Path, cause: OSError) -> InputError:
    remedy = "check the path and its permissions"
    return InputError("source", "a folder that can be read", f"{str(source)!r} ({cause.strerror})", remedy)


class Folders:
    """A local folder with one subfolder per checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the names of the subfolders, and of what might be one but cannot be read."""
        try:
            entries = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        except OSError as cause:
            raise _unreadable_source(self.path, cause) from None
        return [name for name in entries if _mode(self.path / name) in (None, stat.S_IFDIR)]

    @property
    def single(self) -> str | None:
        """The name of the folder itself if it holds a model."""
        has_model = any(self.path.glob("*.safetensors")) or any(self.path.glob("*.bin"))
        return self.path.resolve().name if has_model else None

    def folder(self, name: str, files: Iterable[str] = ()) -> Path:  # noqa: ARG002 (nothing has to be downloaded)
        """Return the folder of a checkpoint."""
        is_single = not os.path.lexists(self.path / name) and name == self.path.resolve().name
        return self.path if is_single else self.path / name

    def entries(self, name: str) -> dict[str, FileEntry]:
        """Return the files of a checkpoint, by name."""
        with reading(name, "folder"):
            files = sorted(self.folder(name).iterdir())
        return {file.name: self._entry(name, file) for file in files if _mode(file) != stat.S_IFDIR}

    def _entry(self, name: str, file: Path) -> FileEntry:
        label = f"{name}/{file.name}"
        try:
            status = _status(file, label)
        except Unreadable:  # named when the file is opened, which may never happen
            return FileEntry(label, "unreadable", partial(_source, file, label), partial(_path, file, label))
        portable = f"{status.st_size} {status.st_mtime_ns}"
        identity = f"{portable} {status.st_dev} {status.st_ino}"
        functions = partial(_source, file, label), partial(_path, file, label)
        return FileEntry(label, identity, *functions, size=status.st_size, portable=portable)


def _mode(path: Path) -> int | None:
    """Return the type of a file; None if it cannot be determined, as for a link to nowhere."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except OSError:
        return None


def _status(file: Path, label: str) -> os.stat_result:
    """Return the status of a regular file; raise `Unreadable` for anything else, which might block or never end."""
    with reading(label):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        got = SPECIAL_FILES.get(stat.filemode(status.st_mode)[0], "something else")
        raise Unreadable(label, "a regular file", got, "replace it by a copy, or leave it out")
    return status


def _source(file: Path, label: str) -> ByteSource:
    _status(file, label)
    return local_file(file, label)


def _path(file: Path, label: str) -> Path:
    _status(file, label)
    return file


class Hub:
    """A repository on the Hugging Face hub whose revisions are the checkpoints; files are read by byte ranges."""

    single = "main"

    def __init__(self, repository: str, endpoint: str | None) -> None:
        try:
            import huggingface_hub
            import huggingface_hub.errors
            import huggingface_hub.hf_api
            import huggingface_hub.utils
        except ImportError:
            got = f"{repository!r}, which is not a folder, and the package `huggingface_hub` is not installed"
            raise InputError("source", "a folder or a repository", got, "pip install 'joma[hf]'") from None
        self.hub, self.repository = huggingface_hub, repository
        self.api = huggingface_hub.HfApi(endpoint=endpoint)
        self.commits: dict[str, str] = {}

    def names(self) -> list[str]:
        """Return the names of the branches and tags."""
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.repository):
            raise self._not_found("not a repository's name")
        refs = self._request(lambda: self.api.list_repo_refs(self.repository))
        self.commits = {ref.name: ref.target_commit for ref in [*refs.tags, *refs.branches]}
        return sorted(self.commits)

    def folder(self, name: str, files: Iterable[str]) -> Path:
        """Download `files` of a revision, with those that describe the model and its tokenizer; return their folder."""
        options = {"revision": self.commits[name], "endpoint": self.api.endpoint}
        patterns = [*files, *DESCRIPTIONS]
        download = self.hub.snapshot_download
        return Path(self._request(lambda: download(self.repository, allow_patterns=patterns, **options), name))

    def entries(self, name: str) -> dict[str, FileEntry]:
        """Return the files of a revision, by name."""
        tree = self._request(lambda: list(self.api.list_repo_tree(self.repository, revision=self.commits[name])))
        return {file.path: self._entry(name, file) for file in tree if isinstance(file, self.hub.hf_api.RepoFile)}

    def _entry(self, name: str, file: Any) -> FileEntry:
        label, commit = f"{name}/{file.path}", self.commits[name]
        url = self.hub.hf_hub_url(self.repository, file.path, revision=commit, endpoint=self.api.endpoint)

        def download() -> Path:
            options = {"revision": commit, "endpoint": self.api.endpoint}
            return Path(self._request(lambda: self.hub.hf_hub_download(self.repository, file.path, **options)))

        identity = file.lfs.sha256 if file.lfs else file.blob_id
        source = ByteSource(label, file.size, lambda start, stop: self._range(url, label, start, stop))
        return FileEntry(label, identity, lambda: source, download, size=file.size)

    def _range(self, url: str, label: str, start: int, stop: int) -> bytes:
        """Download the bytes `start` to `stop` of a file."""
        headers = {**self.hub.utils.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}

        def get() -> Any:
            response = self.hub.utils.http_backoff("GET", url, headers=headers, timeout=60)
            self.hub.utils.hf_raise_for_status(response)
            return response

        response = self._request(get, label)
        if response.status_code != 206 and len(response.content) != stop - start:
            got = f"status {response.status_code}"
            raise Unreadable(label, "served by byte ranges", got, "download the revision and give its folder")
        return response.content

    def _request(self, request: Callable[[], Any], label: str | None = None) -> Any:
        """Return the hub's answer; turn its refusals and network errors into one-line errors."""
        errors = self.hub.errors
        try:
            return request()
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise self._not_found("not a public repository on the hub") from None
        except (OSError, *errors.HfHubHTTPError.__bases__) as cause:
            reason = short_reason(cause)
            if label is not None:
                raise Unreadable(label, "a file that the hub serves", reason, "try again") from None
            got = f"{self.repository!r}, but {self.api.endpoint} does not answer ({reason})"
            remedy = "check the network, or give the folder of a download"
            raise InputError("source", "a folder or a repository", got, remedy) from None

    def _not_found(self, reason: str) -> InputError:
        got = f"{self.repository!r}, which is not a folder and {reason}"
        return InputError("source", "a folder or a repository on the hub", got, "check the spelling")
