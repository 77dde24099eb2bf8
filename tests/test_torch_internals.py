"""Private names of torch, which a new version may change without notice, stand in one module of each plugin."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from forge_kit.tools.forks import collector_paused
from forge_kit.torch_internals import FakeTensor, TorchDispatchMode

ROOT = Path(__file__).parents[1]
HOME = "torch_internals.py"
IN_THE_CORE = {
    "checkpoint/tensors.py": {"_create_chunk_list"},
    "engine/step.py": {"_foreach_mul_", "_foreach_norm", "_step_supports_amp_scaling"},
    "launch/watchdog.py": {"_C", "_distributed_c10d"},
    "parallel/initialise.py": {"_buffers", "_parameters"},
    "parallel/mesh.py": {"_foreach_copy_", "_set_pg_timeout"},
}
"""Private names that the core uses, by file; it has no module for so few. `core/test_torch_internals.py` tests each."""
ASKS = {"getattr", "hasattr", "setattr", "delattr", "patch.object", "monkeypatch.setattr"}
"""Functions that are given the name of an attribute, after its owner."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


OBJECTS = (
    nn.Module(),
    torch.empty(0),
    torch.UntypedStorage(0),
    torch.ops.aten.add,
    torch.ops.aten.add.Tensor,
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True),
    DataLoader([]),
    *(torch.autograd.Function, DeviceMesh, DTensor, FakeTensor, FSDPModule, TorchDispatchMode, TorchFunctionMode),
    *(pipelining.PipelineStage, pipelining.Schedule1F1B, torch.distributed.ProcessGroup),
)
"""What Forge holds of torch's, with all attributes that code could reach for."""
NAMES = frozenset(name for each in OBJECTS for name in dir(each) if is_private(name)) - {"_replace", "_fields"}


