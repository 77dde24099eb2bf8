"""kubectl: how a cluster is asked, with JSON in and out.

The program and not a library: it has each cluster's way to log in (plugins of clouds, proxies, tokens that expire), its
commands have been stable for years, and an installation needs no second set of credentials.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import JobError

if TYPE_CHECKING:
    from forge_plugin_kubeflow.cluster import KubeflowCluster

ANSWER_S = 60.0
"""Seconds in which a cluster must answer."""


class KubectlError(Exception):
    """kubectl failed, or did not answer; its own words."""


def command(cluster: KubeflowCluster, *words: str) -> list[str]:
    """Returns a command line for a cluster.

    Raises:
        JobError: there is no kubectl.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise JobError("kubectl is not on the PATH: install it, or pass what --print prints to one that has it")
    where = [f"--context={cluster.context}"] if cluster.context else []
    where += [f"--namespace={cluster.namespace}"] if cluster.namespace else []
    return [program, *where, *words]


def ask(cluster: KubeflowCluster, *words: str, text: str | None = None) -> str:
    """Run kubectl and return what it prints.

    Args:
        cluster: its context and namespace.
        words: of the command.
        text: for its standard input.

    Raises:
        KubectlError: it failed.
        JobError: there is none.
    """
    try:
        done = subprocess.run(
            command(cluster, *words), input=text or "", capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KubectlError(f"kubectl {words[0]} did not answer within {ANSWER_S:g} s") from error
    if done.returncode:
        raise KubectlError(done.stderr.strip() or f"kubectl {words[0]} exited with {done.returncode}")
    return done.stdout


def objects(cluster: KubeflowCluster, *words: str) -> list[Mapping[str, Any]]:
    """Returns the objects that `kubectl get` with these words finds; none for those that are not there."""
    # Nothing at all is printed where nothing is found, and no list where one object is named
    text = ask(cluster, "get", *words, "--ignore-not-found", "--output=json")
    found = json.loads(text) if text.strip() else {"items": []}
    items: Sequence[Mapping[str, Any]] = found.get("items", [found])
    return list(items)
