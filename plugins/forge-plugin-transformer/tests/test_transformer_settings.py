"""Keys of the job file: what they mean together, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core import Job, JobError, load_job
from forge_plugin_transformer import (
    GEGLU,
    GroupedQueryAttention,
    Llama3Rope,
    RMSNorm,
    SwiGLU,
    Transformer,
    document_backends,
)
from forge_plugin_transformer.attention_backends import Measurement, Table, choose_backend, committed_table
from forge_plugin_transformer.document_backends import DocumentMeasurement, DocumentTable
from forge_plugin_transformer.scoring import Scoring
from forge_testing.refusals import ExpectedProblem, at, check_problems, lacks, refuses, refuses_all
from forge_testing.tiny import BESIDE_MODEL

LoadModel = Callable[[str], Transformer]


@pytest.fixture
def load_model(tmp_path: Path) -> LoadModel:
    """The model of a job of which the given TOML is the part below `[model]`."""

    def load(model: str) -> Transformer:
        path = tmp_path / "job.toml"
        path.write_text(f'[model]\ntype = "transformer"\n{model}\n{BESIDE_MODEL}')
        job: Job = load_job(path)
        return job.model

    return load


def test_defaults_are_components_of_the_other_kinds(load_model: LoadModel) -> None:
    model = load_model("vocab_size = 32")
    assert (model.attention.heads, model.ffn, model.norm) == (8, SwiGLU(), RMSNorm())


def test_nested_tables(load_model: LoadModel) -> None:
    model = load_model(
        """
        vocab_size = 32
        [model.attention]
        heads = 4
        kv_heads = 2
        [model.attention.rope]
        type = "llama3"
        theta = 500000.0
        """
    )
    assert model.attention == GroupedQueryAttention(heads=4, kv_heads=2, rope=Llama3Rope(theta=5e5))


def test_blocks_of_published_models(load_model: LoadModel) -> None:
    model = load_model(
        """
        vocab_size = 32
        norm_placement = "both"
        residual = "parallel"
        residual_scale = 0.22
        learned_positions = 16
        embedding_scale = 16.0
        logit_scale = 0.5
        logit_soft_cap = 30.0
        [model.attention]
        qk_norm = "all"
        qk_norm_offset = 1
        [model.norm]
        type = "rmsnorm"
        offset = 1
        [model.ffn]
        type = "geglu"
        approximate = "none"
        """
    )
    assert (model.norm_placement, model.residual, model.learned_positions) == ("both", "parallel", 16)
    factors = (model.embedding_scale, model.residual_scale, model.logit_scale, model.logit_soft_cap)
    assert factors == (16.0, 0.22, 0.5, 30.0)
    assert (model.attention.qk_norm, model.attention.qk_norm_offset) == ("all", 1)
    assert (model.norm, model.ffn) == (RMSNorm(offset=1), GEGLU(approximate="none"))


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("", at("model.vocab_size", 0, "tokenizer", "[data.tokenizer]")),
        ("vocab_size = 8\ndim = 100", at("model.attention.heads", 8, 100)),
        ("vocab_size = 8\ndim = 24", at("model.attention.heads", "heads = 24", 8, 3, "odd")),
        ("vocab_size = 8\nattention.kv_heads = 3", at("model.attention.kv_heads", 3, "heads", 8)),
        ("vocab_size = 8\nattention.head_dim = 7", at("model.attention.head_dim", 7, "odd")),
        (
            'vocab_size = 8\nattention.qk_norm_offset = 1\nattention.qk_norm = "layer"',
            at("model.attention.qk_norm_offset", 1, "layer norms", '"head"'),
        ),
        (
            "vocab_size = 8\nlearned_positions = 15",
            at("model.learned_positions", 15, "train.seq_len = 16"),
        ),
        (
            'vocab_size = 8\nnorm_placement = "shared"',
            at("model.norm_placement", 'model.residual = "parallel"'),
        ),
        (
            'vocab_size = 8\nattention.qk_norm = "every"',
            at("model.attention.qk_norm", "'head'", "'all'", "'every'"),
        ),
        ("vocab_size = 8\nnorm.offset = 2", at("model.norm.offset", 0, 1, 2)),
        (
            'vocab_size = 8\nattention.documents = "varlen"',
            at("model.attention.documents", "varlen", "torch", "cpu"),
        ),
        (
            'vocab_size = 8\nattention.backend = "math"\nattention.documents = "segments"',
            at("model.attention.documents", "segments", "math", "cpu"),
        ),
        (
            'vocab_size = 8\nattention.backend = "cudnn"',
            at("model.attention.backend", "cudnn", "cpu", "float32", "auto", "flash", "math", "gemm"),
        ),
        (
            'vocab_size = 8\n[model.attention.rope]\ntype = "llama3"\nhigh_freq_factor = 0.5',
            at("model.attention.rope.high_freq_factor", 0.5, "low_freq_factor", 1.0),
        ),
        (
            'vocab_size = 8\n[model.attention.rope]\ntype = "yarn"\nfactor = 2.0\n'
            "original_max_position_embeddings = 8\nbeta_fast = 0.5",
            at("model.attention.rope.beta_fast", 0.5, "beta_slow", 1.0),
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_built(
    load_model: LoadModel, toml: str, expected: ExpectedProblem
) -> None:
    with refuses_all(expected):
        load_model(toml)


def test_kv_heads_must_divide_by_the_tensor_parallel_degree() -> None:
    job = SimpleNamespace(train=SimpleNamespace(device="auto"))
    problems = GroupedQueryAttention(heads=8, kv_heads=2).problems(job, SimpleNamespace(tp=4))
    check_problems(problems, at("kv_heads", 2, "degree 4"))


def test_the_vocabulary_is_the_tokenizers(make_model: Callable[..., Any], make_context: Callable[..., Any]) -> None:
    context = make_context(tokenizer=SimpleNamespace(vocab_size=77))
    assert make_model(context, vocab_size=0).embedding.weight.shape == (77, 32)
    assert make_model(context, vocab_size=128).head.weight.shape == (128, 32)
    with refuses("model.vocab_size", 64, 77):
        make_model(context, vocab_size=64)
    with refuses("model.vocab_size", "tokenizer"):
        make_model(vocab_size=0)


def test_a_backend_that_cannot_run_is_refused_at_build(
    make_model: Callable[..., Any], make_context: Callable[..., Any]
) -> None:
    attention = GroupedQueryAttention(backend="flash")
    with refuses("model.attention.backend", "flash", "cuda", "float32", "layers.0.attention"):
        make_model(make_context(device=torch.device("cuda")), attention=attention)


TABLE = Table(
    "today, here",
    [
        Measurement("cpu", "bfloat16", 512, 32, {"flash": 2.0, "gemm": 1.0}),
        Measurement("cpu", "bfloat16", 2048, 32, {"flash": 4.0, "gemm": 5.0}),
        Measurement("cpu", "bfloat16", 2048, 128, {"flash": 9.0, "gemm": 8.0}),
    ],
)


def test_heads_that_flash_does_not_compute_on_cuda_have_another_kernel(make_context: Callable[..., Any]) -> None:
    context = make_context(device=torch.device("cuda"), dtype=torch.bfloat16)
    kernels = {width: choose_backend("auto", context, width).kernel for width in (256, 512)}
    assert kernels[512] in ("efficient", "math", "gemm")
    assert choose_backend("auto", context, 512, Scoring(soft_cap=1.0)).kernel in ("math", "gemm")
    assert choose_backend("flash", context, 256).kernel == "flash"
    with refuses("model.attention.backend", "flash", 256, 512, "efficient"):
        choose_backend("flash", context, 512)


@pytest.mark.parametrize(
    ("length", "head_dim", "kernel"),
    [(512, 32, "gemm"), (2048, 32, "flash"), (900, 32, "gemm"), (1200, 32, "flash"), (65536, 80, "gemm")],
)
def test_auto_takes_the_fastest_at_the_nearest_shape(length: int, head_dim: int, kernel: str) -> None:
    assert TABLE.choose("cpu", "bfloat16", length, head_dim).kernel == kernel


@pytest.mark.parametrize(("products", "kernel"), [("BLAS", "flash"), ("oneDNN", "gemm")])
def test_auto_looks_at_measurements_with_the_same_library_of_products(products: str, kernel: str) -> None:
    rows = [
        Measurement("cpu", "float32", 512, 32, {"flash": 2.0, "gemm": 3.0}, products="BLAS"),
        Measurement("cpu", "float32", 512, 32, {"flash": 2.0, "gemm": 1.0}, products="oneDNN"),
    ]
    assert Table("today, here", rows).choose("cpu", "float32", 512, 32, products).kernel == kernel


def test_the_committed_table_knows_both_libraries_of_products() -> None:
    measured = {row.products for row in committed_table().rows if (row.device, row.dtype) == ("cpu", "float32")}
    assert measured == {"BLAS", "oneDNN"}


def test_what_is_not_measured_is_left_to_torch() -> None:
    choice = TABLE.choose("cuda", "bfloat16", 512, 32)
    assert choice.kernel == "torch"
    assert not lacks(choice.why, "bfloat16", "cuda")


def test_the_committed_table_covers_the_promised_lengths() -> None:
    shapes = {(row.dtype, row.seq_len, row.head_dim) for row in committed_table().rows if row.device == "cpu"}
    assert {(d, s, w) for d in ("bfloat16", "float32") for s in (128, 512, 1024, 2048) for w in (32, 64)} <= shapes


def test_choices_are_told_once(make_model: Callable[..., Any]) -> None:
    ((what, kernel, why),) = make_model(attention=GroupedQueryAttention(heads=4, backend="math")).backend_choices(16)
    assert (what, kernel) == ("attention", "math")
    assert "job" in why
    ((what, kernel, why),) = make_model(dtype=torch.bfloat16).backend_choices(16)
    assert (what, kernel) == ("attention", "gemm")
    assert not lacks(why, "length 128", "head_dim 32", "flash")


# --- documents that share a sequence ---------------------------------------------------------------------------------


DOCUMENT_TABLE = DocumentTable(
    "today, here",
    [64, 256],
    [
        DocumentMeasurement("cpu", "float32", "flash", 256, 32, {"segments": [3.0, 3.0], "mask": [2.0, 2.0]}),
        DocumentMeasurement("cpu", "float32", "flash", 1024, 32, {"segments": [1.0, 4.0], "mask": [2.0, 5.0]}),
        DocumentMeasurement("cpu", "float32", "gemm", 1024, 32, {"segments": [9.0, 9.0], "mask": [2.0, 5.0]}),
    ],
)


@pytest.mark.parametrize(
    ("kernel", "length", "way"), [("flash", 128, "mask"), ("flash", 900, "segments"), ("gemm", 900, "mask")]
)
def test_documents_are_kept_apart_in_the_way_that_is_fastest_with_the_kernel(
    kernel: str, length: int, way: str
) -> None:
    assert DOCUMENT_TABLE.choose("cpu", "float32", kernel, length, 32).way == way


def test_the_reason_names_the_documents_and_their_mean_times() -> None:
    why = DOCUMENT_TABLE.choose("cpu", "float32", "flash", 900, 32).why
    expected = (
        "fastest for documents of 64 to 256 at length 1024, head_dim 32: segments 2.5 ms, mask 3.5 ms; today, here"
    )
    assert why == expected


@pytest.mark.parametrize(
    ("device", "dtype", "kernel", "way", "facts"),
    [
        ("cpu", "float64", "torch", "segments", ["less than mask", "float64", "cpu"]),
        ("cuda", "bfloat16", "torch", "varlen", ["less than mask", "bfloat16", "cuda"]),
        ("cuda", "bfloat16", "flash", "varlen", ["only way", "flash"]),
        ("cuda", "float32", "torch", "mask", ["only way", "torch"]),
    ],
)
def test_where_nothing_is_measured_the_way_that_computes_least_is_taken(
    device: str, dtype: str, kernel: str, way: str, facts: list[str]
) -> None:
    choice = DOCUMENT_TABLE.choose(device, dtype, kernel, 512, 32)
    assert choice.way == way
    assert not lacks(choice.why, *facts)


def test_the_way_is_told_where_the_job_keeps_documents_apart(
    make_model: Callable[..., Any], make_context: Callable[..., Any]
) -> None:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, backend="flash", documents="segments")
    expected = ("documents", "segments", "set by the job")
    assert expected in make_model(make_context(packs=True), attention=attention).backend_choices(16)
    assert expected not in make_model(make_context(packs=False), attention=attention).backend_choices(16)


def test_a_way_that_does_not_go_with_the_kernel_is_refused_at_build(make_model: Callable[..., Any]) -> None:
    message = (
        r"varlen does not go with the kernel flash on cpu in float32; there are auto, segments, mask \(building lay"
    )
    with pytest.raises(JobError, match=message):
        make_model(attention=GroupedQueryAttention(backend="flash", documents="varlen"))


def test_the_committed_table_of_documents_covers_the_promised_lengths() -> None:
    table = document_backends.committed_table()
    shapes = {(row.dtype, row.kernel, row.seq_len) for row in table.rows if row.device == "cpu"}
    assert {(d, k, s) for d in ("bfloat16", "float32") for k in ("flash", "gemm") for s in (1024, 2048)} <= shapes
    assert table.documents == [64, 256, 1024]
    assert all(len(times) == 3 for row in table.rows for times in row.milliseconds.values())


def test_components_need_no_torch() -> None:
    modules = "forge_plugin_transformer, forge_plugin_transformer.huggingface_names"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
