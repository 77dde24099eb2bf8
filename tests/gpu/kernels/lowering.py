"""Inductor's code for a graph on a GPU that is not there, with what the graph launches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
from attrs import define, field, frozen
from torch import Tensor
from torch._dynamo.backends.registry import register_backend
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from forge_plugin_plan.kernels import FORMULAS
from gpu.kernels.machine_code import NAME

BACKEND = "table_of_kernels"
"""Name of the backend of `torch.compile` by which blocks are lowered and not run."""

_RUN = re.compile(r"^\s+(triton_\w+)\.run\(", re.MULTILINE)
_EXTERNAL = re.compile(r"\b(?:extern_kernels\.(\w+)|torch\.ops\.\w+\.(\w+)(?:\.\w+)?)\(")

_WRAPPED = re.compile(r"torch\.ops\.higher_order\.run_\w+_rng_state\((?:\w+, )?(torch\.ops\.[\w.]+), ")
"""Operations that may draw random numbers, where they are recomputed."""
_OWN = {kernel: shape_wrapper(formula) for kernel, formula in FORMULAS.items()}


@frozen
class Graph:
    """A graph that was lowered."""

    block: str
    """Name of the module."""
    backward: bool
    triton: dict[str, str]
    """Source of each Triton kernel, by its name."""
    launches: Sequence[str]
    """Names of the Triton kernels that a run launches, in order."""
    external: Sequence[str]
    """Calls of kernels that are not generated: of matrix products, attention …, in order."""
    products: float
    """FLOPs of the external kernels."""
    external_bytes: int
    """Bytes that external kernels read and write at least: of their tensors."""


@define
class Lowering:
    """The graphs of a block, as `torch.compile` passes them to the backend."""

    graphs: list[Graph] = field(factory=list)
    block: str = ""
    """The block that runs."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this context, `BACKEND` lowers graphs into this object."""
        with ExitStack() as stack:
            _ACTIVE.append(self)
            stack.callback(_ACTIVE.pop)
            # As `forge_plugin_compile` sets it; one process, since what a worker sees of the device is not replaced;
            # no caches, since a graph that is found in one is not generated; bytes are in the sources of kernels.
            settings = {"fallback_random": True, "compile_threads": 1, "profile_bandwidth": True}
            stack.enter_context(inductor.patch(**settings, force_disable_caches=True))
            yield

    def breaks(self) -> dict[str, int]:
        """Returns graph breaks by their reason, since `counters` were cleared."""
        return {str(reason).split("\n")[0]: times for reason, times in counters["graph_break"].items()}

    def compile(self, module: Any, inputs: Any) -> Any:
        """Lower a graph of a forward pass, and the one of its backward pass later."""
        # With the name of the block, which another has when its backward pass is lowered
        return compile_fx(module, inputs, inner_compile=partial(self._lower, self.block))

    def _lower(self, block: str, module: Any, inputs: Any, **settings: Any) -> Callable[[list[Any]], Any]:
        """Generates code for a graph; returns what stands for it on fake tensors: the graph itself."""
        kernels: dict[str, str] = {}
        texts: list[str] = []
        generate = GraphLowering.codegen

        def compile_kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> None:
            kernels[name] = source.replace(name, NAME)

        def codegen(graph: Any) -> Any:
            wrapper, kernel_code = generate(graph)
            texts.append(wrapper.value)
            return wrapper, kernel_code

        figures = [*_external(module)]
        with patch.object(AsyncCompile, "triton", compile_kernel), patch.object(GraphLowering, "codegen", codegen):
            compile_fx_inner(module, inputs, **settings)
        text = "".join(texts)
        body = _WRAPPED.sub(r"\1(", text[text.find("def call(") :])
        graph = Graph(
            block=block,
            backward=bool(settings.get("is_backward")),
            triton=kernels,
            launches=_RUN.findall(body),
            external=[first or second for first, second in _EXTERNAL.findall(body)],
            products=sum(flops for flops, _ in figures),
            external_bytes=sum(size for _, size in figures),
        )
        self.graphs.append(graph)

        def run(arguments: list[Any]) -> Any:
            result = module.forward(*arguments)
            arguments.clear()
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _external(module: Any) -> Iterator[tuple[float, int]]:
    """Yields FLOPs and bytes of each operation of a graph that has FLOPs."""
    for node in module.graph.nodes:
        operation, args, out = _unwrapped(node)
        packet = getattr(operation, "overloadpacket", None)
        formula = _OWN.get(packet) or flop_registry.get(packet)
        if formula is None:
            continue
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda each: each.meta.get("val"))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        # torch's formulas for attention count all pairs of positions
        share = 0.5 if _is_causal(operation, args, kwargs) else 1.0
        yield share * formula(*args, **kwargs, out_val=out), sum(_bytes(tensor) for tensor in tensors)


def _unwrapped(node: Any) -> tuple[Any, Sequence[Any], Any]:
    """Returns the operation of a node, its arguments and its result, as fake tensors."""
    args, out = torch.fx.node.map_arg((node.args, node), lambda each: each.meta.get("val"))
    name = getattr(node.target, "__name__", "")
    # Recomputed operations that draw random numbers are the argument of one that keeps the generator's state
    if name == "run_and_save_rng_state":
        return args[0], args[1:], None  # torch does not keep its result's shape, and attention's formula needs none
    if name == "run_with_rng_state":
        return args[1], args[2:], out
    return node.target, args, out


def _is_causal(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in operation._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False))


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


_ACTIVE: list[Lowering] = []


@register_backend(name=BACKEND)
def _backend(module: Any, inputs: Any, **_: Any) -> Any:
    return _ACTIVE[-1].compile(module, inputs)
