"""A stand-in for the W&B server on loopback: as much of it as a run needs to be started, resumed and finished."""

import contextlib
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

_PROJECT = {"id": "p", "name": "vitrail", "entity": {"id": "e", "name": "me"}}


@contextlib.contextmanager
def serve_wandb() -> Iterator[tuple[str, dict[str, list[dict[str, Any]]]]]:
    """The address of a server, and the history that it has of each run."""
    histories: dict[str, list[dict[str, Any]]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            if self.path.endswith("/file_stream"):
                answer = _receive_rows(histories[self.path.split("/")[-2]], json.loads(body or "{}"))
            else:
                answer = _answer_query(histories, json.loads(body)) if self.path.endswith("/graphql") else {}
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST  # noqa: N815

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", histories
    server.shutdown()
    server.server_close()


def _receive_rows(history: list[dict[str, Any]], content: dict[str, Any]) -> dict[str, Any]:
    if part := (content.get("files") or {}).get("wandb-history.jsonl"):
        history[part["offset"] :] = [json.loads(line) for line in part["content"]]
    return {"limits": {}}


def _answer_query(histories: dict[str, list[dict[str, Any]]], request: dict[str, Any]) -> dict[str, Any]:
    query, run_id = request["query"], request.get("variables", {}).get("name")
    if "upsertBucket" in query:
        bucket = {"id": run_id, "name": run_id, "config": "{}", "project": _PROJECT}
        inserted = run_id not in histories
        bucket["historyLineCount"] = len(histories.setdefault(run_id, []))
        return {"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}}
    if "RunResumeStatus" in query:
        bucket = {"id": run_id, "name": run_id, "config": "{}", "summaryMetrics": "{}", "wandbConfig": '{"t": {}}'}
        bucket |= {"historyLineCount": len(histories[run_id]), "eventsLineCount": 0, "logLineCount": 0, "tags": []}
        bucket |= {"historyTail": json.dumps([json.dumps(histories[run_id][-1])]), "eventsTail": "[]"}
        return {"data": {"model": _PROJECT | {"bucket": bucket}}}
    if "createRunFiles" in query:
        uploads = [{"name": name, "uploadUrl": f"/upload/{name}"} for name in request["variables"]["files"]]
        return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": uploads}}}
    return {"data": {"viewer": {"id": "v", "entity": "me", "flags": "{}", "teams": {"edges": []}}}}
