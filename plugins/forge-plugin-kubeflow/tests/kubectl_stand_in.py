"""A kubectl for tests, which keeps its objects in `objects.json` of the working directory.

It knows our commands and options and no others. With `refuse.txt` it refuses TrainJobs, in the words of a webhook.
YAML is imported where it is read only, as most commands get none and tests run many.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STORE = Path("objects.json")
Objects = dict[str, dict[str, Any]]


def main(words: list[str]) -> int:
    """Run a command on the objects of the store."""
    with Path("calls.txt").open("a") as file:
        print(*words, file=file)
    objects: Objects = json.loads(STORE.read_text()) if STORE.exists() else {}
    options = [word for word in words if word.startswith("--")]
    action, *names = [word for word in words if not word.startswith("--")]
    code = ACTIONS[action](objects, names, options)
    STORE.write_text(json.dumps(objects))
    return code


def create(objects: Objects, names: list[str], options: list[str]) -> int:
    """Make each document of standard input; one that fails does not keep the others from being made."""
    assert (names, options[-1:]) == ([], ["--filename=-"])
    import yaml

    code = 0
    for document in yaml.safe_load_all(sys.stdin):
        key = _key(document["kind"], document["metadata"]["name"])
        if document["kind"] == "TrainJob" and Path("refuse.txt").exists():
            print(Path("refuse.txt").read_text(), file=sys.stderr)
            code = 1
        elif key in objects:
            print(f'Error from server (AlreadyExists): "{key}" already exists', file=sys.stderr)
            code = 1
        else:
            objects[key] = document
    return code


def get(objects: Objects, names: list[str], options: list[str]) -> int:
    """Print objects, in a list unless a single one is named."""
    selected = [option.rpartition("=")[2] for option in options if option.startswith("--selector=")]
    if selected:
        found = [each for key, each in objects.items() if key.startswith("pod/") and _run(each) == selected[0]]
        print(json.dumps({"kind": "List", "items": found}))
        return 0
    keys = names if "/" in names[0] else [f"{names[0]}/{name}" for name in names[1:]]
    found = [objects[key] for key in keys if key in objects]
    if len(keys) == 1 and found:
        print(json.dumps(found[0]))
    elif found:
        print(json.dumps({"kind": "List", "items": found}))
    return 0


def delete(objects: Objects, names: list[str], options: list[str]) -> int:
    """Delete objects by kinds and name, or those of standard input."""
    if "--filename=-" in options:
        import yaml

        keys = [_key(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(sys.stdin)]
    else:
        keys = [f"{kind}/{names[1]}" for kind in names[0].split(",")]
    for key in keys:
        objects.pop(key, None)
    return 0


def logs(objects: Objects, names: list[str], options: list[str]) -> int:
    """Print what it was asked for."""
    print("asked for", *options, len(objects), *names)
    return 0


def _key(kind: str, name: str) -> str:
    return f"{kind.lower()}/{name}"


def _run(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"])


ACTIONS = {"create": create, "get": get, "delete": delete, "logs": logs}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
