"""Everything a run must remember, to and from a checkpoint.

Tensors are `model.<parameter or buffer>`, `optimizer.<parameter>.<slot>` and, where an optimizer evaluates other
weights than it trains, `evaluation.<parameter>`; all else is plain types in the manifest.
Hyper-parameters come from the job, never from a checkpoint. Randomness inside a step is seeded from (seed, step), so no
generator's state needs keeping.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, define, field
from torch import Tensor, nn

from forge_core.checkpoint.manager import State
from forge_core.checkpoint.tensors import load_tensors, shared_index
from forge_core.contracts.components import Plugin, TrainingHook, state_fields
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.optimizer import HasEvaluationWeights, PlacesState
from forge_core.parallel.initialise import ties
from forge_core.parallel.mesh import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from forge_core.contracts.model import Model


MODEL = "model."
"""Starts the name of every parameter and persistent buffer in a checkpoint."""
EVALUATION = "evaluation."
"""Starts the names of parameters as they are evaluated, where they are trained otherwise."""


@define(kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Completed steps, skipped updates included."""
    tokens: int = 0
    """Positions fed to the model so far, over all ranks."""
    skipped: int = 0
    """Updates that were skipped."""
    skipped_in_a_row: int = 0
    schedule: float | None = None
    """Factor of the schedule for the last update; None before the first."""
    samples: dict[str, Any] = field(factory=dict)
    """Where the order of samples is (see `SampleOrder.state`); empty before the first."""


def model_tensors(model: Model) -> dict[str, Tensor]:
    """Parameters and persistent buffers, tied ones once."""
    assert isinstance(model, nn.Module)
    other_names = ties(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in other_names}


def gather_state(
    model: Model,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    hooks: Mapping[str, TrainingHook],
    plugins: Mapping[str, Plugin],
    pipeline: ProcessGroup | None = None,
) -> State:
    """The state to save. Reads only: a save, at any step, changes nothing.

    Args:
        pipeline: the ranks that hold different layers. Collective over them.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    evaluated = optimizer.evaluation_weights() if isinstance(optimizer, HasEvaluationWeights) else {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(optimizer):
        if parameter in evaluated:
            tensors[EVALUATION + name] = evaluated[parameter]
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{slot}"] = value
            else:
                scalars.setdefault(name, {})[slot] = value
    if pipeline is not None:
        scalars = {name: slots for part in gather_objects(scalars, pipeline) for name, slots in part.items()}
    extras: dict[str, dict[str, Any]] = {}
    for owner, holder in holders(hooks, plugins):
        plain, held = _split(holder.state_dict())
        extras[owner] = plain
        tensors |= {f"{owner}.{name}": tensor for name, tensor in held.items()}
    values = {
        "progress": asdict(progress),
        "optimizer": {"scalars": scalars, "groups": _group_state(optimizer)},
        "extras": extras,
    }
    return State(tensors, values)


def restore_state(
    folder: Path,
    manifest: Mapping[str, Any],
    model: Model,
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, TrainingHook | Plugin],
    trained: Collection[str],
) -> Progress:
    """Load a checkpoint into a freshly built run; returns its progress. Collective.

    Args:
        trained: names of the parameters of the whole model, of which `model` may be a part.
        own: the run's `holders`. Those of which the checkpoint has nothing are left as they are.

    Raises:
        CheckpointError: the checkpoint does not fit the job.
    """
    index = shared_index(folder)
    stored = index.shapes
    slots = _empty_slots(optimizer, stored, trained)
    held = {owner: _empty_held(owner, stored) for owner in own if owner in manifest["extras"]}
    tensors = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    tensors |= {f"optimizer.{name}.{slot}": tensor for (name, slot), tensor in slots.items()}
    tensors |= {f"{owner}.{name}": tensor for owner, held_ in held.items() for name, tensor in held_.items()}
    evaluated = _empty_evaluated(optimizer, stored)
    tensors |= {EVALUATION + name: tensor for name, (_, tensor) in evaluated.items()}
    load_tensors(folder, tensors, index)
    # Only now, into the optimizer itself: to step a fresh one for its state, as torch does, would change the training
    _fill_optimizer(optimizer, slots, manifest["optimizer"])
    if isinstance(optimizer, HasEvaluationWeights) and evaluated:
        optimizer.load_evaluation_weights(dict(evaluated.values()))
    for owner, tensors_ in held.items():
        own[owner].load_state_dict({**manifest["extras"][owner], **tensors_})
    return Progress(**manifest["progress"])


def load_model(folder: Path, model: Model) -> None:
    """Only the weights of a checkpoint, as they are evaluated."""
    index = shared_index(folder)
    where = evaluated_names(index.shapes)
    tensors = {where.get(name, MODEL + name): tensor for name, tensor in model_tensors(model).items()}
    load_tensors(folder, tensors, index)


def evaluated_names(stored: Iterable[str]) -> dict[str, str]:
    """Name of each parameter and buffer in the model -> that of its weights for evaluation in a checkpoint, which are
    those that are trained where there are no others."""
    trained = {name.removeprefix(MODEL): name for name in stored if name.startswith(MODEL)}
    others = {name.removeprefix(EVALUATION): name for name in stored if name.startswith(EVALUATION)}
    return trained | others


def holders(
    hooks: Mapping[str, TrainingHook], plugins: Mapping[str, Plugin]
) -> Iterator[tuple[str, TrainingHook | Plugin]]:
    """Hooks and plugins, which may have state too, each under its name in a checkpoint."""
    yield from ((f"hook:{name}", hook) for name, hook in hooks.items())
    yield from ((f"plugin:{name}", plugin) for name, plugin in plugins.items())


def has_state(holder: TrainingHook | Plugin) -> bool:
    """Whether a hook or plugin remembers anything: it has state fields, or a way of its own to save them."""
    base = next(cls for cls in (TrainingHook, Plugin) if isinstance(holder, cls))
    return bool(state_fields(type(holder))) or type(holder).state_dict is not base.state_dict


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    held = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value for name, value in state.items() if name not in held}, held


def _empty_held(owner: str, stored: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Memory for the tensors that a checkpoint has of a hook or plugin, whole on every rank."""
    prefix = f"{owner}."
    return {
        name.removeprefix(prefix): torch.empty(size, dtype=dtype)
        for name, (size, dtype) in stored.items()
        if name.startswith(prefix)
    }


