"""A local server that plays the Hugging Face hub: it serves folders as revisions, by byte ranges."""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import save_file

REPOSITORY = "someone/model"


def write_series(folder: Path, steps: Iterable[int], name: str = "step{}", size: int = 6) -> Path:
    """Write a small checkpoint for each step: `w` is the step, `size` times, and `m` a 2 x 3 matrix of ones."""
    for step in steps:
        path = folder / name.format(step)
        path.mkdir(parents=True)
        save_file({"w": torch.full((size,), float(step)), "m": torch.ones(2, 3)}, path / "model.safetensors")
    return folder


class FakeHub:
    """The state of the server.

    Attributes:
        endpoint: its URL.
        served: how many bytes of files it has sent.
        ranges: whether it honours byte ranges.
    """

    def __init__(self, folder: Path, repository: str) -> None:
        self.folder, self.repository = folder, repository
        self.endpoint = ""
        self.served = 0
        self.ranges = True

    @property
    def commits(self) -> dict[str, str]:
        """The commit hash of each revision."""
        names = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return {name: hashlib.sha1(name.encode()).hexdigest() for name in names}

    def revision(self, text: str) -> Path | None:
        """Return the folder of the revision with this name or commit hash."""
        for name, commit in self.commits.items():
            if text in (name, commit):
                return self.folder / name
        return None


class _Handler(BaseHTTPRequestHandler):
    """Answers requests like the hub's API for one repository."""

    hub: FakeHub

    # HTTP/1.0, the default, closes each connection, so that nothing answers once the server has stopped.
    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, code: str) -> None:
        self.answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        api, files = f"/api/models/{self.hub.repository}/", f"/{self.hub.repository}/resolve/"
        if path == f"{api}refs":
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
                for name, commit in self.hub.commits.items()
            ]
            self.answer(200, json.dumps({"branches": refs, "tags": [], "converts": []}).encode())
        elif path.startswith(f"{api}tree/"):
            self.send_tree(self.hub.revision(path.removeprefix(f"{api}tree/")))
        elif path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            self.send_file(self.hub.revision(revision), name)
        else:
            self.refuse("RepoNotFound")

    def send_tree(self, folder: Path | None) -> None:
        if folder is None:
            self.refuse("RevisionNotFound")
            return
        tree = []
        for file in sorted(folder.iterdir()):
            entry = {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file, "sha1")}
            if file.suffix in (".safetensors", ".bin"):
                entry["lfs"] = {"oid": _digest(file, "sha256"), "size": entry["size"], "pointerSize": 130}
            tree.append(entry)
        self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    def send_file(self, folder: Path | None, name: str) -> None:
        if folder is None or not (folder / name).is_file():
            self.refuse("RevisionNotFound" if folder is None else "EntryNotFound")
            return
        content = (folder / name).read_bytes()
        headers = {"ETag": f'"{_digest(folder / name, "sha256")}"', "X-Repo-Commit": self.hub.commits[folder.name]}
        status, byte_range = 200, self.headers.get("Range")
        if byte_range and self.hub.ranges:
            first, last = byte_range.removeprefix("bytes=").split("-")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[int(first) : int(last or len(content) - 1) + 1], 206
        if self.command == "GET":
            self.hub.served += len(content)
        self.answer(status, content, headers)


def _digest(file: Path, algorithm: str) -> str:
    return hashlib.new(algorithm, file.read_bytes()).hexdigest()


@contextmanager
def serve(folder: Path, repository: str = REPOSITORY) -> Iterator[FakeHub]:
    """Serve `folder`, whose subfolders are the revisions of `repository`, until the block ends."""
    hub = FakeHub(folder, repository)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
