"""Under every layout each rank has its part of a published model, and a run from it has the losses of one process.

What models of all kinds compute under layouts is the subject of their own tests; here it is that an import is one.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import published_qwen
import published_vision
import pytest
import tomli_w
import torch
from arrival import arrived, check_parts, parts_of
from attrs import frozen
from published_models import MODELS as LANGUAGE_MODELS
from published_models import ours
from safetensors.torch import load_file
from test_published_any_resolution import MODELS as ANY_RESOLUTION

from forge_core.checkpoint.resume import locate
from forge_core.checkpoint.state import model_tensors
from forge_core.config.load import parse_job
from forge_core.contracts.contexts import TrainContext
from forge_core.engine.build import build_context, build_model
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.checkpoints import load_model
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import START, import_folder
from forge_plugin_weights.parallel_export import export_training
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming

if TYPE_CHECKING:
    from arrival import Part

    from forge_core.job import Job

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {"fsdp": {}},
    "tp2": {"tp": {"degree": 2}},
    "pp2": {"pp": {"degree": 2}},
    "ep2": {"fsdp": {}, "ep": {"degree": 2}},
    "cp2": {"cp": {"degree": 2}},
}
SEEING: Mapping[str, Any] = {
    **published_vision.MODELS,
    "mllama": published_vision.TILED["mllama"],
    "mistral3": published_vision.ANY_SIZE["mistral3"],
    **published_vision.BUDGETED,
    **published_vision.NAVIT,
    # Variants differ by settings alone
    **{name: each for name, each in {**published_qwen.MODELS, **ANY_RESOLUTION}.items() if "," not in name},
}
TOWERS: Mapping[str, Any] = {
    name: each for name, each in {**published_vision.TOWERS, **published_vision.TILED}.items() if "vision" in name
}
TOWER_LAYOUTS = ("fsdp2", "tp2", "pp2", "cp2")
LANGUAGE: Mapping[str, Any] = {"vocab_size": 64, "dim": 32, "layers": 2, "attention": {"heads": 4}}
"""What a tower is trained in."""
MODELS: Mapping[str, Any] = {**LANGUAGE_MODELS, **SEEING}
TRAINED: Mapping[str, str] = {
    "llama": "fsdp2",
    "qwen3_moe": "ep2",
    "deepseek_v3": "tp2",
    "gpt_oss": "pp2",
    "llava": "tp2",
    "mllama": "pp2",
}
"""The layout of a run that starts from a model: each has dense ones and ones with experts or images."""
TRAINED_HALVES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Models whose weights are also tried in bfloat16, each under the layout that it trains in."""
TRAINED_TOO: Mapping[str, str] = {
    "olmo2": "tp2",
    "granite": "tp2",
    "smollm3": "pp2",
    "gemma3_text": "tp2",
    "gemma3n_text": "tp2",
    "gemma4_text": "pp2",
    "gemma4_text, experts": "ep2",
    "llama4_text": "ep2",
    "qwen2_moe": "fsdp2",
    "gpt_neox": "fsdp2",
    "gpt2": "tp2",
    "qwen3_next": "tp2",
    "lfm2": "tp2",
    "kimi_linear": "tp2",
    "lfm2_moe": "ep2",
    "glm4_moe": "ep2",
    "mimo_v2_flash": "tp2",
    "glm4": "tp2",
    "exaone4": "pp2",
    "starcoder2": "fsdp2",
    "phi": "tp2",
    "cohere2": "pp2",
    "granitemoe": "ep2",
    "granitemoehybrid": "tp2",
    "bamba": "tp2",
    "nemotron_h, experts": "tp2",
    "falcon_h1": "tp2",
    "minimax_m2": "tp2",
    "nemotron": "tp2",
    "hunyuan_v1_dense": "tp2",
    "ministral3": "pp2",
    "llava, experts": "ep2",
    "llama4, experts": "tp2",
    "paligemma": "fsdp2",
    "smolvlm": "pp2",
    "mistral3": "tp2",
    "gemma4": "pp2",
    "gemma4, small": "tp2",
    "kimi_k25, experts": "tp2",
    "qwen2_5_vl": "tp2",
    "qwen3_vl": "pp2",
    "qwen3_vl_moe": "ep2",
    "qwen3_5": "pp2",
    "qwen3_5_moe": "ep2",
    "llava_next": "tp2",
    "llava_onevision": "fsdp2",
}
"""Models that together have the layers of all other architectures, each under one layout."""
LIKE_LLAMA = (
    *("mistral", "ministral", "qwen2", "qwen3", "olmo2", "olmo3", "exaone4", "granite", "smollm3", "seed_oss"),
    *("gemma", "gemma2", "gemma3_text"),
)
"""Architectures with Llama's matrices, by the same names and rules."""
ANY_SIZE = ("siglip2_vision_model", "mistral3", *published_vision.BUDGETED, "kimi_k25, experts")
IMAGES = "forge_testing.vision:RandomImages"
JOB: Mapping[str, Any] = {
    "train": {"steps": 1, "global_batch_size": 4, "micro_batch_size": 2, "seq_len": 24, "precision": "fp32"},
    "data": {"sources": [{"type": "forge_testing:Numbers", "held_out": 0}]},
    "optimizer": {"type": "adamw", "lr": 1e-2},
}


