"""CUDA in name: what a torch without CUDA needs before Inductor generates code for a GPU that is not there.

Everything private to torch and Triton that the table of kernels uses is in this file, each with the reason. `register`
must be called before torch is imported, `as_gpu` is a context afterwards. Nothing runs on the device: tensors are fake.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

SOURCE = Path(__file__).with_name("device.cpp")

Properties = Mapping[str, Any]

COMMON: Properties = {
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "warp_size": 32,
    "shared_memory_per_block": 48 << 10,
    "is_integrated": 0,
    "gcnArchName": "",
    "uuid": "0",
    "pci_bus_id": 0,
}
GPUS: Mapping[str, Properties] = {
    "sm_80": {
        "name": "NVIDIA A100-SXM4-80GB",
        "major": 8,
        "minor": 0,
        "total_memory": 80 << 30,
        "multi_processor_count": 108,
        "shared_memory_per_block_optin": 163 << 10,
        "shared_memory_per_multiprocessor": 164 << 10,
        "L2_cache_size": 40 << 20,
    },
    "sm_90": {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "minor": 0,
        "total_memory": 80 << 30,
        "multi_processor_count": 132,
        "shared_memory_per_block_optin": 227 << 10,
        "shared_memory_per_multiprocessor": 228 << 10,
        "L2_cache_size": 50 << 20,
    },
    "sm_100": {
        "name": "NVIDIA B200",
        "major": 10,
        "minor": 0,
        "total_memory": 180 << 30,
        "multi_processor_count": 148,
        "shared_memory_per_block_optin": 227 << 10,
        "shared_memory_per_multiprocessor": 228 << 10,
        "L2_cache_size": 126 << 20,
    },
}
"""What `torch.cuda.get_device_properties` returns on a GPU of each architecture; Inductor chooses block sizes by it."""


def register(cache: Path) -> None:
    """Register the device with torch's C++ parts; takes some seconds the first time, for a C++ compiler.

    Args:
        cache: folder for the compiled library.

    Raises:
        RuntimeError: torch was imported before, or has CUDA of its own.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch asks for CUDA's hooks once, at its import; the device must be registered before")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError("this torch has CUDA, which cannot be replaced; the table needs a build for CPUs alone")
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    library = cache / f"named_cuda-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / library.name
            command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch}/include", str(SOURCE)]
            subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-o", str(made)], check=True)
            made.rename(library)
    for each in (torch / "lib" / "libc10.so", torch / "lib" / "libtorch_cpu.so", library):
        ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def as_gpu(arch: str) -> Iterator[None]:
    """Within this context, torch and Inductor take this machine for one with a GPU of `arch`."""
    import torch
    import triton

    with ExitStack() as stack:
        # Triton's own driver needs libcuda.so; of an active one, only the target is asked for
        stack.enter_context(patch.object(triton.runtime.driver, "_active", TritonDriver(arch)))
        for target, value in _replaced(arch):
            owner, _, name = target.rpartition(".")
            stack.enter_context(patch(f"{owner}.{name}", value, create=name == "_cuda_getCurrentRawStream"))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        # Constants are folded in tensors of one number, of which only that number is used: they live on the host.
        library.impl("empty.memory_format", _on_host(torch.empty, 1), "CUDA")
        library.impl("empty_strided", _on_host(torch.empty_strided, 2), "CUDA")
        yield


class TritonDriver:
    """What Inductor asks Triton's driver for."""

    def __init__(self, arch: str) -> None:
        self._arch = int(arch.removeprefix("sm_"))

    def get_current_target(self) -> Any:
        """Returns the architecture."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, COMMON["warp_size"])

    def get_current_device(self) -> int:
        """Returns the number of the device."""
        return 0


def _on_host(make: Callable[..., Any], positional: int) -> Callable[..., Any]:
    def on_host(*args: Any, dtype: Any = None, **_: Any) -> Any:
        return make(*args[:positional], dtype=dtype or (args[positional] if len(args) > positional else None))

    return on_host


def _replaced(arch: str) -> Iterator[tuple[str, Any]]:
    """Yields names of torch, and what takes their place."""
    import torch
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad

    properties = SimpleNamespace(**COMMON, **GPUS[arch])
    capability = (properties.major, properties.minor)
    # What Python sees of the device
    yield "torch.cuda.is_available", lambda: True
    yield "torch.cuda.device_count", lambda: 1
    yield "torch.cuda.current_device", lambda: 0
    yield "torch.cuda.set_device", lambda device: None
    yield "torch.cuda.synchronize", lambda device=None: None
    yield "torch.cuda.get_device_properties", lambda device=None: properties
    yield "torch.cuda.get_device_capability", lambda device=None: capability
    yield "torch.cuda.mem_get_info", lambda device=None: (properties.total_memory, properties.total_memory)
    yield "torch.version.cuda", "12.8"
    # `torch.tensor(..., device="cuda")` makes a fake tensor of one on the host, and not one of the device
    yield "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init", True
    # `with torch.cuda.device(...)` around compilation, and the initialisation of a context, which there is not
    yield "torch.cuda._lazy_init", lambda: None
    yield "torch.cuda._exchange_device", lambda index: 0
    yield "torch.cuda._maybe_exchange_device", lambda index: 0
    # Dynamo saves the generator's state around each graph; there is none
    yield "torch.cuda.get_rng_state", lambda device=0: torch.zeros(16, dtype=torch.uint8)
    yield "torch.cuda.set_rng_state", lambda state, device=0: None
    # What Inductor sees of the device: it keeps copies of the functions above
    interface = "torch._dynamo.device_interface.CudaInterface"
    yield f"{interface}.is_available", staticmethod(lambda: True)
    yield f"{interface}.current_device", staticmethod(lambda: 0)
    yield f"{interface}.get_raw_stream", staticmethod(lambda device=0: 0)
    yield f"{interface}.get_device_properties", staticmethod(lambda device=None: properties)
    yield f"{interface}.get_compute_capability", staticmethod(lambda device=None: 10 * capability[0] + capability[1])
    yield f"{interface}.is_triton_capable", staticmethod(lambda device=None: True)
    yield f"{interface}.raise_if_triton_unavailable", staticmethod(lambda device=None: None)
    yield f"{interface}.Worker.current_device", staticmethod(lambda: 0)
    yield f"{interface}.Worker.get_device_properties", staticmethod(lambda device=None: properties)
    # Generated kernels put Triton's own driver in the place of the active one
    yield "torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None
    # Generated modules import it, and never call it here
    yield "torch._C._cuda_getCurrentRawStream", lambda device: 0
    # Patterns are traced on example inputs, real tensors, once; they match on any device
    for module in (joint_graph, post_grad):
        yield f"{module.__name__}.lazy_init", _on_cpu(module.lazy_init)


def _on_cpu(initialise: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return lambda input_device=None: initialise(torch.device("cpu"))