def _empty_evaluated(
    optimizer: torch.optim.Optimizer, stored: Collection[str]
) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Memory for the weights for evaluation that a checkpoint has and the optimizer wants."""
    if not isinstance(optimizer, HasEvaluationWeights):
        return {}
    return {
        name: (parameter, torch.empty_like(parameter, requires_grad=False))
        for name, parameter in _named(optimizer)
        if EVALUATION + name in stored
    }


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def _group_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Counters that an optimizer keeps in its groups (the keys that it names in an attribute `group_state`), each with
    what its group matches, since tables of `[[optimizer.groups]]` may change places."""
    keys = getattr(optimizer, "group_state", ())
    groups = zip(_matches(optimizer), optimizer.param_groups, strict=True)
    return [{"match": match, **{key: group[key] for key in keys if key in group}} for match, group in groups]


def _matches(optimizer: torch.optim.Optimizer) -> list[str]:
    """For each group its number among those that the optimizer made, and the pattern of the table that divided it."""
    return [group.get("match", str(number)) for number, group in enumerate(optimizer.param_groups)]


def _empty_slots(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, tuple[torch.Size, torch.dtype]], trained: Collection[str]
) -> dict[tuple[str, str], Tensor]:
    """Memory for every stored slot that this rank keeps."""
    own = optimizer.empty_slot if isinstance(optimizer, PlacesState) else None
    slots: dict[tuple[str, str], Tensor] = {}
    known = dict(_named(optimizer))
    for full, (size, dtype) in stored.items():
        if not full.startswith("optimizer."):
            continue
        name, _, slot = full.removeprefix("optimizer.").rpartition(".")
        if name in trained and name not in known:
            continue  # another pipeline rank has it
        if name not in known:
            raise CheckpointError(f"the checkpoint has optimizer state of {name}, which this job does not train")
        parameter = known[name]
        memory = own(parameter, slot, size, dtype) if own else empty_slot(parameter, size, dtype)
        if memory is not None:
            slots[name, slot] = memory
    return slots


def empty_slot(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for state as it is placed by default: split like its parameter where it has its shape, else whole on every
    rank, and numbers on the host."""
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype, device=parameter.device if size else "cpu")


def _fill_optimizer(
    optimizer: torch.optim.Optimizer, slots: Mapping[tuple[str, str], Tensor], saved: Mapping[str, Any]
) -> None:
    on_device = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
    for name, parameter in _named(optimizer):
        own: dict[str, Any] = {slot: tensor for (of, slot), tensor in slots.items() if of == name}
        if on_device:  # these optimizers keep their counters beside the parameter
            own = {slot: tensor.to(parameter.device) for slot, tensor in own.items()}
        own |= saved["scalars"].get(name, {})
        if own:
            optimizer.state[parameter] = own
    _fill_groups(optimizer, saved["groups"])


def _fill_groups(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each group the counters of the group that matched the same parameters."""
    matches, counters = _matches(optimizer), {}
    for number, values in enumerate(saved):
        # A checkpoint of version 0.1 does not say what a group matches: there the order decides
        by_order = matches[number] if number < len(matches) else str(number)
        counters[values.get("match", by_order)] = {key: value for key, value in values.items() if key != "match"}
    if any(counters.values()) and counters.keys() != set(matches):
        theirs, ours = (", ".join(map(repr, names)) for names in (counters, matches))
        fix = "give [[optimizer.groups]] the patterns that it had, in any order"
        raise CheckpointError(
            f"the checkpoint has counters of the parameter groups {theirs}, this job has {ours}; {fix}"
        )
    for match, group in zip(matches, optimizer.param_groups, strict=True):
        group.update(counters.get(match, {}))