@frozen
class Imported:
    """A published model, and the run folder that was made of it."""

    name: str
    dtype: torch.dtype
    """Of its files."""
    published: Path
    run: Path
    tensors: Mapping[str, torch.Tensor] = attrs.field(repr=False)
    """Of our model in a single process."""

    @classmethod
    def write(cls, folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Imported:
        published = folder / "published" / run_name(name)
        {**MODELS, **TOWERS}[name].write(published, dtype)
        run = import_folder(published, folder / "imported" / run_name(name), tokenizer=False)
        return cls(name, dtype, published, run, model_tensors(ours(run)))

    @property
    def architecture(self) -> str:
        return self.name.partition(",")[0]

    def layouts(self) -> Iterator[str]:
        """The layouts that are ones for the model: its experts, or its heads, divide."""
        model = tomllib.loads((self.run / START).read_text())["model"]
        heads = model.get("language", model)["attention"].get("kv_heads", 2)
        yield from ("fsdp2", "pp2")
        if heads % 2 == 0:
            yield "tp2"
        if has_experts(self.name):
            yield "ep2"

    def job(self, output: Path, stages: Mapping[str, Any], **tables: Any) -> Job:
        """Returns the job of `forge-run RUN/start.toml job.toml`."""
        table = tomllib.loads((self.run / START).read_text()) | JOB | tables
        if self.name in TOWERS:
            table["model"]["language"] = dict(LANGUAGE)
        if "vision" in table["model"]:
            # Less room than of an import for images of any size, which rows of 24 tokens cannot have
            room = {"images_per_sequence": 4, "patches_per_sequence": 96} if self.name in ANY_SIZE else {}
            table["model"]["vision"] |= room
            table["data"] = {"sources": [{"type": IMAGES, "vocabulary": 60, "sequences": 4, "held_out": 0}]}
        table |= {"job": {"name": run_name(self.name), "output": str(output)}, "parallel": stages}
        return parse_job(tomli_w.dumps(table), "job.toml", Catalog.installed())


def run_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def has_experts(name: str) -> bool:
    if name not in LANGUAGE_MODELS:
        return "experts" in name or "moe" in name
    keys = LANGUAGE_MODELS[name].keys
    # Granite 4 without experts has 0 of them
    return any(keys.get(key) for key in ("moe_intermediate_size", "num_local_experts", "num_experts"))


@torch.no_grad()
def load(model: Imported, job: Job, folder: Path) -> dict[str, Part]:
    """Returns the parts of a model that this rank has under a job's layout; all ranks export it to `folder`."""
    context = build_context(job, Catalog.installed(), None)
    built: Any = build_model(job, context).model
    load_model(locate(model.run, "sizes")[0], built)
    optimizer = torch.optim.SGD(built.parameters())  # which evaluates the weights that it trains
    training = TrainContext(job=job, model=built, optimizer=optimizer, tokenizer=None, folder=None, step=0)
    export_training(training, folder, model.dtype, 10**9, model.architecture, verify=False)
    return parts_of(built)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_weights(folder: Path, cases: Iterable[tuple[Imported, Sequence[str]]]) -> None:
    """Each rank has its part under each layout, and all together write the published files again."""
    pairs = []
    for model, layouts in cases:
        for layout in layouts:
            exported = folder / f"{model.run.name} {model.dtype} {layout}"
            pairs.append((model, model.job(exported, LAYOUTS[layout]), exported))
    ranks = run_on_ranks(2, lambda rank: [load(*pair) for pair in pairs])
    for (model, _, exported), *parts in zip(pairs, *ranks, strict=True):
        check_parts(parts, model.tensors)
        before, after = expected_files(model), tensors_of(exported)
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), f"{exported}, {name}"


def expected_files(model: Imported) -> dict[str, torch.Tensor]:
    if model.name not in SEEING:
        return tensors_of(model.published)
    exported = model.run.with_name(f"{model.run.name} exported")  # it has other names than version 5 writes
    return tensors_of(exported if exported.exists() else export_run(model.run, exported))


def training(model: Imported, output: Path, stages: Mapping[str, Any]) -> Job:
    hooks = {"arrival": {"type": "arrival:Arrival"}, "export": {"architecture": model.architecture}}
    return model.job(output, stages, hooks=hooks, train={**JOB["train"], "precision": "fp64"})


def train(jobs: Iterable[Job]) -> None:
    for job in jobs:
        Trainer(job, echo=lambda text: None).run()


