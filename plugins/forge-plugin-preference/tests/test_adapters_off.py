"""The model with its adapters off as the reference: the numbers of a second model, in every layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from preference_runs import curve, preference_job, prepared

from forge_core.contracts.errors import ForgeError
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.trainer import Trainer
from forge_kit.nn.adapters import HasAdapter
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA
from forge_plugin_losses.adapters_off import check_adapters
from forge_plugin_preference import DPO, IPO, KTO
from forge_plugin_preference.answers import REFERENCE
from forge_plugin_preference.objective import objective_of
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, Training, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, problems_of

# s = 8: adapters change the model much within three steps, so that a reference which has them shows
ADAPTERS = LoRA(rank=2, alpha=16)


def adapted_job(folder: Path, loss: Any, plugin: LoRA | None = ADAPTERS, **changes: Any) -> Any:
    """A job that trains adapters beside the weights of the prepared reference."""
    settings: dict[str, Any] = {
        "checkpoint": {"load": Parts(path=prepared().reference)},
        "plugins": {"lora": plugin} if plugin else {},
    }
    return preference_job(folder, loss, **{**settings, **changes})


def run_lines(job: Any) -> list[dict[str, float]]:
    """The metrics of a whole run that the reference has a part in."""
    folder = Trainer(job, catalog=installed(), echo=lambda text: None).run().folder
    names = ("loss", "grad_norm")
    return [
        {name: value for name, value in json.loads(line).items() if name in names or "/" in name}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def preference_metrics(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    kinds = ("loss", "grad_norm", "rewards", "logps", "kto", "eval")
    return [{name: value for name, value in line.items() if name.partition("/")[0] in kinds} for line in lines]


@pytest.mark.parametrize("loss", [DPO, IPO, KTO])
def test_it_has_the_numbers_of_a_second_model(loss: Any, tmp_path: Path) -> None:
    """Losses, gradients, rewards and evaluations of a whole run, in float64; a dry run is first, as on a GPU."""
    one, other = (
        preference_metrics(
            run_lines(adapted_job(tmp_path / name, loss(reference=reference, beta=0.5), dry_run="always"))
        )
        for name, reference in (("off", "adapters_off"), ("path", prepared().reference))
    )
    assert one == [pytest.approx(line, rel=1e-9, abs=1e-12) for line in other]
    # The test can fail: adapters have moved the model from its reference
    assert abs(one[-1]["eval/rewards/margin"]) > 1e-3
    known = {DPO: math.log(2), IPO: 1.0, KTO: 0.5}[loss]
    assert one[0][f"loss/{loss.__name__.lower()}"] == pytest.approx(known, rel=1e-12)


def test_no_second_model_is_built(tmp_path: Path) -> None:
    """The memory that is saved: all parameters of the base."""
    references = []
    for reference in ("adapters_off", prepared().reference):
        job = adapted_job(tmp_path, DPO(reference=reference))
        run = build_run(job, build_context(job, installed(), None))
        references.append(objective_of(run.context.auxiliary).reference)
    assert references[0] is None
    base = sum(parameter.numel() for name, parameter in run.model.named_parameters() if "lora_" not in name)
    assert sum(parameter.numel() for parameter in references[1].model.parameters()) == base > 0


def test_nothing_is_dropped_in_the_pass_of_the_reference(tmp_path: Path) -> None:
    """Modules are in evaluation mode with adapters off in it, and as before after it."""
    job = adapted_job(tmp_path, DPO(reference="adapters_off"))
    run = build_run(job, build_context(job, installed(), None))
    run.model.train()
    seen: list[tuple[bool, bool]] = []
    adapted = next(module for module in run.model.modules() if isinstance(module, HasAdapter))
    adapted.register_forward_hook(lambda module, *_: seen.append((module.training, module.adapter_on)))
    with Training(run, TrainLoader(job, run.datasets, run.context)) as training:
        batches = training.loader.next_step()
        objective_of(run.context.auxiliary).add_reference(run.executor, run.model, batches)
    assert seen == [(False, False)] * len(batches)
    assert all(REFERENCE in batch for batch in batches)
    assert adapted.training
    assert adapted.adapter_on


def observe_adapters(loss: Any) -> Callable[[Path, Mapping[str, Any]], Curve]:
    def observed(folder: Path, changes: Mapping[str, Any]) -> Curve:
        plugins = {"lora": LoRA(rank=2, alpha=16, random_base=True)}
        return curve(preference_job(folder, loss(reference="adapters_off", beta=0.5), plugins=plugins, **changes))

    return observed


test_layouts = layout_law(
    Case("dpo", observe=observe_adapters(DPO), compare=same_curve, layouts=("fsdp2", "tp2", "pp2")),
    Case("kto", observe=observe_adapters(KTO), compare=same_curve, layouts=("cp2",)),
)


def test_a_rank_of_a_pipeline_may_have_no_adapters(tmp_path: Path) -> None:
    """A whole run, in which the adapters are all in the first stage of two."""
    plugin = LoRA(rank=2, alpha=16, targets=("layers.0.*",))

    def run(folder: Path, changes: Any) -> list[dict[str, float]]:
        return run_lines(adapted_job(folder, DPO(reference="adapters_off"), plugin, **changes))

    alone = preference_metrics(run(tmp_path / "alone", {}))
    changes = LAYOUTS["pp2"].changes(installed())
    ranks = run_on_ranks(2, lambda rank: run(tmp_path / "ranks", changes))
    assert preference_metrics(ranks[0]) == [pytest.approx(line, rel=1e-9, abs=1e-12) for line in alone]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [DPO, KTO])
@pytest.mark.parametrize(
    ("plugin", "facts"),
    [(None, ["the job trains none", "[plugins.lora]"]), (LoRA(rank=2, train=("*norm*",)), ["plugins.lora", "`train`"])],
)
def test_check_refuses_a_job_whose_model_is_not_its_reference(
    loss: Any, plugin: Any, facts: list[str], tmp_path: Path
) -> None:
    job = adapted_job(tmp_path, loss(reference="adapters_off"), plugin)
    check_problems(problems_of(job), at("loss.reference", *facts))


def test_a_model_that_trains_more_than_the_job_declares_is_refused(tmp_path: Path) -> None:
    """Such as one of a plugin that declares nothing, or whose `adapters_alone` is wrong."""
    job = adapted_job(tmp_path, DPO(reference="adapters_off"))
    model = build_run(job, build_context(job, installed(), None)).model
    check_adapters(model, None)
    next(parameter for name, parameter in model.named_parameters() if "norm" in name).requires_grad_(True)
    with pytest.raises(ForgeError, match=r"norm.* trains, too"):
        check_adapters(model, None)


def test_adapters_that_were_trained_before_have_no_known_first_loss(tmp_path: Path) -> None:
    first = Trainer(
        adapted_job(tmp_path / "first", DPO(reference="adapters_off"), steps=1),
        catalog=installed(),
        echo=lambda text: None,
    ).run()
    job = adapted_job(
        tmp_path / "second", DPO(reference="adapters_off"), steps=1, checkpoint={"load": Parts(path=str(first.folder))}
    )
    [line, *_] = run_lines(job)
    assert abs(line["loss/dpo"] - math.log(2)) > 1e-6
