"""What keys of `[cluster]` may be, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from forge_plugin_launch.remote.paths import by_variable
from forge_plugin_launch.remote.secret_values import is_secret, known_token, texts

OURS = {
    "type": "", "name": "", "commands": "", "entrypoint": "", "groups": "", "schedule": "", "shell": "",
    "nodes": "nodes", "image": "image", "resources": "resources", "backends": "backends", "regions": "regions",
    "fleets": "fleets",
    "spot_policy": "spot_policy", "max_price": "max_price", "env": "env", "volumes": "volumes", "files": "files",
    "repos": "files", "working_dir": "working_dir", "setup": "setup", "retry": "retry",
}  # fmt: skip
"""Keys of a task that are keys of `[cluster]`, by which name; empty: `submit` sets them itself, or a run has none."""
EVENTS = ("no-capacity", "interruption", "error")
"""Events after which dstack starts a task again."""
NEEDED = {
    "interruption": "a node that is taken away would end the run",
    "error": "a run that saved (exit code 75), and nodes that lost another one, would count as failed",
}
RESERVED = "DSTACK_"


def by_dstack(_: object, attribute: attrs.Attribute, value: Any) -> None:
    """Checks a key by dstack's class."""
    if value:
        _demand(attribute.name, {attribute.name: value})


def _demand(key: str, keys: Mapping[str, Any]) -> None:
    from forge_plugin_dstack.vendor import problem_of

    if problem := problem_of(keys):
        raise ValueError(f"'{key}' is none of dstack's: {problem}")


def resources(cluster: Any, attribute: attrs.Attribute, value: Mapping[str, Any]) -> None:
    """Checks resources by dstack's class, and that they have one number of GPUs, as `gpus_per_node` if set."""
    by_dstack(cluster, attribute, value)
    if "gpu" not in value:
        return
    from forge_plugin_dstack.vendor import gpu_counts

    least, most = gpu_counts(value)
    gpu, own = value["gpu"], cluster.gpus_per_node
    if least != most and not own:
        raise ValueError(f"'resources' has gpu = {gpu!r}, of which each gets a rank: say how many, as in \"H100:8\"")
    if least == most == 0 or (own and least == most != own):
        raise ValueError(f"'resources' has gpu = {gpu!r}, and cluster.gpus_per_node is {own}; one number is enough")


def variables(_: object, __: attrs.Attribute, value: tuple[str, ...]) -> None:
    """Checks variables, none of which may have a secret."""
    if value:
        for entry in value:
            # dstack's own message would show the text
            if known_token(entry.partition("=")[0]):
                raise ValueError("'env' has names of variables, and one of these looks like a secret")
        _demand("env", {"env": value})
    for name, text in by_variable(value).items():
        # A secret of dstack by its name, which the server replaces
        is_reference = text is not None and text.startswith("${{") and text.endswith("}}")
        if text and not is_reference and is_secret(name, text):
            # Without the value, since this text is printed
            fix = f'write "{name}", of this environment, or "{name}=${{{{ secrets.NAME }}}}", of dstack'
            raise ValueError(f"'env' has a value for {name} that looks like a secret; {fix}")
        if name.startswith(RESERVED):
            raise ValueError(f"'env' has {name}, which dstack sets itself")


def a_working_dir(_: object, __: attrs.Attribute, value: str) -> None:
    """Checks the folder in which the command runs."""
    if not value.startswith("/"):
        raise ValueError(f"'working_dir' must be an absolute path in the container, such as '/workflow', got {value!r}")


def retries(cluster: Any, _: attrs.Attribute, value: Mapping[str, Any]) -> None:
    """Checks after what dstack starts a run again."""
    if value:
        _demand("retry", {"retry": value})
    events = value.get("on_events") or EVENTS
    for event, why in NEEDED.items():
        if cluster.spot_policy != "on-demand" and event not in events:
            raise ValueError(f"'retry' has no {event!r}, and spot_policy is {cluster.spot_policy!r}: {why}; add it")


def further(_: object, attribute: attrs.Attribute, value: Mapping[str, Any]) -> None:
    """Checks further keys of the task by dstack's class; keys of `[cluster]` are refused."""
    for name in value:
        if name in OURS:
            instead = (
                f"is the key {OURS[name]}" if OURS[name] else "belongs to forge-run submit, or is of no use to training"
            )
            raise ValueError(f"'extra' has {name}, which {instead}")
    if value:
        _demand("extra", value)
    without_tokens(_, attribute, value)


def without_tokens(_: object, attribute: attrs.Attribute, value: Any) -> None:
    """Checks that no text has a secret."""
    for path, text in texts(value):
        if known_token(text):
            raise ValueError(
                f"'{attribute.name}' has a value at {path} that looks like a secret; write its name into env"
            )