def numbers(run: Path) -> list[float]:
    """The loss and the norm of the gradients in the only step."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    [step] = [record for record in records if "loss" in record]
    return [step["loss"], step["grad_norm"]]


def check_training(folder: Path, models: Mapping[str, Imported], trained: Iterable[tuple[str, str]]) -> None:
    """Runs that start from models, under their layouts, have the numbers of one process, and export its weights."""
    pairs = [(models[name], layout) for name, layout in trained]
    alone = [training(model, folder / "one", {}) for model in {model.name: model for model, _ in pairs}.values()]
    together = [training(model, folder / layout, LAYOUTS[layout]) for model, layout in pairs]
    # In a process apart: this one holds all of `transformers`, which each collection of garbage would search.
    run_on_ranks(1, lambda rank: train(alone))
    run_on_ranks(2, lambda rank: train(together))
    for model, layout in pairs:
        one, two = (folder / ranks / run_name(model.name) for ranks in ("one", layout))
        tensors = model.tensors
        if model.name in TOWERS:  # the rest of the model begins anew
            tensors = {**{name: part.local for name, part in arrived(one)[0].items()}, **tensors}
        check_parts(arrived(one), tensors)
        # Ranks that share positions have all weights each
        for parts in [[rank] for rank in arrived(two)] if layout == "cp2" else [arrived(two)]:
            check_parts(parts, tensors)
        assert numbers(two) == pytest.approx(numbers(one), rel=1e-12), f"{model.name}, {layout}"
        before, after = (load_file(run / "exports/step-1/model.safetensors") for run in (one, two))
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            torch.testing.assert_close(tensor, before[name], rtol=1e-6, atol=1e-7, msg=f"{model.name}, {name}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Imported]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Imported.write(folder, name) for name in TRAINED}


@pytest.fixture(scope="module")
def other_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Imported]:
    """All whose tensors are not those of one before: windows, say, are settings of the same ones.

    In bfloat16, since what differs from float32 is how numbers are stored, not where.
    """
    folder = tmp_path_factory.mktemp("others")
    names = {tensors_named(name): name for name in reversed(MODELS)}
    others = [name for name in reversed([*names.values()]) if name not in TRAINED]
    return {name: Imported.write(folder, name, torch.bfloat16) for name in others}


def tensors_named(name: str) -> tuple[Any, ...]:
    """What the weights of two models of one kind have in common: the architecture, and names and shapes of tensors."""
    published = MODELS[name].model()
    shapes = {key: tuple(tensor.shape) for key, tensor in published.state_dict().items()}
    tied = getattr(published.config, "tie_word_embeddings", None)
    return name.partition(",")[0], tied, *shapes.items()


def test_weights_are_those_of_one_process_under_every_layout(tmp_path, models):
    halves = [(Imported.write(tmp_path, name, torch.bfloat16), [TRAINED[name]]) for name in TRAINED_HALVES]
    # Not under the layout of its training, which `check_training` compares, too.
    wide = [
        (model, [layout for layout in model.layouts() if layout != TRAINED[name]]) for name, model in models.items()
    ]
    check_weights(tmp_path / "exports", [*wide, *halves])


@pytest.mark.thorough
def test_weights_of_all_others_are_those_of_one_process_under_every_layout(tmp_path, other_models):
    check_weights(tmp_path, [(model, layouts_of_other(model, other_models)) for model in other_models.values()])


def layouts_of_other(model: Imported, others: Mapping[str, Imported]) -> Sequence[str]:
    """Layouts to try a model of another architecture in, apart from the one that it trains in.

    All of them for the first model of an architecture, with experts divided by one stage; for a model that differs from
    the first by its settings, or from Llama by a few norms, the last.
    """
    layouts = [*model.layouts()]
    if "ep2" in layouts:
        layouts.remove("fsdp2")  # ranks have the same experts then
    is_first = next(other for other in others.values() if other.architecture == model.architecture) is model
    chosen = layouts if is_first and model.architecture not in {*TRAINED, *LIKE_LLAMA} else layouts[-1:]
    return [layout for layout in chosen if layout != TRAINED_TOO.get(model.name)]


def test_losses_are_those_of_one_process(tmp_path, models):
    check_training(tmp_path, models, TRAINED.items())


@pytest.mark.thorough
def test_losses_of_models_with_other_layers_are_those_of_one_process(tmp_path, other_models):
    check_training(tmp_path, other_models, TRAINED_TOO.items())


@pytest.mark.thorough
def test_losses_of_models_with_a_tower_that_came_alone_are_those_of_one_process(tmp_path):
    towers = {name: Imported.write(tmp_path, name) for name in TOWERS}
    check_training(tmp_path, towers, product(TOWERS, TOWER_LAYOUTS))


def test_a_rank_with_other_numbers_is_found(tmp_path, models):
    """The tests above would fail if a rank loaded a wrong part: one number of one is changed after it was loaded."""
    model = models["llama"]
    jobs = {layout: model.job(tmp_path / layout, LAYOUTS[layout]) for layout in ("fsdp2", "tp2", "pp2")}
    loaded = run_on_ranks(2, lambda rank: {layout: load(model, job, tmp_path / layout) for layout, job in jobs.items()})
    for layout in jobs:
        ranks = [parts[layout] for parts in loaded]
        check_parts(ranks, model.tensors)
        ranks[0]["layers.0.ffn_norm.weight"].local.view(-1)[-1:] += 1
        with pytest.raises(AssertionError, match=naming("layers.0.ffn_norm.weight")):
            check_parts(ranks, model.tensors)
