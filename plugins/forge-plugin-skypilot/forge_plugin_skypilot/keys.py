"""What keys of `[cluster]` may be, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from forge_core.contracts.errors import ExitCode
from forge_plugin_launch.remote.secret_values import is_secret, known_token, texts
from forge_plugin_launch.remote.yaml_text import at, merged, plain
from forge_plugin_skypilot.schema import VERSION, problem_of

OURS = {
    "name": "", "run": "", "num_nodes": "nodes", "workdir": "workdir", "setup": "setup", "envs": "envs",
    "secrets": "secrets", "file_mounts": "file_mounts", "volumes": "volumes", "resources.infra": "infra",
    "resources.accelerators": "accelerators", "resources.use_spot": "use_spot", "resources.image_id": "image_id",
    "resources.job_recovery": "job_recovery", "resources.any_of": "accelerators", "resources.ordered": "accelerators",
    "service": "", "pool": "",
}  # fmt: skip
"""Keys of a task that are keys of `[cluster]`, by which name; empty: `submit` sets them, or training has none."""
_ACCELERATOR = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)(?::([0-9]+))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SAVED = int(ExitCode.STOPPED)


def accelerators_of(value: str | tuple[str, ...]) -> list[tuple[str, int | None]]:
    """The accelerators that will do, each with its number where one is given.

    Raises:
        ValueError: one is not `NAME` or `NAME:COUNT`.
    """
    found = []
    # Empty: none are asked for
    for text in filter(None, [value] if isinstance(value, str) else value):
        match = _ACCELERATOR.fullmatch(text)
        if match is None or match[2] == "0":
            raise ValueError(f"'accelerators' has {text!r}, which is not NAME or NAME:COUNT, such as 'H100:8'")
        found.append((match[1], int(match[2]) if match[2] else None))
    return found


def an_infra(_: object, __: attrs.Attribute, value: str) -> None:
    """Checks a place by SkyPilot's schema."""
    if value and problem_of({"infra": value}, "resources"):
        example = "such as 'aws', 'gcp/us-central1', '*/us-east-1' or 'k8s/my-context'"
        raise ValueError(f"'infra' must be cloud[/region[/zone]] of SkyPilot, {example}, got {value!r}")


def some_accelerators(_: object, __: attrs.Attribute, value: str | tuple[str, ...]) -> None:
    """Checks accelerators: all of one number, as the run has as many ranks on each."""
    counts = {count for _, count in accelerators_of(value)}
    if len(counts) > 1:
        raise ValueError(
            f"'accelerators' has different numbers, got {value!r}: the run has as many ranks on each of them"
        )


def gpus(cluster: Any, _: attrs.Attribute, value: int) -> None:
    """Checks that `gpus_per_node` and `accelerators` do not contradict each other."""
    if value and not cluster.accelerators:
        raise ValueError("'gpus_per_node' needs cluster.accelerators, as SkyPilot goes by their name: \"H100:8\"")
    counts = {count for _, count in accelerators_of(cluster.accelerators) if count}
    if value and counts and counts != {value}:
        raise ValueError(
            f"'gpus_per_node' is {value}, and cluster.accelerators is {cluster.accelerators!r}; one is enough"
        )


def variables(_: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    """Checks variables, none of which may have a secret."""
    for name, text in value.items():
        _a_variable(attribute.name, name)
        if is_secret(name, text):
            # Without the value, since this text is printed
            raise ValueError(f"'envs' has a value for {name} that looks like a secret; write secrets = [\"{name}\"]")


def secret_names(cluster: Any, attribute: attrs.Attribute, value: tuple[str, ...]) -> None:
    """Checks names of secrets, where a value may have been written by mistake."""
    for name in value:
        if known_token(name) or "=" in name:
            raise ValueError("'secrets' has names of variables, and one of these looks like a value")
        _a_variable(attribute.name, name)
        if name in cluster.envs:
            raise ValueError(f"'secrets' has {name}, which is in envs too; leave it out there")


def _a_variable(key: str, name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"'{key}' has {name!r}, which is no name of a variable (letters, digits and _)")
    if name.startswith("SKYPILOT_"):
        raise ValueError(f"'{key}' has {name}, which SkyPilot sets itself")


def storages(_: object, attribute: attrs.Attribute, value: Mapping[str, Any]) -> None:
    """Checks copies and mounts by SkyPilot's schema."""
    for path, source in value.items():
        _a_mount_path(attribute.name, path)
        if problem := problem_of({path: plain(source)}, "file_mounts"):
            raise ValueError(f"'file_mounts' is none of SkyPilot's: {problem}")
        if isinstance(source, Mapping) and not (source.get("source") or source.get("name")):
            raise ValueError(f"'file_mounts' has {path} without a source = \"s3://…\" or the name of a bucket to make")
    _refuse_tokens(attribute.name, value)


def volumes(_: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    """Checks volumes of SkyPilot by the paths at which they are mounted."""
    for path, name in value.items():
        _a_mount_path(attribute.name, path)
        if not name:
            raise ValueError(f"'volumes' has no name for {path}; `sky volumes ls` lists them")


def _a_mount_path(key: str, path: str) -> None:
    if not path.startswith(("/", "~/")) or path.rstrip("/") in ("", "~") or ".." in path.split("/"):
        raise ValueError(f"'{key}' has the path {path!r}, which must be absolute, such as '/runs', or begin with ~/")


def recovery(_: object, __: attrs.Attribute, value: Mapping[str, Any]) -> None:
    """Checks when SkyPilot starts a run again; one that saved must be continued."""
    if problem := problem_of({"job_recovery": plain(value)}, "resources"):
        # The schema allows a text, too, so that its message is about both
        names = "strategy, max_restarts_on_errors, recover_on_exit_codes"
        raise ValueError(f"'job_recovery' must be as SkyPilot has it ({names}), got {dict(value)!r}: {problem}")
    codes = value.get("recover_on_exit_codes", SAVED)
    if SAVED not in (codes if isinstance(codes, list | tuple) else [codes]):
        raise ValueError(
            f"'job_recovery' has recover_on_exit_codes without {SAVED}, the exit code of a run that has saved: after a "
            f"preemption it would count as failed; write [{SAVED}]"
        )


def further(_: object, attribute: attrs.Attribute, value: Mapping[str, Any]) -> None:
    """Checks further keys of the task, by SkyPilot's schema; keys of `[cluster]` are refused."""
    for path, key in OURS.items():
        if at(value, path) is not None:
            instead = f"is the key {key}" if key else "belongs to forge-run submit, or is of no use to training"
            raise ValueError(f"'extra' has {path}, which {instead}")
    if problem := problem_of(plain(merged({"resources": {}}, value))):
        raise ValueError(f"'extra' is no part of a task of SkyPilot {VERSION}: {problem}")
    _refuse_tokens(attribute.name, value)


def _refuse_tokens(key: str, value: Any) -> None:
    for path in _with_tokens(value):
        raise ValueError(
            f"'{key}' has a value at {path} that looks like a secret; write the variable's name into secrets"
        )


def _with_tokens(value: Any) -> Iterator[str]:
    return (path for path, text in texts(value) if known_token(text))


def shell_lines(_: object, attribute: attrs.Attribute, value: tuple[str, ...]) -> None:
    """Checks that lines of shell have no secret."""
    _refuse_tokens(attribute.name, value)
