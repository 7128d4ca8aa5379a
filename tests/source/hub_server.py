"""A stand-in for the Hugging Face hub on this machine: repositories of files in memory, and what can go wrong."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class Hub:
    """The repositories by name, and what was asked for."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    """Files of which only half is sent."""
    down: bool = False
    """Every request fails with 503."""
    sent: list[str] = field(default_factory=list)
    """Files of which bytes were sent, each time."""


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a port of the loopback."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.hub.down:
            return self.fail(503, "")
        if path.startswith("api/models/"):
            return self.api(path.removeprefix("api/models/"))
        repo, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        if self.refused(repo, revision):
            return None
        if name not in self.hub.files[repo]:
            return self.fail(404, "EntryNotFound")
        return self.file(repo, name)

    def api(self, path):
        for word in ("revision", "tree"):
            repo, found, revision = path.partition(f"/{word}/")
            if found:
                break
        else:
            repo, revision = path, "main"
        if self.refused(repo, revision, api=True):
            return None
        files = self.hub.files[repo]
        if f"/{word}/" in f"/{path}/" and word == "tree":
            return self.answer([{"type": "file", "path": n, "size": len(b), "oid": _etag(b)} for n, b in files.items()])
        return self.answer({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]})

    def refused(self, repo, revision, api=False):
        if repo not in self.hub.files:
            return self.fail(404, "RepoNotFound")
        if repo in self.hub.gated and not api:
            return self.fail(403, "GatedRepo")
        if revision not in ("main", "v1", COMMIT):
            return self.fail(404, "RevisionNotFound")
        return False

    def file(self, repo, name):
        body = self.hub.files[repo][name]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            self.hub.sent.append(name)
            broken = name in self.hub.broken
            self.wfile.write(body[start : len(body) // 2] if broken else body[start:])
            self.close_connection = broken

    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def fail(self, status, code):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
