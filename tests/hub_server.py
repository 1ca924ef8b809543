"""A Hub on loopback: what huggingface_hub really asks of huggingface.co, answered from memory.

huggingface_hub reads HF_ENDPOINT and HF_HOME when it is imported, so its side runs in a process with `Hub.environment`.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class Hub:
    """Repositories in memory, every commit kept, and a line for every request."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}  # repository -> commit -> files
        self.branches: dict[str, dict[str, str]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.read_only = False
        self.broken = False
        self.requests: list[str] = []
        self.endpoint = ""

    def create(self, repo: str, *, private: bool = False) -> None:
        self.commits[repo], self.branches[repo] = {}, {}
        if private:
            self.private.add(repo)
        self.commit(repo, {".gitattributes": b""})

    def commit(self, repo: str, files: Files, branch: str = "main") -> str:
        """The name of a new commit that holds exactly these files."""
        if repo not in self.commits:
            self.create(repo)
        text = json.dumps([repo, len(self.commits[repo]), sorted(files)])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[repo][sha] = files
        self.branches[repo][branch] = sha
        return sha

    def files(self, repo: str) -> Files:
        """What the branch main holds."""
        return self.commits[repo][self.branches[repo]["main"]]

    def requested(self) -> set[str]:
        """The names of the files that were asked for."""
        return {line.rpartition("/")[2] for line in self.requests if "/resolve/" in line}

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that takes this for the Hub and keeps its cache under `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return kept | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            **more,
        }


@contextmanager
def run_server() -> Iterator[Hub]:
    """A Hub that answers at `endpoint` until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
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

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        if "traceback" in format:
            sys.stderr.write(format % arguments)

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def _get(self) -> None:
        path = self._path()
        if self.hub.broken:
            self._fail(503, "", "maintenance")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._describe(found[1], found[2], unquote(found[3] or "main"))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], unquote(found[2]), unquote(found[3]))
        else:
            self._fail(404, "", f"no such address: {path}")

    def do_POST(self) -> None:
        path = self._path()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.hub.read_only or "Authorization" not in self.headers:
            self._fail(403 if "Authorization" in self.headers else 401, "", "you may not write here")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in files]
            self._answer({"files": modes})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._fail(404, "", f"no such address: {path}")

    def _path(self) -> str:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def _find(self, repo: str, revision: str) -> tuple[str, Files] | None:
        """The commit and its files; where there is none, the Hub's refusal is sent."""
        if repo not in self.hub.commits:
            self._fail(401 if "Authorization" not in self.headers else 404, "RepoNotFound", "Repository not found")
            return None
        sha = self.hub.branches[repo].get(revision, revision)
        if sha not in self.hub.commits[repo]:
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return sha, self.hub.commits[repo][sha]

    def _describe(self, repo: str, kind: str | None, revision: str) -> None:
        found = self._find(repo, revision)
        if found is None:
            return
        sha, files = found
        if kind == "tree":
            listed = [{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files.items()]
            self._answer(listed)
        else:
            siblings = [{"rfilename": name} for name in files]
            private = repo in self.hub.private
            self._answer({"id": repo, "sha": sha, "siblings": siblings, "private": private, "tags": []})

    def _file(self, repo: str, revision: str, name: str) -> None:
        found = self._find(repo, revision)
        if found is None:
            return
        sha, files = found
        if repo in self.hub.gated:
            self._fail(403, "GatedRepo", f"Access to model {repo} is restricted")
        elif name not in files:
            self._fail(404, "EntryNotFound", "Entry not found")
        else:
            headers = {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": sha}
            if name.endswith((".safetensors", ".bin", ".npz")):  # what the Hub keeps in its large file storage
                linked = hashlib.sha256(files[name]).hexdigest()
                headers |= {"X-Linked-Etag": f'"{linked}"', "X-Linked-Size": str(len(files[name]))}
            self._send(200, files[name], headers)

    def _create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}"
        exists = repo in self.hub.commits
        if not exists:
            self.hub.create(repo, private=wanted.get("visibility") == "private" or wanted.get("private") is True)
        self._answer({"url": f"{self.hub.endpoint}/{repo}"}, 409 if exists else 200)

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.files(repo))
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        sha = self.hub.commit(repo, files)
        self._answer({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{sha}"})

    def _answer(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), {"Content-Type": "application/json"} | headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(content: bytes) -> str:
    """git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
