"""A hub on the loopback that serves folders as revisions, by ranges; it stops when the context ends."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = "someone/model"


class FakeHub:
    """What was asked of the hub and how many bytes of files it served."""

    def __init__(self, folder: Path, repository: str) -> None:
        self.folder, self.repository = folder, repository
        self.endpoint = ""
        self.served = 0
        self.asked: list[str] = []
        self.ranges = True

    @property
    def commits(self) -> dict[str, str]:
        names = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return {name: hashlib.sha1(name.encode()).hexdigest() for name in names}

    def revision(self, text: str) -> Path | None:
        for name, commit in self.commits.items():
            if text in (name, commit):
                return self.folder / name
        return None


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
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
            hub.asked.append(f"{self.command} {path}")
            api, files = f"/api/models/{hub.repository}/", f"/{hub.repository}/resolve/"
            if path == f"{api}refs":
                refs = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in hub.commits.items()]
                self.answer(200, json.dumps({"branches": refs, "tags": [], "converts": []}).encode())
            elif path.startswith(f"{api}tree/"):
                self.tree(hub.revision(path.removeprefix(f"{api}tree/")))
            elif path.startswith(files):
                revision, _, name = path.removeprefix(files).partition("/")
                self.file(hub.revision(revision), name)
            else:
                self.refuse("RepoNotFound")

        def tree(self, folder: Path | None) -> None:
            if folder is None:
                self.refuse("RevisionNotFound")
                return
            found = []
            for file in sorted(folder.iterdir()):
                entry = {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file, "sha1")}
                if file.suffix in (".safetensors", ".bin"):
                    entry["lfs"] = {"oid": _digest(file, "sha256"), "size": entry["size"], "pointerSize": 130}
                found.append(entry)
            self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

        def file(self, folder: Path | None, name: str) -> None:
            if folder is None or not (folder / name).is_file():
                self.refuse("RevisionNotFound" if folder is None else "EntryNotFound")
                return
            content = (folder / name).read_bytes()
            headers = {"ETag": f'"{_digest(folder / name, "sha256")}"', "X-Repo-Commit": hub.commits[folder.name]}
            status, wanted = 200, self.headers.get("Range")
            if wanted and hub.ranges:
                first, last = wanted.removeprefix("bytes=").split("-")
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                content, status = content[int(first) : int(last or len(content) - 1) + 1], 206
            if self.command == "GET":
                hub.served += len(content)
            self.answer(status, content, headers)

    return Handler


def _digest(file: Path, kind: str) -> str:
    return hashlib.new(kind, file.read_bytes()).hexdigest()


@contextmanager
def serve(folder: Path, repository: str = REPOSITORY) -> Iterator[FakeHub]:
    """Serve `folder`, whose subfolders are the revisions of `repository`."""
    hub = FakeHub(folder, repository)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
