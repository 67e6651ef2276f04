"""What is created in Kubernetes for the nodes of a session, and what a user can set of it. Connects to nothing."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from nbdist.wire.processes.nodes import TOKEN_VARIABLE

GRACE = 5  # seconds for pods to end
VOLUME = re.compile(r"(?P<claim>[a-z0-9]([-a-z0-9.]*[a-z0-9])?):(?P<path>/[^:]+)")
_KEPT = 60  # seconds that a Job which has ended is kept
_KEY = "tokens"  # of the Secret
_GPU = "nvidia.com/gpu"


class KubernetesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can set.

    image: of the pods, with nbdist in its `python`. nodes: how many pods. gpus_per_node: of each. volumes: a persistent
    volume claim and where it is mounted, as "data:/data". namespace, context: "": those that kubectl uses.
    node_selector: labels of the machines. wait: seconds until all pods run; None: as long as it takes.
    """

    image: str = ""
    nodes: int = 1
    gpus_per_node: int | None = None
    volumes: list[str] = []
    namespace: str = ""
    context: str = ""
    node_selector: dict[str, str] = {}
    python: str = "python3"
    wait: float | None = None


def job(options: KubernetesOptions, name: str, address: str, count: int) -> dict[str, Any]:
    """Return the manifest of the Job."""
    claims = [found.groupdict() for text in options.volumes if (found := VOLUME.fullmatch(text))]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # a pod's own has 64 MiB
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, claim in enumerate(claims):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim["claim"]}})
        mounts.append({"name": f"volume-{number}", "mountPath": claim["path"]})
    container: dict[str, Any] = {
        "name": "node",
        "image": options.image,
        "command": [options.python, "-m", "nbdist", "join", address],
        "env": [{"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": _KEY}}}],
        "volumeMounts": mounts,
    }
    if options.gpus_per_node:
        container["resources"] = {"limits": {_GPU: str(options.gpus_per_node)}}
    pod: dict[str, Any] = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    pod |= {"terminationGracePeriodSeconds": GRACE, "volumes": volumes}
    if options.node_selector:
        pod["nodeSelector"] = options.node_selector
    spec: dict[str, Any] = {"completionMode": "Indexed", "completions": count, "parallelism": count}
    spec |= {"backoffLimitPerIndex": 0, "ttlSecondsAfterFinished": _KEPT}  # a token is good for one pod only
    spec["template"] = {"spec": pod}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def secret(name: str, tokens: str, job_uid: str) -> dict[str, Any]:
    """Return the manifest of the Secret with the tokens. It goes with the Job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    metadata = {"name": name, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {_KEY: tokens}}
