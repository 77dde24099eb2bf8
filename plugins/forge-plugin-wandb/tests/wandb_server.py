"""As much of the server of Weights & Biases as its client asks of it when it starts, sends and ends runs."""

from __future__ import annotations

import gzip
import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(ThreadingHTTPServer):
    """A client that goes in the middle of a request is no news."""

    def handle_error(self, *_):
        pass


class WandbServer:
    """Keeps what runs send: `history[id]` is a list of lines, `runs[id]` the newest variables of the run, …"""

    def __init__(self):
        self.runs, self.history = {}, defaultdict(list)
        self.exit_codes, self.preempting, self.files, self.summaries = {}, set(), {}, {}
        handler = type("Handler", (Handler,), {"server_state": self})
        self._http = Quiet(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    # --- what the client asks ---------------------------------------------------------------------------------

    def answer(self, query, variables):
        run = variables.get("name")
        if "UpsertBucket" in query:
            new = run not in self.runs
            self.runs[run] = {**self.runs.get(run, {}), **{k: v for k, v in variables.items() if v is not None}}
            return {"upsertBucket": {"bucket": self._bucket(run), "inserted": new}}
        if "RunResumeStatus" in query:
            bucket = self._bucket(run) if run in self.runs else None
            return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": bucket}}
        if "CreateRunFiles" in query:
            names = variables["files"]
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{variables['run']}/{name}"} for name in names]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            viewer = {"id": "u", "entity": "me", "username": "me", "email": "me@here", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}, "serverInfo": {"features": []}}
        return {}

    def _bucket(self, run):
        lines = self.history[run]
        project = {"id": "p", "name": self.runs[run]["project"], "entity": {"id": "e", "name": "me"}}
        named = {"id": run, "name": run, "displayName": run, "project": project, "sweepName": None, "tags": []}
        tail = json.dumps([json.dumps(lines[-1])] if lines else [])
        counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
        config = self.runs[run].get("config", "{}")
        state = {"config": config, "wandbConfig": json.dumps({"t": {}}), "historyTail": tail, "eventsTail": "[]"}
        return {**named, **counts, **state, "summaryMetrics": json.dumps(self.summaries.get(run, {}))}

    def stream(self, run, sent):
        files = sent.get("files") or {}
        self.history[run] += [json.loads(line) for line in files.get("wandb-history.jsonl", {}).get("content", [])]
        for line in files.get("wandb-summary.json", {}).get("content", []):
            self.summaries[run] = json.loads(line)
        if sent.get("preempting"):
            self.preempting.add(run)
        if sent.get("complete"):
            self.exit_codes[run] = sent["exitcode"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/graphql":
            asked = json.loads(body)
            self._reply({"data": self.server_state.answer(asked["query"], asked.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self.server_state.stream(self.path.split("/")[-2], json.loads(body))
            self._reply({})
        else:
            self._reply({})

    def do_PUT(self):
        _, _, run, name = self.path.split("/", 3)
        self.server_state.files[run, name] = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._reply({})

    def do_GET(self):
        self._reply({})

    def _reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass
