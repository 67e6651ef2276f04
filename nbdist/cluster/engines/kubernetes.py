"""Nodes by Kubernetes: an Indexed Job whose pods run `nbdist join`, with their tokens in a Secret that the Job owns.

Pods leave by themselves when the session has ended, so that none is left even if nobody deletes the Job.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from nbdist.base.checks import LONGEST, check_seconds, check_whole
from nbdist.base.processes import describe_exit
from nbdist.base.text import counted
from nbdist.cluster.engines.engine import JOIN_LIMIT, Layout
from nbdist.cluster.engines.kubernetes_job import GRACE, VOLUME, KubernetesOptions, job, secret
from nbdist.errors import UsageError
from nbdist.wire.processes.starter_lines import Invitation, NodeEnded, Report, StarterFailed, StarterProgress

_TICK = 2.0  # seconds between questions
_ASK_LIMIT = 10.0  # seconds for an answer
_LAST_LINES = 3
_INDEX = "batch.kubernetes.io/job-completion-index"
_HOPELESS = ("ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName", "CreateContainerError", "RunContainerError")
_EXAMPLE = "`%distributed start --kubernetes --num-nodes 2 --image registry/team/train:1`"


class Kubernetes:
    """The engine."""

    Options = KubernetesOptions

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._name = f"nbdist-{secrets.token_hex(4)}"
        self._seats: dict[int, int] = {}  # by completion index
        self._client: Any = None
        self._namespace = ""

    @classmethod
    def check(cls, options: KubernetesOptions) -> Layout:
        """Return the nodes; nothing is asked for yet."""
        if importlib.util.find_spec("kubernetes") is None:
            raise UsageError("the client of Kubernetes is not installed: type `pip install 'nbdist[kubernetes]'`")
        if not options.image:
            raise UsageError(f"give the image that the pods run: {_EXAMPLE}")
        check_whole("the number of nodes", options.nodes, 1, _EXAMPLE)
        if options.gpus_per_node is not None:
            check_whole("gpus_per_node", options.gpus_per_node, 1, "--gpus-per-node 8")
        check_seconds("wait", options.wait)
        for volume in options.volumes:
            if VOLUME.fullmatch(volume) is None:
                raise UsageError(
                    f"invalid volume {volume!r}: give a claim and where it is mounted: `--volumes data:/data`"
                )
        client, _ = _connect(options)
        host = urlsplit(client.configuration.host).hostname or ""
        return Layout([None] * options.nodes, 0, host, LONGEST)

    @classmethod
    def manifest(cls, options: KubernetesOptions, address: str) -> str:
        """Return what would be created, as YAML."""
        import yaml

        made = job(options, "nbdist-NAME", address, options.nodes), secret("nbdist-NAME", "TOKENS", "UID")
        return str(yaml.safe_dump_all(made, sort_keys=False))

    def start(self, invitation: Invitation) -> None:
        """Create the Job, then the Secret that its pods wait for."""
        from kubernetes.client import BatchV1Api, CoreV1Api

        self._seats = {index: seat.number for index, seat in enumerate(invitation.seats)}
        self._client, self._namespace = _connect(self._options)
        tokens = ",".join(seat.token for seat in invitation.seats)
        with _explained(self._namespace):
            body = job(self._options, self._name, invitation.address, len(invitation.seats))
            made = BatchV1Api(self._client).create_namespaced_job(self._namespace, body, _request_timeout=_ASK_LIMIT)
            body = secret(self._name, tokens, made.metadata.uid)
            CoreV1Api(self._client).create_namespaced_secret(self._namespace, body, _request_timeout=_ASK_LIMIT)

    def watch(self) -> Iterator[Report]:
        """Yield what keeps pods from running until all do, then the end of each."""
        gave_up_at, said, waiting = time.monotonic() + (self._options.wait or LONGEST), "", True
        while self._seats:
            pods = self._pods()
            for pod in pods:
                if (ended := self._end_of(pod)) is not None:
                    yield ended
            if waiting:
                reasons = {reason for pod in pods if (reason := _waits_for(pod)) is not None}
                if hopeless := next((text for kind, text in reasons if kind in _HOPELESS), ""):
                    yield StarterFailed(f"Kubernetes can't run image {self._options.image!r}: {hopeless}")
                    return
                running = sum(pod.status.phase == "Running" for pod in pods)
                waiting = running < len(self._seats)
                state = f"{running} of {counted(len(self._seats), 'pod')} of Job {self._name} are running"
                state += "".join(f"; {text}" for _, text in sorted(reasons))
                if waiting and state != said:
                    said = state
                    yield StarterProgress(f"waiting for Kubernetes: {state}; Ctrl-C deletes the Job")
                if not waiting:
                    yield StarterProgress("", JOIN_LIMIT)
                elif time.monotonic() > gave_up_at:
                    yield StarterFailed(
                        f"Kubernetes did not start the pods within {self._options.wait:g} s ({said}): the Job is "
                        "deleted. Ask for fewer nodes or GPUs, or wait longer"
                    )
                    return
            time.sleep(_TICK)

    def stop(self) -> None:
        """Delete the Job with its pods, and the Secret."""
        if self._client is None:
            return
        from kubernetes.client import ApiException, BatchV1Api, CoreV1Api
        from urllib3.exceptions import HTTPError

        where, limit = (self._name, self._namespace), {"_request_timeout": _ASK_LIMIT}
        with contextlib.suppress(ApiException, HTTPError):  # it ends with the session in any case
            BatchV1Api(self._client).delete_namespaced_job(
                *where, propagation_policy="Background", grace_period_seconds=GRACE, **limit
            )
        with contextlib.suppress(ApiException, HTTPError):  # the Job owns it
            CoreV1Api(self._client).delete_namespaced_secret(*where, **limit)

    def _pods(self) -> list[Any]:
        from kubernetes.client import ApiException, CoreV1Api
        from urllib3.exceptions import HTTPError

        try:
            found = CoreV1Api(self._client).list_namespaced_pod(
                self._namespace, label_selector=f"job-name={self._name}", _request_timeout=_ASK_LIMIT
            )
        except (ApiException, HTTPError):  # it is asked again
            return []
        return list(found.items)

    def _end_of(self, pod: Any) -> NodeEnded | None:
        """Return that a pod has ended, once."""
        index = (pod.metadata.annotations or {}).get(_INDEX, "")
        if pod.status.phase not in ("Succeeded", "Failed") or int(index or -1) not in self._seats:
            return None
        states = [status.state.terminated for status in pod.status.container_statuses or []]
        code = next((state.exit_code for state in states if state is not None), 0)
        said = self._last_lines(pod.metadata.name)
        how = f"pod {pod.metadata.name} has ended ({pod.status.reason or describe_exit(code)})"
        return NodeEnded(self._seats.pop(int(index)), f"{how}: {said}" if said else how)

    def _last_lines(self, pod: str) -> str:
        from kubernetes.client import ApiException, CoreV1Api
        from urllib3.exceptions import HTTPError

        with contextlib.suppress(ApiException, HTTPError):
            log = CoreV1Api(self._client).read_namespaced_pod_log(
                pod, self._namespace, tail_lines=_LAST_LINES, _request_timeout=_ASK_LIMIT
            )
            return str(log).strip().removeprefix("nbdist: ")
        return ""


def _waits_for(pod: Any) -> tuple[str, str] | None:
    """Return why a pod does not run yet, as Kubernetes names it and in words; None: nothing is known."""
    for status in pod.status.container_statuses or []:
        if (waiting := status.state.waiting if status.state is not None else None) is not None:
            return str(waiting.reason), ": ".join(filter(None, (waiting.reason, waiting.message)))
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return str(condition.reason), ": ".join(filter(None, (condition.reason, condition.message)))
    return None


def _connect(options: KubernetesOptions) -> tuple[Any, str]:
    """Return a client and the namespace: by kubectl's configuration, else by that of the pod that we are in.

    Raises:
        UsageError: There is neither, or it can't be used.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    namespace = ""
    try:
        try:
            config.load_kube_config(context=options.context or None, client_configuration=configuration)
            contexts, current = config.list_kube_config_contexts()
            chosen = next((each for each in contexts if each["name"] == options.context), current)
            namespace = chosen["context"].get("namespace", "")
        except config.ConfigException:
            if options.context:
                raise
            config.load_incluster_config(client_configuration=configuration)
            with contextlib.suppress(OSError), open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
                namespace = file.read().strip()
    except config.ConfigException as error:
        raise UsageError(
            f"no Kubernetes cluster is configured here ({error}): first make `kubectl get pods` work in a terminal"
        ) from None
    configuration.retries = 0  # the starter asks again itself
    return client.ApiClient(configuration), options.namespace or namespace or "default"


@contextlib.contextmanager
def _explained(namespace: str) -> Iterator[None]:
    """Raise a UsageError for what the cluster refuses."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        try:
            reason = msgspec.json.decode(error.body or "")["message"]
        except (msgspec.DecodeError, TypeError, KeyError):
            reason = error.reason
        raise UsageError(f"Kubernetes refuses the nodes in namespace {namespace!r}: {reason}") from None
    except HTTPError as error:
        raise UsageError(f"Kubernetes can't be reached: {error}. `kubectl get pods` shows it") from None
