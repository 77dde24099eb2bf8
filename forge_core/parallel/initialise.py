"""A job's model: bare on the meta device, and its seeded initial values, which do not depend on the layout."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_core.contracts.layout import Layout
from forge_core.contracts.model import Initialises, Model, misspelt, with_defaults
from forge_core.contracts.optimizer import roles_of
from forge_core.devices import query_device
from forge_core.job import Job
from forge_core.parallel.mesh import local_part
from forge_core.parallel.stages import model_problems
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import Plugins, RunContext

MEMINFO = Path("/proc/meminfo")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""The dtype of each `train.precision`."""


def bare_model(job: Job, context: BuildContext) -> Model:
    """The whole model on the meta device, in the dtypes of training and before any stage.

    Raises a `JobError` if the model does not derive from `Model`, or if one of its methods is a misspelt method of it.
    """
    with torch.device("meta"):
        model = context.build(job.model)
    cls, base = f"{type(model).__module__}.{type(model).__qualname__}", "forge_core.contracts.model.Model"
    if not isinstance(model, Model):
        raise JobError.at("model", f"builds a {cls}, which does not derive from {base}; derive it from that")
    if names := next(misspelt(model), None):
        # It would never be called, and the default would be used in silence.
        raise JobError.at(
            "model",
            f"{cls} has {names[0]!r}, which {base} has not; "
            f"did you mean {names[1]!r}? If another method is meant, start its name with an underscore",
        )
    model.batch_fields = job.model.batch_fields(job)
    if context.dtype == torch.float64:
        model.double()
    elif job.optimizer.parameter_dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model


