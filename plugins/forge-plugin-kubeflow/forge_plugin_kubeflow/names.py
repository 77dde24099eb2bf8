"""What Kubernetes allows in names, quantities and paths: all of it before it is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

import attrs

from forge_plugin_launch.remote.paths import name_of
from forge_plugin_launch.remote.secret_values import is_secret, known_token

POD_SUFFIX = "-node-0-{last}-abcde"
"""What JobSet adds to the name of a TrainJob for its pods; a label of DNS, such as a pod's name, has 63 characters."""
ALLOWED = "abcdefghijklmnopqrstuvwxyz0123456789-"
LABEL = 63
SUBDOMAIN = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|m|k|M|G|T|P|E|[eE][+-]?\d+)?")
"""The grammar of `resource.Quantity`, without signs: no resource is less than nothing."""
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
"""Variables that Trainer's torch policy sets, and refuses from others."""
JOB_FOLDER = "/forge-run/job"
"""Working directory of the command, where the job's files are."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108  # of the container
TAKEN = (JOB_FOLDER, SHARED_MEMORY)
"""Paths in the container at which something is mounted already."""


def object_name(run: str, nodes: int) -> str:
    """Returns the name of a run's objects: `job.name` itself where Kubernetes allows it, else a similar one."""
    # TrainJob wants a letter first, unlike most objects
    return name_of(run, ALLOWED, LABEL - len(POD_SUFFIX.format(last=nodes - 1)), "run-")


# --- validators of keys ---------------------------------------------------------------------------------------------


def optional_label(_: object, attribute: attrs.Attribute, value: str) -> None:
    """A namespace, a queue, a priority class: a label of DNS, or nothing."""
    if value and not (_LABEL.fullmatch(value) and len(value) <= LABEL):
        raise ValueError(
            f"'{attribute.name}' must be a name of Kubernetes (lower-case letters, digits and -, at most {LABEL} "
            f"characters, such as 'team-a'), got {value!r}"
        )


def optional_subdomain(_: object, attribute: attrs.Attribute, value: str) -> None:
    """A runtime, a service account: labels of DNS with dots between them, or nothing."""
    if value and not _is_subdomain(value):
        raise ValueError(
            f"'{attribute.name}' must be a name of Kubernetes (lower-case letters, digits, - and .), got {value!r}"
        )


def subdomains(_: object, attribute: attrs.Attribute, value: tuple[str, ...]) -> None:
    """Several names of objects."""
    for name in value:
        if not _is_subdomain(name):
            raise ValueError(
                f"'{attribute.name}' has {name!r}, which is no name of Kubernetes (lower-case letters, digits, - and .)"
            )


def an_image(_: object, __: attrs.Attribute, value: str) -> None:
    """An image by its reference. Registries check the rest."""
    if not value or len(value) > 500 or any(character.isspace() for character in value):
        raise ValueError(f"'image' must be the image of a container, such as 'ghcr.io/team/forge:1.2', got {value!r}")


def resource_name(_: object, attribute: attrs.Attribute, value: str) -> None:
    """A resource of nodes: `cpu`, `nvidia.com/gpu`."""
    if not _is_qualified(value):
        raise ValueError(f"'{attribute.name}' must be a resource, such as 'nvidia.com/gpu', got {value!r}")


def quantities(_: object, attribute: attrs.Attribute, value: Mapping[str, str | int]) -> None:
    """Quantities by resource."""
    for name, quantity in value.items():
        if not _is_qualified(name):
            raise ValueError(f"'{attribute.name}' has {name!r}, which is no resource, such as cpu or 'rdma/hca'")
        if not _QUANTITY.fullmatch(str(quantity)):
            raise ValueError(
                f"'{attribute.name}' has {name} = {quantity!r}, which is no quantity of Kubernetes, such as 32, "
                "'500m' or '256Gi'"
            )


def node_labels(_: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    """Labels of nodes, by which they are selected."""
    for name, text in value.items():
        if not _is_qualified(name) or (text and not (_QUALIFIED.fullmatch(text) and len(text) <= LABEL)):
            raise ValueError(f"'{attribute.name}' has {name} = {text!r}, which is no label of Kubernetes")


def mounts(_: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    """Mount paths by claims."""
    for claim, path in value.items():
        if not _is_subdomain(claim):
            raise ValueError(f"'{attribute.name}' has {claim!r}, which is no name of a PersistentVolumeClaim")
        place = PurePosixPath(path)
        if not place.is_absolute() or ":" in path or ".." in place.parts or place == PurePosixPath("/"):
            raise ValueError(
                f"'{attribute.name}' has {claim} = {path!r}, where the path at which it is mounted must be absolute, "
                "such as '/mnt/runs'"
            )
        if any(place.is_relative_to(taken) or PurePosixPath(taken).is_relative_to(place) for taken in TAKEN):
            raise ValueError(f"'{attribute.name}' has {claim} = {path!r}, where {' and '.join(TAKEN)} are taken")
    if len(paths := list(value.values())) > len({PurePosixPath(path) for path in paths}):
        raise ValueError(f"'{attribute.name}' has two claims at one path: {', '.join(paths)}")


def variables(_: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    """Variables by name, none of which has a secret."""
    for name, text in value.items():
        _variable_name(attribute.name, name)
        if is_secret(name, text):
            # Without the value, since this text is printed
            raise ValueError(
                f"'{attribute.name}' has a value for {name} that looks like a secret; keep it in a Secret of the "
                f'cluster, and name that: secrets.{name} = "NAME/KEY"'
            )


def secret_references(_: object, attribute: attrs.Attribute, value: Mapping[str, str]) -> None:
    """`SECRET/KEY` by variable."""
    for name, text in value.items():
        _variable_name(attribute.name, name)
        secret, _, key = text.partition("/")
        if not (_is_subdomain(secret) and _SECRET_KEY.fullmatch(key)) or known_token(text):
            # What was written may be the secret itself
            raise ValueError(
                f"'{attribute.name}' must have the name and the key of a Secret for {name}, such as "
                "'wandb/api-key', and never the secret itself"
            )


def _variable_name(key: str, name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"'{key}' has {name!r}, which is no name of a variable (letters, digits and _)")
    if name in RESERVED:
        raise ValueError(f"'{key}' has {name}, which Kubeflow Trainer sets itself")


def _is_subdomain(text: str) -> bool:
    return len(text) <= SUBDOMAIN and _SUBDOMAIN.fullmatch(text) is not None


def _is_qualified(name: str) -> bool:
    # `nvidia.com/gpu`: the part before the slash is a domain
    prefix, slash, plain = name.rpartition("/")
    return (
        (_is_subdomain(prefix) if slash else not prefix)
        and len(plain) <= LABEL
        and _QUALIFIED.fullmatch(plain) is not None
    )
