"""A stand-in for the API server of Kubernetes, and for what runs its pods: processes of this machine.

It takes only what the official client's models accept, field by field, and knows what a real server checks besides.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_KINDS = {"jobs": "V1Job", "secrets": "V1Secret"}


class Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Pod:
    """A pod. `process` runs once there is what it needs."""

    name: str
    index: int
    process: subprocess.Popen[str] | None = None
    log: str = ""
    waiting: dict[str, str] = field(default_factory=dict)
    unschedulable: str = ""

    def state(self) -> dict[str, Any]:
        """Its status, as the API says it."""
        if self.unschedulable:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.unschedulable}
            return {"phase": "Pending", "conditions": [why]}
        common = {"name": "node", "image": "any", "imageID": "", "restartCount": 0, "ready": False}
        if self.process is None:
            return {"phase": "Pending", "containerStatuses": [{**common, "state": {"waiting": self.waiting}}]}
        code = self.process.poll()
        if code is None:
            return {"phase": "Running", "containerStatuses": [{**common, "state": {"running": {}}}]}
        if not self.log and self.process.stdout is not None:
            self.log = self.process.stdout.read()
        ended = {"terminated": {"exitCode": code}}
        return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{**common, "state": ended}]}

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.log += self.process.communicate(timeout=30)[0]


class ApiServer:
    """The server.

    Attributes:
        url: Where it listens.
        gpus: That each of its machines has.
        asked: The bodies of all that were to be created.
        objects: By kind and name, what there is.
    """

    def __init__(self, gpus: int = 0) -> None:
        self.gpus = gpus
        self.asked: list[dict[str, Any]] = []
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, list[Pod]] = {}  # by job
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def processes(self) -> list[int]:
        """Of its pods, those that run."""
        with self.lock:
            pods = [pod for pods in self.pods.values() for pod in pods]
            return [pod.process.pid for pod in pods if pod.process is not None and pod.process.poll() is None]

    def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        from kubernetes import client

        with self.lock:
            self.asked.append(body)
            if namespace == "closed":
                raise Refused(403, f'{kind} is forbidden: User "me" cannot create resource in the namespace "closed"')
            try:
                getattr(client, _KINDS[kind]).model_validate(body)
            except ValueError as error:
                raise Refused(422, str(error)) from None
            name = body["metadata"]["name"]
            if len(name) > 63 or _NAME.fullmatch(name) is None:
                raise Refused(422, f"{name!r} is not a DNS label")
            if (kind, name) in self.objects:
                raise Refused(409, f"{kind} {name!r} already exists")
            body["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": namespace}
            if kind == "jobs":
                _check_job(body)
                pods = range(body["spec"]["completions"])
                self.pods[name] = [Pod(f"{name}-{index}-{uuid.uuid4().hex[:5]}", index) for index in pods]
            self.objects[kind, name] = body
            self._run_pods()
            return body

    def delete(self, kind: str, name: str) -> dict[str, Any]:
        with self.lock:
            if self.objects.pop((kind, name), None) is None:
                raise Refused(404, f"{kind} {name!r} not found")
            if kind == "jobs":
                for pod in self.pods.pop(name):
                    pod.end()
            return {"kind": "Status", "status": "Success"}

    def list_pods(self, selector: str) -> dict[str, Any]:
        with self.lock:
            job = selector.removeprefix("job-name=")
            items = [
                {
                    "metadata": {
                        "name": pod.name,
                        "annotations": {"batch.kubernetes.io/job-completion-index": str(pod.index)},
                    },
                    "status": pod.state(),
                }
                for pod in self.pods.get(job, [])
            ]
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    def log_of(self, name: str) -> str:
        with self.lock:
            return next(pod.log for pods in self.pods.values() for pod in pods if pod.name == name)

    def _run_pods(self) -> None:
        """Run what has all that it needs, as a machine's kubelet would."""
        for job, pods in self.pods.items():
            spec = self.objects["jobs", job]["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            wanted = int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", "0"))
            for pod in pods:
                if wanted > self.gpus:
                    pod.unschedulable = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
                elif container["image"].startswith("missing"):
                    pod.waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
                elif (environment := self._environment(container)) is None:
                    pod.waiting = {"reason": "CreateContainerConfigError", "message": "secret not found"}
                elif pod.process is None:
                    place = {"JOB_COMPLETION_INDEX": str(pod.index), "OF_POD": pod.name}
                    pod.process = subprocess.Popen(
                        container["command"],
                        env={**os.environ, "PYTHONPATH": str(ROOT), **environment, **place},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        cwd="/",
                    )

    def _environment(self, container: dict[str, Any]) -> dict[str, str] | None:
        found = {}
        for variable in container["env"]:
            place = variable["valueFrom"]["secretKeyRef"]
            secret = self.objects.get(("secrets", place["name"]))
            if secret is None:
                return None
            data = {key: base64.b64decode(value).decode() for key, value in secret.get("data", {}).items()}
            found[variable["name"]] = {**data, **secret.get("stringData", {})}[place["key"]]
        return found

    def close(self) -> None:
        for kind, name in list(self.objects):
            self.delete(kind, name)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _check_job(body: dict[str, Any]) -> None:
    """What a server checks beyond types."""
    spec = body["spec"]
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        raise Refused(422, "restartPolicy must be Never or OnFailure")
    if "backoffLimitPerIndex" in spec and spec.get("completionMode") != "Indexed":
        raise Refused(422, "backoffLimitPerIndex needs completionMode Indexed")
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    mounts = [mount for container in pod["containers"] for mount in container.get("volumeMounts", [])]
    if unknown := {mount["name"] for mount in mounts} - volumes:
        raise Refused(422, f"volumeMounts: not found: {unknown}")
    if len({mount["mountPath"] for mount in mounts}) < len(mounts):
        raise Refused(422, "mountPath must be unique")


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(self._get)

        def do_POST(self) -> None:
            self._answer(lambda kind, place, query: server.create(kind, place[0], self._body()))

        def do_DELETE(self) -> None:
            self._body()
            self._answer(lambda kind, place, query: server.delete(kind, place[2]))

        def _get(self, kind: str, place: list[str], query: dict[str, list[str]]) -> object:
            assert kind == "pods", kind
            if place[-1] == "log":
                return server.log_of(place[2])
            return server.list_pods(query["labelSelector"][0])

        def _body(self) -> Any:
            length = int(self.headers.get("Content-Length") or 0)
            return json.loads(self.rfile.read(length)) if length else None

        def _answer(self, act: Any) -> None:
            url = urlsplit(self.path)
            place = url.path.partition("/namespaces/")[2].split("/")
            try:
                found, code = act(place[1], place, parse_qs(url.query)), 200
            except Refused as error:
                found, code = {"kind": "Status", "message": str(error), "code": error.code}, error.code
            text = found if isinstance(found, str) else json.dumps(found)
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[tuple[ApiServer, Path]]:
    """Run a server until the end; and the configuration file that names it."""
    server = ApiServer()
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "here", "cluster": {"server": server.url}}],
                "users": [{"name": "me", "user": {}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "research"}}],
                "current-context": "here",
            }
        )
    )
    try:
        yield server, config
    finally:
        server.close()
