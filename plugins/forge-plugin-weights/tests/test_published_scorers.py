"""Models that score texts, as `AutoModelForSequenceClassification` loads and saves them, in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from published_models import MODELS, ids_of, logits, ours

from forge_core.cli import main
from forge_core.contracts.errors import JobError
from forge_plugin_adamw import AdamW
from forge_plugin_preference import BradleyTerry, Pairs, RewardHead
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import START, import_folder
from forge_plugin_weights.scorers import CLASSES, LANGUAGE_MODEL, SCORER
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.refusals import naming

NAMES = (
    "llama",
    "llama, tied",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma",
    "gemma2",
    "phi3",
    "mixtral",
    "qwen3_moe",
)


def published(name: str) -> Any:
    """The published model of a name, with one score in place of its head."""
    return evolve(MODELS[name], head=SCORER, keys={**MODELS[name].keys, "num_labels": 1})


@torch.no_grad()
def their_scores(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """(B,): of rows without padding."""
    return torch.stack([model.double()(row[None]).logits[0, 0] for row in rows])


def rows_of() -> torch.Tensor:
    """(2, 24) tokens, the last of which are no padding."""
    ids = ids_of()
    ids[:, -1] = 7
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_a_scorer_comes_in_and_goes_out(name: str, tmp_path: Path) -> None:
    theirs = published(name).write(tmp_path / "published")
    ids = rows_of()
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    own = logits(ours(run), ids)[:, -1, 0]
    out = export_run(run, tmp_path / "out", computed=True)
    again, loading = transformers.AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    assert type(again) is type(theirs)
    assert again.config.num_labels == 1
    with torch.no_grad():
        expected = torch.stack([theirs(row[None]).logits[0, 0] for row in ids])
        back = torch.stack([again(row[None]).logits[0, 0] for row in ids])
    assert abs(expected[0] - expected[1]) > 1e-3
    assert own.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert torch.equal(back, expected)
    assert "[plugins.reward_head]" in (run / START).read_text()


def test_the_classes_are_those_of_transformers() -> None:
    from transformers.models.auto import modeling_auto

    names = set(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
    assert {name.replace(LANGUAGE_MODEL, SCORER) for name in CLASSES} <= names
    assert {published(name).name for name in NAMES} == {name.removesuffix(LANGUAGE_MODEL) for name in CLASSES}


@pytest.mark.parametrize(
    ("name", "keys", "facts"),
    [
        ("llama", {"num_labels": 3}, ["score.weight ([3, 32]", "[1, 32]"]),
        (
            "gpt2",
            {"num_labels": 1},
            ["architectures", "GPT2LMHeadModel with a score in place of its head is not"],
        ),
    ],
)
def test_others_are_refused(name: str, keys: Any, facts: list[str], tmp_path: Path) -> None:
    evolve(MODELS[name], head=SCORER, keys={**MODELS[name].keys, **keys}).write(tmp_path / "published")
    with pytest.raises(JobError, match=naming(*facts)):
        import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)


# --- runs ------------------------------------------------------------------------------------------------------------


def trained(folder: Path, **changes: Any) -> Path:
    """A run that has trained a reward model for a few steps."""
    from forge_core.engine.trainer import Trainer

    lines = [{"prompt": f"{n}? ", "chosen": "yes" * (n % 2 + 1), "rejected": "no" * (n % 3 + 1)} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = Transformer(vocab_size=258, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))
    settings: dict[str, Any] = {
        "steps": 3,
        "global_batch_size": 4,
        "seq_len": 32,
        "precision": "fp32",
        "model": model,
        "loss": BradleyTerry(),
        "optimizer": AdamW(lr=1e-2),
        "plugins": {"reward_head": RewardHead()},
        "data": {"tokenizer": Bytes(), "sources": (Pairs(path=str(folder / "pairs.jsonl")),)},
        "job": {"name": "rm"},
    }
    job = tiny_job(str(folder), installed(), **settings | changes)
    Trainer(job, catalog=installed(), echo=lambda text: None).run()
    return folder / "rm"


@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_reward_model_gives_its_scores_in_transformers(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Transformer(vocab_size=258, dim=16, layers=2, attention=GroupedQueryAttention(heads=4), tie_embeddings=tied)
    run = trained(tmp_path, model=model)
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    ids = torch.tensor([[*b"3? yes", 256], [*b"3? no!", 256]])
    own = logits(ours(run), ids)[:, -1, 0]
    with torch.no_grad():
        expected = torch.stack([theirs(row[None]).logits[0, 0] for row in ids])
    assert abs(own[0] - own[1]) > 1e-3
    assert own.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_padding_that_is_the_end_of_text_is_not_written(tmp_path: Path) -> None:
    """By it, transformers would read the score before the end of a text."""
    keys = {"pad_token_id": 2, "eos_token_id": 2}
    evolve(published("llama"), keys={**published("llama").keys, **keys}).write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    config = json.loads((export_run(run, tmp_path / "out") / "config.json").read_text())
    assert config["eos_token_id"] == 2
    assert config.get("pad_token_id") is None
