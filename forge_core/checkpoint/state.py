"""State of a run, to and from a checkpoint.

Tensors are `model.<parameter or buffer>`, `optimizer.<parameter>.<slot>` and, where an optimizer evaluates other
weights than it trains, `evaluation.<parameter>`; all else is plain types in the manifest.
Hyper-parameters come from the job, never from a checkpoint, so that a longer schedule or another rate takes effect.
Randomness inside a step is seeded from (seed, step), so no generator's state needs keeping.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.tensors import Shapes, Tensors, load_tensors, shared_index
from forge_core.contracts.components import Plugin, TrainingHook
from forge_core.contracts.errors import ResumeError
from forge_core.contracts.model import Model
from forge_core.contracts.optimizer import HasEvaluationWeights, PlacesState
from forge_core.contracts.runtime import State
from forge_core.parallel.initialise import ties
from forge_core.parallel.mesh import gather_objects, local_part

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
    finite: bool = True
    """Whether loss and gradients of the last step were finite; with `train.non_finite = "ignore"`, the loss."""
    schedule: float | None = None
    """Factor of the schedule for the last update; None before the first."""
    leave_out_until: int = 0
    """The data of steps up to this number are passed over, after a roll-back."""
    samples: dict[str, Any] = field(factory=dict)
    """Where the order of samples is (see `SampleOrder.state`); empty before the first."""


def model_tensors(model: Model) -> dict[str, Tensor]:
    """Parameters and persistent buffers, tied ones once."""
    other_names = ties(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in other_names}


def gather_state(
    model: Model,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    own: Mapping[str, TrainingHook | Plugin],
    pipeline: ProcessGroup | None = None,
) -> State:
    """The state to save, including each owner in `own`. Collective over `pipeline`, the ranks with different layers.

    Reads only: a save, at any step, changes nothing.
    """
    based = {} if model.base is None else {"base": model.base}
    tensors = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    for name in model.base["tensors"] if model.base else ():
        tensors.pop(name, None)
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
    if pipeline is not None:  # the manifest is written by rank 0, whose optimizer has the parameters of its layers only
        scalars = {name: slots for part in gather_objects(scalars, pipeline) for name, slots in part.items()}
    extras: dict[str, dict[str, Any]] = {}
    for owner, holder in own.items():
        state = holder.state_dict()
        held = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        tensors |= {f"{owner}.{name}": tensor for name, tensor in held.items()}
        extras[owner] = {name: value for name, value in state.items() if name not in held}
    saved = {"scalars": scalars, "groups": _group_state(optimizer)}
    return State(tensors, {"progress": asdict(progress), "optimizer": saved, "extras": extras, **based})


@frozen
class Source:
    """Where a state is read from: a checkpoint, or memory."""

    values: Mapping[str, Any]
    stored: Shapes
    fill: Callable[[Tensors], None]
    """Fills tensors by name, in place. Collective."""


def in_folder(folder: Path, manifest: Mapping[str, Any]) -> Source:
    """The state in a checkpoint. Collective."""
    index = shared_index(folder)
    return Source(manifest, index.shapes, lambda tensors: load_tensors(folder, tensors, index))


def in_memory(state: State) -> Source:
    """The state of which `state` has this rank's part."""

    def fill(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            saved: Any = state.tensors[name]
            # A hook gets whole tensors back, as from a file, even if it gave parts of them
            if isinstance(saved, DTensor) and not isinstance(tensor, DTensor):
                saved = saved.full_tensor()
            local_part(tensor.detach()).copy_(local_part(saved))

    return Source(state.values, {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors.items()}, fill)


def restore_state(
    source: Source,
    model: Model,
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, TrainingHook | Plugin],
    trained: Collection[str],
) -> Progress:
    """Load a state into a run, whose optimizer has none; returns its progress. Collective.

    Holders whose state the source lacks are left as they are. `trained` has the names of the
    parameters of the whole model, of which `model` may be a part. Raises a `CheckpointError` if the job does not fit.
    """
    stored, manifest = source.stored, source.values
    slots = _empty_slots(optimizer, stored, trained)
    held = {owner: _empty_held(owner, stored) for owner in own if owner in manifest["extras"]}
    evaluated = _empty_evaluated(optimizer, stored)
    model.base = manifest.get("base")
    own_tensors = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    # A state in memory lacks what is its base's, which has not changed since
    based = (manifest.get("base") or {}).get("tensors", ())
    tensors = {name: tensor for name, tensor in own_tensors.items() if name in stored or name not in based}
    tensors |= {f"optimizer.{name}.{slot}": tensor for name, parts in slots.items() for slot, tensor in parts.items()}
    tensors |= {f"{owner}.{name}": tensor for owner, parts in held.items() for name, tensor in parts.items()}
    tensors |= {EVALUATION + name: tensor for name, (_, tensor) in evaluated.items()}
    source.fill(tensors)
    # Into separate memory first: stepping a fresh optimizer to create its state, as torch does, would change training
    _fill_optimizer(optimizer, slots, manifest["optimizer"])
    # After parameters and state: an optimizer may derive the weights for evaluation from these
    if isinstance(optimizer, HasEvaluationWeights) and evaluated:
        optimizer.load_evaluation_weights(dict(evaluated.values()))
    for owner, parts in held.items():
        own[owner].load_state_dict({**manifest["extras"][owner], **parts})
    return Progress(**manifest["progress"])


