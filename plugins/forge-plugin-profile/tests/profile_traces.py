"""Synthetic traces with known answers, in the form that torch.profiler writes. Times in µs."""

from __future__ import annotations

from typing import Any

MAIN, AUTOGRAD, GLOO = 100, 101, 102
COMPUTE, COMMUNICATION = 7, 20
"""Streams."""
STEP = 1000.0
FACTS = {
    "first_step": 5,
    "recorded_steps": 2,
    "layer_flops": {"layers.0": 4e6, "layers.1": 1e6},
    "flops": 6e6,
    "peak_flops": 1e11,
    "peak_memory_gb": 2.5,
}


class Events:
    """Events of a trace; `at` is added to all times."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.at = 0.0
        self._launches = 0

    def host(self, name: str, start: float, end: float, thread: int = MAIN, cat: str = "cpu_op", **args: Any) -> None:
        span = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": self.at + start, "dur": end - start}
        self.all.append({**span, "args": {key.replace("_", " "): value for key, value in args.items()}})

    def mark(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.host(name, start, end, thread, "user_annotation")

    def kernel(
        self, name: str, launched: float, start: float, end: float, thread: int = MAIN, stream: int = COMPUTE
    ) -> None:
        self._launches += 1
        self.host("cudaLaunchKernel", launched, launched + 1, thread, "cuda_runtime", correlation=self._launches)
        args = {"device": 0, "context": 1, "stream": stream, "correlation": self._launches, "External id": 1}
        span = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": self.at + start}
        self.all.append({**span, "dur": end - start, "args": args})

    def content(self, facts: Any = FACTS, rank: int = 3) -> dict[str, Any]:
        info = {"backend": "nccl", "rank": rank, "world_size": 4}
        return {"traceEvents": self.all, "distributedInfo": info, "forge": facts}


def gpu_trace(slower: float = 0.0) -> dict[str, Any]:
    """Two steps of two layers on a GPU. The backward pass of layer 0 takes `slower` µs more than 140.

    Compute is from 150 to 450, 500 to 700 and 800 to 900; an all-gather, from 400 to 600, is not hidden for 50.
    """
    events = Events()
    for step in range(2):
        events.at, first = step * (STEP + slower), 10 * step
        events.mark(f"ProfilerStep#{5 + step}", 0, STEP + slower)
        events.mark("phase: data", 0, 100)
        events.mark("phase: forward and backward", 100, 700)
        events.mark("block: layers.0", 110, 200)
        events.mark("part: layers.0.ffn", 115, 190)
        shapes = {"Input_Dims": [[10, 20], [20, 50]], "Fwd_thread_id": 0}
        events.host("aten::mm", 120, 130, Sequence_number=first + 5, **shapes)
        events.kernel("gemm", 125, 150, 350)
        events.host("aten::to", 192, 193, Sequence_number=first + 6, Fwd_thread_id=0)  # has the number of the next node
        events.mark("block: layers.1", 200, 300)
        events.host("aten::mm", 205, 215, Sequence_number=first + 6, **shapes)
        events.kernel("gemm", 210, 350, 450)
        events.host("c10d::_allgather_base_", 220, 230)
        name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        events.kernel(name, 225, 400, 600, stream=COMMUNICATION)
        for number, (start, end, begins, ends) in enumerate([(320, 400, 500, 560), (400, 500, 560, 700 + slower)]):
            backward = {"Sequence_number": first + 6 - number, "Fwd_thread_id": 1}
            events.host("autograd::engine::evaluate_function: MmBackward0", start, end, AUTOGRAD, **backward)
            events.host("MmBackward0", start + 2, end - 2, AUTOGRAD, **backward)
            events.host("aten::mm", start + 5, start + 20, AUTOGRAD, **shapes)
            events.kernel("gemm", start + 10, begins, ends, AUTOGRAD)
        events.mark("phase: optimizer", 700, 950)
        events.host("aten::_fused_adamw_", 740, 760)
        events.kernel("multi_tensor_apply", 750, 800 + slower, 900 + slower)
    return events.content()


def cpu_trace() -> dict[str, Any]:
    """One step on a CPU: compute from 100 to 300, 500 to 600 and 660 to 665, gloo from 250 to 450, a wait to 500."""
    events = Events()
    events.mark("ProfilerStep#5", 0, STEP)
    events.mark("phase: forward and backward", 50, 700)
    events.mark("block: layers.0", 60, 320)
    events.host("aten::linear", 100, 300, Sequence_number=7, Fwd_thread_id=0)
    events.host("aten::mm", 120, 280, Sequence_number=7, Fwd_thread_id=0, Input_Dims=[[10, 20], [20, 50]])
    events.mark("gloo:all_gather", 250, 450, GLOO)
    events.host("aten::view", 260, 270, GLOO, Sequence_number=7, Fwd_thread_id=0)
    events.mark("gloo:reduce_scatter", 340, 400, GLOO + 1)
    backward = {"Sequence_number": 7, "Fwd_thread_id": 1}
    events.host("autograd::engine::evaluate_function: MmBackward0", 330, 610, **backward)
    events.host("aten::mm", 500, 600)
    events.host("autograd::engine::evaluate_function: ViewBackward0", 630, 650, **backward)
    events.host("aten::add", 660, 665)  # of the next micro-batch
    events.host("autograd::engine::evaluate_function: ViewBackward0", 680, 690, **backward)
    events.mark("block: layers.0", 800, 810)  # outside of any pass: none of the layer's time
    return events.content({**FACTS, "recorded_steps": 1, "peak_flops": None})
