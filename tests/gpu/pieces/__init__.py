"""The pieces; importing this registers all of them."""

from gpu.pieces import (  # noqa: F401
    attention,
    compiling,
    experts,
    float8,
    memory,
    numerics,
    optimizers,
    planning,
    profiling,
    recurrences,
    saving,
    training,
    waits,
    world,
)