def _empty_held(owner: str, stored: Shapes) -> dict[str, Tensor]:
    """Memory for the tensors that a checkpoint has of a hook or plugin, whole on every rank."""
    own = {name.removeprefix(f"{owner}."): shape for name, shape in stored.items() if name.startswith(f"{owner}.")}
    return {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in own.items()}


def _empty_evaluated(optimizer: torch.optim.Optimizer, stored: Shapes) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Memory for the weights for evaluation that a checkpoint has and the optimizer wants."""
    if not isinstance(optimizer, HasEvaluationWeights):
        return {}
    known = {name: parameter for name, parameter in _named(optimizer) if EVALUATION + name in stored}
    return {name: (parameter, torch.empty_like(parameter, requires_grad=False)) for name, parameter in known.items()}


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


# --- the optimizer -----------------------------------------------------------------------------------------------


def _empty_slots(
    optimizer: torch.optim.Optimizer, stored: Shapes, trained: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """Memory for every stored slot that this rank keeps, by parameter and slot."""
    own = optimizer.empty_slot if isinstance(optimizer, PlacesState) else None
    slots: dict[str, dict[str, Tensor]] = {}
    known = dict(_named(optimizer))
    for full, (size, dtype) in stored.items():
        if not full.startswith("optimizer."):
            continue
        name, _, slot = full.removeprefix("optimizer.").rpartition(".")
        if name in trained and name not in known:
            continue  # another pipeline rank has it
        if name not in known:
            raise ResumeError(f"the checkpoint has optimizer state of {name}, which this job does not train")
        parameter = known[name]
        memory = own(parameter, slot, size, dtype) if own else empty_slot(parameter, size, dtype)
        if memory is not None:
            slots.setdefault(name, {})[slot] = memory
    return slots


def empty_slot(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for state in its default place: like a parameter of its shape, else whole, and numbers on the host."""
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype, device=parameter.device if size else "cpu")


def _fill_optimizer(optimizer: torch.optim.Optimizer, slots: Mapping[str, Tensors], saved: Mapping[str, Any]) -> None:
    on_device = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
    for name, parameter in _named(optimizer):
        own: dict[str, Any] = dict(slots.get(name, {}))
        if on_device:  # these optimizers keep their counters beside the parameter
            own = {slot: tensor.to(parameter.device) for slot, tensor in own.items()}
        own |= saved["scalars"].get(name, {})
        if own:
            optimizer.state[parameter] = own
    _fill_groups(optimizer, saved["groups"])


def _group_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Counters of the groups, by the keys that the optimizer names in an attribute `group_state`."""
    # Each with the pattern that its group matches: tables of [[optimizer.groups]] may change places
    keys = getattr(optimizer, "group_state", ())
    groups = zip(_matches(optimizer), optimizer.param_groups, strict=True)
    return [{"match": match, **{key: group[key] for key in keys if key in group}} for match, group in groups]


def _matches(optimizer: torch.optim.Optimizer) -> list[str]:
    """For each group its number among those that the optimizer made, and the pattern of the table that divided it."""
    return [group.get("match", str(number)) for number, group in enumerate(optimizer.param_groups)]


def _fill_groups(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each group the counters of the group that matched the same parameters."""
    matches = _matches(optimizer)
    counters = {group["match"]: {key: value for key, value in group.items() if key != "match"} for group in saved}
    if any(counters.values()) and counters.keys() != set(matches):
        theirs, ours = (", ".join(map(repr, names)) for names in (counters, matches))
        raise ResumeError(
            f"the checkpoint has counters of the parameter groups {theirs}, this job has {ours}; "
            "give [[optimizer.groups]] the patterns that it had, in any order"
        )
    for match, group in zip(matches, optimizer.param_groups, strict=True):
        group.update(counters.get(match, {}))
