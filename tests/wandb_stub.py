"""A W&B server for tests: stdlib HTTP on loopback, no network, no account.

It answers the calls that wandb 0.31 makes for runs with tables and media, and
for saving a workspace, and keeps every request body, so that a test can read
the history that arrived and look for values that must never leave. Headers are
not kept: the API key belongs into the Authorization header and nowhere else.

Modes:
- `ok`: answers everything.
- `refuse`: answers every call with `status` (401 by default).
- `hang`: accepts the connection and never answers.
- `hang_after_init`: answers until the run exists, then behaves like `hang`.

A server that is down is a port nobody listens on: `closed_port()`.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

API_KEY = "0123456789abcdef0123456789abcdef01234567"  # right in form, known to nobody


def closed_port() -> int:
    """A loopback port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class WandbStub:
    """Context manager. `url` is for WANDB_BASE_URL; `bodies` holds (path, decoded body) as they came."""

    def __init__(self, mode: str = "ok", status: int = 401) -> None:
        self.mode = mode
        self.status = status
        self.bodies: list[tuple[str, str]] = []
        self.operations: list[str] = []
        self.unknown: set[str] = set()  # operations that are answered with nothing
        self._released = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.stub = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> WandbStub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def hang(self) -> None:
        """Blocks the calling handler until the stub is closed."""
        self._released.wait()

    def _streamed(self, file: str) -> list[Any]:
        lines: list[Any] = []
        for path, body in self.bodies:
            if path.endswith("/file_stream"):
                content = json.loads(body).get("files", {}).get(file, {}).get("content", [])
                lines.extend(json.loads(line) for line in content)
        return lines

    def history(self) -> list[dict[str, Any]]:
        """The rows that arrived, with W&B's own keys (`_step`, `_runtime`, ...) left out."""
        return [
            {key: value for key, value in row.items() if not key.startswith("_")}
            for row in self._streamed("wandb-history.jsonl")
        ]

    def uploaded(self, prefix: str) -> list[str]:
        """The contents of the files that arrived whose name begins so."""
        return [body for path, body in self.bodies if path.startswith(f"/upload/{prefix}")]

    def exit_code(self) -> int | None:
        """The exit code with which the run was reported complete, if it was."""
        for path, body in self.bodies:
            if path.endswith("/file_stream") and json.loads(body).get("complete"):
                return int(json.loads(body)["exitcode"])
        return None

    def variables(self, operation: str) -> dict[str, Any]:
        """The variables of the first call of a GraphQL operation; empty when there was none."""
        for path, body in self.bodies:
            if path == "/graphql" and _operation(json.loads(body)) == operation:
                return dict(json.loads(body)["variables"])
        return {}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client went away: what these tests provoke


def _operation(request: dict[str, Any]) -> str:
    name = request.get("operationName")
    match = re.search(r"(?:query|mutation)\s+(\w+)", request.get("query", ""))
    return str(name or (match.group(1) if match else ""))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> str:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        return data.decode("utf-8", errors="replace")

    def _answer(self, payload: Any, status: int = 200) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _handle(self) -> None:
        stub: WandbStub = self.server.stub  # type: ignore[attr-defined]
        try:
            body = self._body()
            stub.bodies.append((self.path, body))
            if stub.mode == "refuse":
                self._answer({"errors": [{"message": "refused"}]}, stub.status)
            elif stub.mode == "hang" or (stub.mode == "hang_after_init" and self.path != "/graphql"):
                stub.hang()
            elif self.path == "/graphql":
                self._graphql(stub, json.loads(body))
            else:
                self._answer({})
        except (ConnectionError, ValueError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = _handle

    def _graphql(self, stub: WandbStub, request: dict[str, Any]) -> None:
        operation = _operation(request)
        stub.operations.append(operation)
        variables = request.get("variables", {})
        if operation in stub.unknown:
            data: Any = {}
        elif operation == "Viewer":
            data = {
                "viewer": {
                    "id": "1",
                    "entity": "tester",
                    "username": "tester",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            }
        elif operation == "UpsertBucket":
            data = {
                "upsertBucket": {
                    "bucket": {
                        "id": "1",
                        "name": variables.get("name"),
                        "displayName": variables.get("displayName"),
                        "description": "",
                        "config": variables.get("config") or "{}",
                        "sweepName": None,
                        "historyLineCount": 0,
                        "project": {
                            "id": "1",
                            "name": variables.get("project"),
                            "entity": {"id": "1", "name": "tester"},
                        },
                    },
                    "inserted": True,
                }
            }
        elif operation == "CreateRunFiles":
            files = [
                {"name": name, "uploadUrl": f"{stub.url}/upload/{name}"}
                for name in variables.get("files", [])
            ]
            data = {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        elif operation == "RunResumeStatus":
            data = {"model": None}
        elif operation == "RunStoppedStatus":
            data = {"project": {"run": {"stopped": False}}}
        elif operation == "GetDefaultEntity":
            data = {"viewer": {"id": "1", "entity": "tester"}}
        elif operation == "UpsertView2":
            data = {"upsertView": {"view": {"id": "1", "name": variables.get("name")}, "inserted": True}}
        elif operation == "ArtifactType":
            data = {"project": {"artifact": None}}
        elif operation == "ServerFeaturesQuery":
            data = {"serverInfo": {"features": []}}
        elif operation == "CreateArtifact":
            data = {
                "createArtifact": {
                    "artifact": {
                        "id": "1",
                        "state": "COMMITTED",  # then no file of it is asked for
                        "artifactSequence": {"latestArtifact": None},
                    }
                }
            }
        else:
            data = {}
        self._answer({"data": data})