class Source:
    """A file, with the names in it that mean something of torch's."""

    def __init__(self, code: str) -> None:
        self._tree = ast.parse(code)

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """Names that the file imports, each with its full name."""
        names = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                names |= {each.asname: each.name for each in node.names if each.asname}
                names |= {first: first for each in node.names if not each.asname for first in [each.name.split(".")[0]]}
            elif isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return names

    @cached_property
    def of_torch(self) -> frozenset[str]:
        """Names of modules and objects of torch, those that an assignment gives to one included."""
        names = {name for name, target in self.imports.items() if target.partition(".")[0] == "torch"}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute | ast.Name):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if root(node.value) in names:
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
        return frozenset(names)

    def private_names(self) -> Iterator[tuple[int, str]]:
        """Lines with a private name of torch, and the name."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                yield from ((node.lineno, name) for name in names if is_of_torch(name) and has_private(name))
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from ((node.lineno, name) for name in names if is_of_torch(name) and has_private(name))
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and self._reaches(node):
                yield node.lineno, ast.unparse(node)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ASKS:
                asked = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
                asked = [name for name in map(str, asked) if is_private(name)]
                yield from ((node.lineno, n) for n in asked if n in NAMES or root(node.args[0]) in self.of_torch)
            elif isinstance(node, ast.ClassDef):
                yield from self._of_class(node)

    def _reaches(self, node: ast.Attribute) -> bool:
        owner = ast.unparse(node.value)
        return owner not in ("self", "cls", "super()") and (root(node) in self.of_torch or node.attr in NAMES)

    def _of_class(self, node: ast.ClassDef) -> Iterator[tuple[int, str]]:
        """Names that a class overrides or calls in a base that is of torch."""
        used = {(each.lineno, each.name) for each in node.body if isinstance(each, ast.FunctionDef)}
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and ast.unparse(each.value) in ("self", "cls", "super()"):
                used.add((each.lineno, each.attr))
        if used := {(line, name) for line, name in used if name in NAMES}:
            bases = [base for name in map(ast.unparse, node.bases) for base in self._classes(name)]
            yield from ((line, name) for line, name in sorted(used) if any(defines(base, name) for base in bases))

    def _classes(self, name: str) -> Iterator[Any]:
        """The class of this name, and its bases, as far as the file imports them."""
        first, _, rest = name.partition(".")
        if first in self.imports:
            module, _, last = f"{self.imports[first]}.{rest}".rstrip(".").rpartition(".")
            yield from getattr(import_module(module), last).__mro__
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                for base in map(ast.unparse, node.bases):
                    yield from self._classes(base)


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_of_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def has_private(name: str) -> bool:
    return any(map(is_private, name.split(".")))


def defines(base: type, name: str) -> bool:
    """Whether a class of torch has this name, on itself or, as `_buffers` of a module, on its objects."""
    names = set(vars(base)) | (set(vars(nn.Module())) if base is nn.Module else set())
    return is_of_torch(base.__module__) and name in names


def is_listed(path: Path, name: str) -> bool:
    allowed = (
        IN_THE_CORE.get(str(path.relative_to(ROOT / "forge_core")), set()) if "forge_core" in path.parts else set()
    )
    return name.rpartition(".")[2] in allowed


def sources() -> Iterator[Path]:
    for folder in (ROOT / "forge_core", *(ROOT / "plugins").glob("*/forge_*")):
        yield from (path for path in folder.rglob("*.py") if path.name != HOME)


def test_they_stand_in_one_module_of_each_plugin_and_are_listed_for_the_core():
    with collector_paused():  # a third of the time otherwise, for cycles within syntax trees
        found = [
            f"{path.relative_to(ROOT)}:{line} {name} belongs into the package's {HOME}, or the kit's"
            for path in sources()
            for line, name in Source(path.read_text()).private_names()
            if not is_listed(path, name)
        ]
    assert found == []


def test_what_is_listed_for_the_core_is_there():
    for name, names in IN_THE_CORE.items():
        found = {
            each.rpartition(".")[2] for _, each in Source((ROOT / "forge_core" / name).read_text()).private_names()
        }
        assert found == names, name


def test_each_of_these_modules_has_a_test_that_names_what_torch_has_changed():
    homes = list(ROOT.glob(f"plugins/*/forge_*/{HOME}"))
    assert len(homes) > 5
    tests = [path.parents[1] / "tests" / f"test_{HOME}" for path in homes]
    tests.append(ROOT / "tests" / "core" / f"test_{HOME}")
    assert [str(path) for path in tests if not path.exists()] == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._guards import detect_fake_mode", "torch._guards.detect_fake_mode"),
        ("from torch.nn.modules.dropout import _DropoutNd", "torch.nn.modules.dropout._DropoutNd"),
        ("import torch\ntorch._foreach_mul_(a, 2)", "torch._foreach_mul_"),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._set_pg_timeout",
            "dist.distributed_c10d._set_pg_timeout",
        ),
        ("import torch\naten = torch.ops.aten\naten._grouped_mm", "aten._grouped_mm"),
        ("model.layers[0]._parameters", "model.layers[0]._parameters"),
        ("getattr(tensor, '_is_view')", "_is_view"),
        ("from torch import nn\nclass A(nn.Module):\n  def f(self):\n    self._buffers", "_buffers"),
        (
            "import torch.distributed.pipelining as p\nclass A(p.PipelineStage):\n  def _check_chunk_id(self): ...",
            "_check_chunk_id",
        ),
        ("from torch import nn\nclass A(nn.Module): ...\nclass B(A):\n  def _call_impl(self): ...", "_call_impl"),
    ],
)
def test_a_private_name_is_found(code, name):
    assert [found for _, found in Source(code).private_names()] == [name]


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.ops.aten.mm.default",
        "class Scratch:\n  def __init__(self):\n    self._buffers = {}",
        "row._replace(length=2)",
        "os._exit(1)",
        "from torch import nn\nclass A(nn.Module):\n  def f(self):\n    return self._mine",
        "import numpy._core",
    ],
)
def test_other_names_are_left_alone(code):
    assert list(Source(code).private_names()) == []
