"""A Kubernetes API server for the real kubectl: it keeps objects of a few kinds, and starts nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse


class Kind(NamedTuple):
    """A kind of object."""

    group: str
    version: str
    name: str

    @property
    def path(self) -> str:
        """Its group and version in addresses."""
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"

    @property
    def api(self) -> str:
        """Its group and version in objects."""
        return f"{self.group}/{self.version}" if self.group else self.version


KINDS = {
    "trainjobs": Kind("trainer.kubeflow.org", "v1alpha1", "TrainJob"),
    "trainingruntimes": Kind("trainer.kubeflow.org", "v1alpha1", "TrainingRuntime"),
    "jobsets": Kind("jobset.x-k8s.io", "v1alpha2", "JobSet"),
    "configmaps": Kind("", "v1", "ConfigMap"),
    "pods": Kind("", "v1", "Pod"),
}
PATHS = {kind.path for kind in KINDS.values()}


class Handler(BaseHTTPRequestHandler):
    """Answers for the objects of a server, by resource and name."""

    server: Server

    def do_GET(self) -> None:
        """Discovery, an object, or all objects of a kind."""
        path = urlparse(self.path).path.strip("/")
        if path in DISCOVERY:
            self._answer(200, DISCOVERY[path])
        else:
            resource, name = self._place()
            if resource not in KINDS:
                self._refuse(404, "NotFound", f"no {path} here")
            elif not name:
                found = [each for (kind, _), each in self.server.objects.items() if kind == resource]
                kind = KINDS[resource]
                self._answer(200, {"kind": f"{kind.name}List", "apiVersion": kind.api, "metadata": {}, "items": found})
            elif (resource, name) in self.server.objects:
                self._answer(200, self.server.objects[resource, name])
            else:
                self._refuse(404, "NotFound", f'{resource} "{name}" not found')

    def do_POST(self) -> None:
        """Make an object."""
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        place = (self._place()[0], made["metadata"]["name"])
        if place in self.server.objects:
            self._refuse(409, "AlreadyExists", f'{place[0]} "{place[1]}" already exists')
            return
        made["metadata"]["uid"] = str(len(self.server.objects))
        self.server.objects[place] = made
        self._answer(201, made)

    def do_DELETE(self) -> None:
        """Delete an object."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        resource, name = self._place()
        if self.server.objects.pop((resource, name), None) is None:
            self._refuse(404, "NotFound", f'{resource} "{name}" not found')
        else:
            details = {"name": name, "kind": resource, "uid": "1"}
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details})

    def log_message(self, format: str, *args: Any) -> None:
        """Keep what was asked for the test."""
        self.server.asked.append(f"{self.command} {self.path}")

    def _place(self) -> tuple[str, str]:
        """Resource and name; the name is empty for all objects of a kind."""
        parts = urlparse(self.path).path.strip("/").split("/")
        # /api/v1/namespaces/NS/configmaps/NAME
        resource, name, *_ = [*(parts[parts.index("namespaces") + 2 :] if "namespaces" in parts else []), "", ""]
        return resource, name

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self._answer(code, {**status, "reason": reason, "message": message, "code": code})

    def _answer(self, code: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _discovery() -> dict[str, Any]:
    groups = [
        {"name": kind.group, "versions": [version := {"groupVersion": kind.api, "version": kind.version}]}
        | {"preferredVersion": version}
        for kind in {kind.group: kind for kind in KINDS.values() if kind.group}.values()
    ]
    found: dict[str, Any] = {
        # Some installations of kubectl take the program of the server's version
        "version": {"major": "1", "minor": "32", "gitVersion": "v1.32.4"},
        "api": {"kind": "APIVersions", "versions": ["v1"]},
        "apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "openapi/v3": {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in PATHS}},
    }
    for path in PATHS:
        own = {resource: kind for resource, kind in KINDS.items() if kind.path == path}
        resources = [
            {"name": resource, "singularName": kind.name.lower(), "namespaced": True, "kind": kind.name}
            | {"verbs": ["create", "delete", "get", "list"]}
            for resource, kind in own.items()
        ]
        api = next(iter(own.values())).api
        found[path] = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}
        found[f"openapi/v3/{path}"] = _open_api(path, own)
    return found


def _open_api(path: str, kinds: dict[str, Kind]) -> dict[str, Any]:
    """By which kubectl knows that the server checks fields itself, so that it downloads no schemas."""
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {}
    for resource, kind in kinds.items():
        known = {"group": kind.group, "version": kind.version, "kind": kind.name}
        patch = {"x-kubernetes-group-version-kind": known, "parameters": [parameter], "responses": {}}
        paths[f"/{path}/{resource}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "tests", "version": "1"}, "paths": paths}


DISCOVERY = _discovery()


class Server(ThreadingHTTPServer):
    """A server with its objects, and the requests that it got."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.asked: list[str] = []


@contextmanager
def serving(kubeconfig: Path) -> Iterator[Server]:
    """A server while this context lasts, and a file by which kubectl finds it."""
    server = Server()
    address = f"http://127.0.0.1:{server.server_port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": address}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
        "current-context": "here",
    }
    kubeconfig.write_text(json.dumps(config))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
