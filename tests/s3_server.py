"""An S3 store on loopback: the requests that s3fs makes, answered from memory.

moto would answer them too, but with some thirty packages behind it, and it neither counts requests nor fails on demand.
"""

import hashlib
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 100  # keys in one answer to a listing; S3's own is 1,000
_DATE = "Mon, 02 Mar 2026 10:00:00 GMT"


class S3:
    """Objects in memory, and a line for every request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}  # bucket/key -> content
        self.requests: list[str] = []
        self.failing = 0
        """So many requests more are answered with 500."""
        self.cut = 0
        """So many answers more break off in the middle."""
        self.endpoint = ""

    def below(self, prefix: str) -> dict[str, bytes]:
        """The objects whose names begin so, by the rest of their names."""
        return {key.removeprefix(prefix): value for key, value in self.objects.items() if key.startswith(prefix)}

    def environment(self) -> dict[str, str]:
        """What a client's environment holds to find this store, and to give up quickly."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "anyone",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
            "AWS_RETRY_MODE": "standard",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def run_server() -> Iterator[S3]:
    """A store that answers at `endpoint` until the block ends."""
    store = S3()
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # clients keep their connections
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    store: S3
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        if "traceback" in format:
            sys.stderr.write(format % arguments)

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        name, query = unquote(url.path).lstrip("/"), parse_qs(url.query, keep_blank_values=True)
        self.store.requests.append(f"{self.command} {name}")
        if self.store.failing > 0:
            self.store.failing -= 1
            self._fail(500, "InternalError")
        elif self.command == "GET" and "list-type" in query:
            self._list(name.rstrip("/"), {key: values[0] for key, values in query.items()})
        elif self.command == "POST" and "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self.store.objects.pop(f"{name.rstrip('/')}/{key}", None)
            self._xml("DeleteResult", "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys))
        elif "/" not in name.rstrip("/"):
            self._send(200, b"", {})  # every bucket is there
        else:
            self._object(name, body)

    def _object(self, name: str, body: bytes) -> None:
        if self.command == "PUT":
            assert "aws-chunked" not in self.headers.get("Content-Encoding", "")
            self.store.objects[name] = body
            self._send(200, b"", {"ETag": _tag(body)})
        elif self.command == "DELETE":
            self.store.objects.pop(name, None)
            self._send(204, b"", {})
        elif name not in self.store.objects:
            self._fail(404, "NoSuchKey")
        else:
            content = self.store.objects[name]
            headers = {"ETag": _tag(content), "Last-Modified": _DATE}
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not found:
                self._send(200, content, headers)
            elif int(found[1]) >= len(content):
                self._fail(416, "InvalidRange")
            else:
                part = content[int(found[1]) : int(found[2]) + 1 if found[2] else None]
                end = int(found[1]) + len(part) - 1
                self._send(206, part, headers | {"Content-Range": f"bytes {found[1]}-{end}/{len(content)}"})

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rows: dict[str, str] = {}  # what is listed, in order
        for key, content in sorted(self.store.below(f"{bucket}/").items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                rows[folder] = f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            else:
                facts = f"<ETag>{escape(_tag(content))}</ETag><Size>{len(content)}</Size>"
                date = "<LastModified>2026-03-02T10:00:00.000Z</LastModified>"
                rows[key] = f"<Contents><Key>{escape(key)}</Key>{date}{facts}</Contents>"
        start, page = int(query.get("continuation-token", 0)), min(int(query.get("max-keys", PAGE)), PAGE)
        more = start + page < len(rows)
        token = f"<NextContinuationToken>{start + page}</NextContinuationToken>" if more else ""
        shown = "".join(list(rows.values())[start : start + page])
        self._xml("ListBucketResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{shown}")

    def _xml(self, root: str, content: str, status: int = 200) -> None:
        self._send(status, f"<?xml version='1.0'?><{root}>{content}</{root}>".encode(), {})

    def _fail(self, status: int, code: str) -> None:
        self._xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET" and self.store.cut > 0 and len(body) > 1:
            self.store.cut -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(body)


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
