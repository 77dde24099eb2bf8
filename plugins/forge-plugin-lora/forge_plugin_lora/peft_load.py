"""The component `peft` of kind `load`: adapters from a folder that Hugging Face's `peft` wrote."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import min_len

from forge_core import Problem
from forge_core.contracts.components import FilePath, LoadComponent
from forge_core.contracts.errors import ResumeError, listed
from forge_plugin_lora.lora import LoRA

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model, Outline
    from forge_core.job import Job

OTHERS = (
    "alpha_pattern",
    "rank_pattern",
    "layer_replication",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Keys of `adapter_config.json` by which adapters compute something else, if they are set."""
SAME_BASE = ("gaussian", "eva", "orthogonal")
"""Initial values of adapters, of those with a name, that leave the weights beside them as they are."""


@frozen(kw_only=True)
class PEFTAdapter(LoadComponent):
    """Training continues with adapters that `peft` has saved: a further table of `[[checkpoint.load]]`.

    `[plugins.lora]` must describe the same adapters. The names of published models are `forge-plugin-weights`'.
    """

    path: FilePath = field(validator=min_len(1))
    """The folder, with `adapter_config.json` and `adapter_model.safetensors`."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the folder has adapters, and that those of the job are alike."""
        from forge_plugin_lora.peft import CONFIG, WEIGHTS, settings

        folder = Path(self.path)
        if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
            yield Problem("path", f"{folder} has no {missing[0]}: give the folder that `save_pretrained` wrote")
            return
        plugin = next((plugin for plugin in job.plugins.values() if isinstance(plugin, LoRA)), None)
        if plugin is None:
            yield Problem("", "loads adapters, and the job has none: add [plugins.lora]")
            return
        if all(isinstance(load, PEFTAdapter) for load in job.checkpoint.loads.values()):
            yield Problem("", "loads adapters alone; add a table [[checkpoint.load]] with the model that they are for")
        if plugin.method == "dora" and self._is_before_the_model(job):
            message = "adapters of DoRA are compared with the model, which a later table loads"
            yield Problem("", f"{message}: let this table be the last one")
        try:
            # Files of early versions of peft lack both keys
            theirs = {"use_rslora": False, "use_dora": False, **json.loads((folder / CONFIG).read_text())}
        except (ValueError, TypeError) as error:
            yield Problem("path", f"{folder / CONFIG} cannot be read: {error}")
            return
        for key in OTHERS:
            if theirs.get(key):
                yield Problem(
                    "path", f"{folder / CONFIG} has {key} = {theirs[key]!r}, which [plugins.lora] does not support"
                )
        if isinstance(begin := theirs.get("init_lora_weights"), str) and begin not in SAME_BASE:
            hint = "save it with path_initial_model_for_weight_conversion, which makes it one for the original model"
            yield Problem("path", f"the adapters of {folder} began with {begin!r}, which changes the base: {hint}")
        for key, ours in settings(plugin).items():
            if theirs.get(key) != ours:
                message = f"{folder / CONFIG} has {key} = {theirs.get(key)!r}, where [plugins.lora] means {ours!r}"
                yield Problem("path", f"{message}; make them alike")

    def _is_before_the_model(self, job: Job) -> bool:
        kinds = [isinstance(load, PEFTAdapter) for load in job.checkpoint.loads.values()]
        # False sorts first: whether some table of adapters is before another kind
        return kinds != sorted(kinds)

    def find(self, job: Job) -> Path:
        """Returns the file with the tensors."""
        from forge_plugin_lora.peft import WEIGHTS

        return Path(self.path) / WEIGHTS

    def load(
        self, found: Any, table: str, context: BuildContext, model: Model, outline: Outline
    ) -> tuple[Collection[str], Iterable[str]]:
        """Fills the adapters; see `LoadComponent.load`.

        Raises:
            ResumeError: the file lacks an adapter, has one that the model has not, or one of another shape.
        """
        import torch
        from safetensors.torch import load_file

        from forge_core.parallel.initialise import SeededFill
        from forge_core.parallel.mesh import local_part
        from forge_plugin_lora.low_rank import MAGNITUDE
        from forge_plugin_lora.peft import lengths

        whole = _by_our_names(table, found, load_file(found), context, outline)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in whole:
                    # For `copy`, which takes this rank's part of the whole; nothing is drawn
                    SeededFill(parameter, name, 0).copy(whole[name].to(parameter.device, parameter.dtype))
                    if name.endswith(f".{MAGNITUDE}.weight"):
                        # peft has the length of a row, and we what training adds to that of W
                        local_part(parameter).sub_(lengths(model, name))
        return list(whole), [f"{len(whole)} tensors of adapters from {found}"]


def _by_our_names(
    table: str, file: Path, tensors: dict[str, Tensor], context: BuildContext, outline: Outline
) -> dict[str, Tensor]:
    """Adapters by the names of their parameters; those of experts stacked."""
    import torch

    from forge_core.plugins.catalog import Catalog
    from forge_plugin_lora.peft import SUFFIXES, places
    from forge_plugin_weights.adapters import published_modules
    from forge_plugin_weights.exporting import find_target

    shapes = {name: tuple(shape) for name, shape in outline.tensors.items()}
    plain = {name: shape for name, shape in shapes.items() if not name.endswith(tuple(SUFFIXES))}
    names = published_modules(find_target(context.job, plain, Catalog.installed()).match)
    wanted = list(places(shapes, names))
    lacking = [place.theirs for place in wanted if place.theirs not in tensors]
    unknown = sorted(tensors.keys() - {place.theirs for place in wanted})
    for which, fault in ((lacking, "lacks"), (unknown, "has adapters where the model has none:")):
        if which:
            raise ResumeError(f"[{table}]: {file} {fault} {listed(which)}; give [plugins.lora] the same targets")
    parts: dict[str, list[Tensor]] = {}
    for ours, theirs, _ in wanted:
        parts.setdefault(ours, []).append(tensors[theirs])
    whole = {name: own[0] if len(shapes[name]) < 3 else torch.stack(own) for name, own in parts.items()}
    for name, tensor in whole.items():
        if tensor.shape != shapes[name]:
            sizes = f"as {list(tensor.shape)}, where the model has {list(shapes[name])}"
            raise ResumeError(f"[{table}]: {file} has {name} {sizes}; is it of the same model?")
    return whole