def fitting_problems(job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    """Problems of stages and the optimizer with the model, or of the model itself; no data are read.

    None where only the data show what the model needs to know of the tokenizer: the run then raises them.
    """
    size = job.data.tokenizer.expected_vocab_size() if job.data.tokenizer else None
    tokenizer = cast("Tokenizer", _TokenizerToBe(size)) if size else None
    refused: list[list[Problem]] = []
    # With "auto", the run chooses the device: a model is refused here only for problems that occur on both.
    # Where one asks, there may be no accelerator: the one that most runs have is assumed.
    for device in ("cuda", "cpu") if job.train.device == "auto" else (job.train.device,):
        try:
            model = bare_model(job, bare_context(job, layout, catalog, torch.device(device), tokenizer))
            roles_of(model)  # a wrong declaration is a problem of the model, like one that shows while it is built
        except _NotKnownYet:
            return []
        except JobError as error:
            refused.append(list(error.problems))
        except ForgeError as error:
            refused.append([Problem("model", str(error))])
        except Exception as error:
            message = f"building it failed: {type(error).__name__}: {error}"
            refused.append([Problem("model", f"{message}; a model is built on the meta device, without other ranks")])
        else:
            return list(model_problems(model, job, job.parallel, layout))
    if job.data.tokenizer is not None and tokenizer is None:
        return []
    return [problem for problem in refused[0] if all(problem in others for others in refused)]


class _NotKnownYet(Exception):
    """The model asked something of a tokenizer that is not there yet."""


class _TokenizerToBe:
    """Stands in for the tokenizer that a run will have: its size is known before it is trained or loaded."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        raise _NotKnownYet(name)


def bare_context(
    job: Job, layout: Layout, catalog: Catalog, device: torch.device, tokenizer: Tokenizer | None = None
) -> RunContext:
    """A context without a mesh: no process group is needed to look at a job."""
    return RunContext(
        job=job,
        plugins=Plugins(job.plugins, catalog),
        layout=layout,
        mesh=None,
        device=device,
        dtype=DTYPES[job.train.precision],
        auxiliary=Auxiliary(torch.device("cpu")),
        tokenizer=tokenizer,
    )


# A parameter is drawn in fixed blocks along dimension 0, each by a separate generator, seeded from (seed, parameter
# name, block). A rank draws the blocks that it holds, so that values depend on neither the layout nor the order of
# modules, and a module that is added changes no other.
BLOCK = 2**20
"""Elements of a block at most, for matrices; one matrix of a stack is one block whatever its size."""


class SeededFill:
    """Fills one parameter; see `forge_core.contracts.model.Fill`."""

    def __init__(self, parameter: Tensor, name: str, seed: int, device: torch.device | None = None) -> None:
        # A scalar is drawn as one row
        self._parameter, self._name, self._seed = torch.atleast_1d(parameter), name, seed
        # A generator of another device draws other numbers: parameters kept on the host are drawn on the run's device.
        self._device = device or parameter.device

    def normal(self, std: float, mean: float = 0.0) -> None:
        self._draw(lambda block, generator: block.normal_(mean, std, generator=generator))

    def trunc_normal(self, std: float, bound: float = 3.0) -> None:
        self._draw(lambda b, g: nn.init.trunc_normal_(b, 0.0, std, -bound * std, bound * std, generator=g))

    def uniform(self, low: float, high: float) -> None:
        self._draw(lambda block, generator: block.uniform_(low, high, generator=generator))

    def constant(self, value: float) -> None:
        with torch.no_grad():
            self._parameter.fill_(value)

    def copy(self, whole: Tensor) -> None:
        """Take this rank's part of `whole`."""
        for local, start, stop, rest in _local_rows(self._parameter):
            local.copy_(torch.atleast_1d(whole)[start:stop][rest])

    @torch.no_grad()
    def _draw(self, fill: Callable[[Tensor, torch.Generator], Any]) -> None:
        whole_shape = self._parameter.shape
        rows = 1 if len(whole_shape) > 2 else max(1, BLOCK // max(1, whole_shape[1:].numel()))
        for local, start, stop, rest in _local_rows(self._parameter):
            for block in range(start // rows, -(-stop // rows)):
                first, last = block * rows, min((block + 1) * rows, whole_shape[0])
                # The whole block, also where this rank holds a part of its rows or columns, and in float32 whatever the
                # parameter's dtype: other shapes and dtypes would draw other numbers.
                drawn = torch.empty((last - first, *whole_shape[1:]), dtype=torch.float32, device=self._device)
                fill(drawn, torch.Generator(self._device).manual_seed(seed_of(f"{self._seed}:{self._name}:{block}")))
                low, high = max(first, start), min(last, stop)
                local[low - start : high - start].copy_(drawn[low - first : high - first][rest])


def seed_of(key: str) -> int:
    """A seed made of a text; 63 bits, which every generator takes."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def _local_rows(parameter: Tensor) -> Iterator[tuple[Tensor, int, int, Any]]:
    """This rank's parts: (local tensor, first row, end row, slices of the whole's other dimensions)."""
    if not hasattr(parameter, "to_local"):
        yield parameter.data, 0, len(parameter), ...
        return
    tensor: Any = parameter  # a DTensor, which provides, for checkpoints, the place of its parts in the whole
    for chunk in tensor.__create_chunk_list__():
        first, *rest = (slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        yield tensor.to_local(), first.start, first.stop, (slice(None), *rest)


def materialise(model: Model, device: torch.device, seed: int, home: torch.device | None = None) -> None:
    """Give a model on the meta device memory on `device`, its parameters on `home`, and its initial values.

    A `ForgeError` names a parameter or buffer that was left uninitialised, and the module's class.
    """
    _check_memory(model, home or device)
    allocate(model, device, home)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # NaN, so that `check_finite` finds what no module initialises
            tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
    drawn: set[int] = set()  # a tied parameter is drawn once, under the name by which it is listed
    for module_name, module in model.named_modules():
        _initialise_module(module, module_name, device, seed, drawn)


def _check_memory(model: Model, device: torch.device) -> None:
    """Raise a `JobError` if weights and gradients alone do not fit: an allocator reports less, and Linux may kill."""
    own = [(local_part(each), each.requires_grad) for each in model.parameters()]
    needed = sum(part.nbytes + max(part.nbytes, 4 * part.numel()) * trained for part, trained in own)
    host = re.search(r"MemAvailable: *(\d+) kB", MEMINFO.read_text() if MEMINFO.exists() else "")
    on_host = (1024 * int(host[1]),) if host and device.type == "cpu" else (needed,)
    free, *_ = query_device(device, "mem_get_info") or on_host
    if needed > free:
        what = f"{sum(p.numel() for p, _ in own):,} parameters on this rank take {needed / 1e9:,.1f} GB with gradients"
        raise JobError.at("model", f"{what}, and {device} has {free / 1e9:,.1f} GB free; see `forge-run plan`")


def allocate(model: Model, device: torch.device, home: torch.device | None = None) -> None:
    """Give a model on the meta device memory on `device`, to its parameters on `home`; its values are arbitrary."""
    model.to_empty(device=home or device)
    for module in model.modules() if home is not None else ():
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(device)
    # `to_empty` makes a new parameter for each module that holds one; put tied ones together again.
    for other, name in ties(model).items():
        holder, _, key = other.rpartition(".")
        setattr(model.get_submodule(holder), key, model.get_parameter(name))
    for parameter in model.parameters():
        # Gradients of parameters in bfloat16 would else accumulate in it, and lose small ones.
        parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)


def ties(model: Model) -> Mapping[str, str]:
    """Other names of tied parameters of this rank, with the name under which each is listed."""
    own = {name for name, _ in model.named_parameters()}
    return {other: name for other, name in with_defaults(model).tied_parameters().items() if name in own}


def _initialise_module(module: nn.Module, name: str, device: torch.device, seed: int, drawn: set[int]) -> None:
    own = [pair for pair in module.named_parameters(recurse=False) if id(pair[1]) not in drawn]
    drawn |= {id(parameter) for _, parameter in own}
    if isinstance(module, Initialises):
        for key, parameter in own:
            module.init_parameter(key, SeededFill(parameter, f"{name}.{key}" if name else key, seed, device))
        module.init_buffers(device)
    elif [*own, *module.buffers(recurse=False)]:
        _reset(module, name, own, device, seed)


def _reset(module: nn.Module, name: str, own: list[tuple[str, nn.Parameter]], device: torch.device, seed: int) -> None:
    """Initialise a module of torch's kind: its `reset_parameters` draws a whole copy, of which this rank has a part."""
    if getattr(module, "reset_parameters", None) is None:
        missing = ", ".join(key for key, _ in (*own, *module.named_buffers(recurse=False)))
        raise ForgeError(
            f"{type(module).__name__} ({name or 'the model'}) cannot initialise {missing}: implement "
            "init_parameter(name, fill) and init_buffers(device), see forge_core.contracts.model.Initialises"
        )
    whole = _whole_copy(module, device)
    # `reset_parameters` takes numbers from the default generators only, which are put back afterwards.
    with torch.random.fork_rng(devices=[device] if device.type != "cpu" else []), torch.no_grad():
        torch.manual_seed(seed_of(f"{seed}:{name}"))
        whole.reset_parameters()
        for key, parameter in own:
            SeededFill(parameter, key, seed, device).copy(getattr(whole, key))
        for key, buffer in module.named_buffers(recurse=False):
            buffer.copy_(getattr(whole, key))


def _whole_copy(module: nn.Module, device: torch.device) -> Any:
    """A copy of the module with its own whole parameters, in float32 or wider: values are float32 values, rounded."""
    # Not copy.copy: FSDP2 replaces the class by one whose __new__ calls the constructor, here without its arguments.
    whole: Any = object.__new__(type(module))
    whole.__dict__.update(module.__dict__)
    whole._parameters = dict(module._parameters)
    for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
        dtype = torch.promote_types(p.dtype, torch.float32)
        # NaN, so that `check_finite` finds what `reset_parameters` leaves out
        whole._parameters[key] = nn.Parameter(torch.full(p.shape, torch.nan, dtype=dtype, device=device))
    whole._buffers = {key: b if b is None else b.clone() for key, b in module._buffers.items()}
    return whole


def check_finite(model: Model) -> None:
    """Raises ForgeError for what initialisation forgot: names the first parameter that is not finite, or NaN buffer."""
    for name, parameter in model.named_parameters():
        local = local_part(parameter)
        if local.numel() and not torch.isfinite(local.sum()):
            raise ForgeError(f"parameter {name} is not finite after initialisation")
    for name, buffer in model.named_buffers():
        if buffer.isnan().any():
            raise ForgeError(f"buffer {name} is NaN after initialisation: fill it in init_buffers or reset_parameters")
