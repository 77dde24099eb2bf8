"""Ranks that share a model generate the tokens of one process."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from attrs import frozen

from forge_core.contracts.errors import ForgeError
from forge_core.plugins.catalog import Catalog
from forge_kit.generation import joint_generation
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_moe import MoE
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, LongRope, NoRope, Transformer
from forge_plugin_transformer.modules.rotary import rotate
from forge_testing.layouts import LayoutCase
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming
from forge_testing.runs import advance, tiny_run

VOCABULARY, END = 32, 31
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.0, top_k=12, top_p=0.95)
MODEL = {"dim": 16, "vocab_size": VOCABULARY, "init_std": 0.5}
LAYOUTS = {
    "fsdp": {"fsdp": {}},
    "fsdp, units kept": {"fsdp": {"reshard_after_forward": False}},
    "tp": {"tp": {"degree": 2}},
    "tp, whole": {"tp": {"degree": 2, "sequence_parallel": False, "loss_parallel": False}},
    "pp": {"pp": {"degree": 2}},
    "pp, interleaved": {"pp": {"degree": 2, "schedule": "interleaved_1f1b"}},
    "cp, ring": {"cp": {"degree": 2}},
    "cp, ulysses": {"cp": {"degree": 2, "method": "ulysses"}},
    "compiled fsdp": {"fsdp": {}, "compile": {"backend": "eager"}},
    "compiled pp": {"pp": {"degree": 2}, "compile": {"backend": "eager"}},
}
if splits_backward(torch.__version__):
    LAYOUTS["pp, in a V"] = {"pp": {"degree": 2, "schedule": "zbv"}}
TWO_BY_TWO = {
    "fsdp x tp": {"fsdp": {}, "tp": {"degree": 2}},
    "fsdp x pp": {"fsdp": {}, "pp": {"degree": 2}},
    "tp x pp": {"tp": {"degree": 2}, "pp": {"degree": 2}},
    "fsdp x ep": {"fsdp": {}, "ep": {"degree": 2}},
}


def model(**parts):
    return Transformer(**MODEL | {"layers": 4, "attention": GroupedQueryAttention(heads=4, kv_heads=2)} | parts)


def built(folder, parallel=None, **changes):
    keys = {"model": model(), "precision": "fp64", "global_batch_size": 8, "micro_batch_size": 1}
    stages = LayoutCase(ranks=2, parallel=parallel or {})
    run = tiny_run(folder, **keys | changes, parallel=stages.stages(Catalog.installed()))
    run.model.eval()
    return run


def rows(network, prompts=PROMPTS, **options):
    return [generate(network, prompts, 12, END, sampling, seed=5, **options) for sampling in (GREEDY, DRAWN)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return rows(built(tmp_path_factory.mktemp("one")).model)


def test_rows_end_at_different_times(expected):
    assert len({len(row) for row in expected[1]}) > 1


def check_layouts(folder, names, expected, **parts):
    """Two ranks, started once, generate the tokens of one process under each layout."""

    def rank(number):
        return {name: rows(built(folder, LAYOUTS[name], **parts).model) for name in names}

    assert run_on_ranks(2, rank) == [dict.fromkeys(names, expected)] * 2


def test_two_ranks(tmp_path, expected):
    def rank(number):
        networks = {name: built(tmp_path, stages).model for name, stages in LAYOUTS.items()}
        return {name: (rows(network), rows(network, use_cache=False)) for name, network in networks.items()}

    assert run_on_ranks(2, rank) == [dict.fromkeys(LAYOUTS, (expected, expected))] * 2


def test_four_ranks(tmp_path, expected):
    experts = {"model": model(ffn=MoE(experts=4))}
    parts = {name: experts if "ep" in name else {} for name in TWO_BY_TWO}

    def rank(number):
        return {name: rows(built(tmp_path, stages, **parts[name]).model) for name, stages in TWO_BY_TWO.items()}

    mixed = rows(built(tmp_path, **experts).model)
    assert run_on_ranks(4, rank) == [{name: mixed if parts[name] else expected for name in TWO_BY_TWO}] * 4


def test_latent_attention(tmp_path):
    parts = {"model": model(attention=MultiHeadLatentAttention(heads=4))}
    check_layouts(tmp_path, ["tp", "pp", "cp, ring"], rows(built(tmp_path, **parts).model), **parts)


def test_learned_positions_and_norms_over_all_heads(tmp_path):
    attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all")
    keys = {"norm_placement": "both", "residual": "parallel", "learned_positions": 32, "logit_soft_cap": 5.0}
    parts = {"model": model(attention=attention, **keys)}
    names = ["fsdp", "tp", "pp, interleaved", "cp, ring"]
    check_layouts(tmp_path, names, rows(built(tmp_path, **parts).model), **parts)


@frozen(kw_only=True)
class LongInFirstLayers(LongRope):
    """The layers of the second half have no encoding."""

    def build(self, context, head_dim):
        return super().build(context, head_dim) if context.layer < 2 else NoRope().build(context, head_dim)


def test_rows_that_become_long_whichever_layers_know_it(tmp_path):
    rope = LongInFirstLayers(
        short_factor=(1.0, 1.5), long_factor=(2.0, 9.0), original_max_position_embeddings=8, factor=2.0
    )
    parts = {"model": model(attention=GroupedQueryAttention(heads=4, kv_heads=2, rope=rope))}
    network = built(tmp_path, **parts).model
    expected = rows(network)
    assert expected == rows(network, use_cache=False)
    check_layouts(tmp_path, ["fsdp", "tp", "pp", "cp, ring"], expected, **parts)


def test_windows_patterns_sinks_and_other_blocks(tmp_path):
    full, window = (GroupedQueryAttention(heads=4, kv_heads=2, sinks=True, window=window) for window in (0, 4))
    pattern = AttentionPattern(layers=("full", "window"), kinds={"full": full, "window": window})
    blocks = {"norm_placement": "both", "embedding_scale": 4.0, "logit_soft_cap": 5.0}
    parts = {"model": model(attention=pattern, **blocks)}
    check_layouts(tmp_path, ["fsdp", "tp", "pp", "cp, ring"], rows(built(tmp_path, **parts).model), **parts)


def attend_by_the_mixer(network):
    """Let attention decode by its mixer, over all positions so far, as one of a third party may."""

    def attend(self, q, k, v, batch, cache):
        positions = torch.arange(cache.used, cache.used + q.shape[1]).expand(len(q), -1)
        turns = self.rotary(q.shape[1], positions)
        new = (rotate(q, *turns), rotate(k, *turns), v)
        cache.used += q.shape[1]
        before = vars(cache).get("all", [part[:, :0] for part in new])
        cache.all = [torch.cat(pair, 1) for pair in zip(before, new, strict=True)]
        return self.core(*cache.all, {})[:, -q.shape[1] :]

    for layer in network.layers.values():
        layer.attention._attend_cached = MethodType(attend, layer.attention)
    return network


@pytest.mark.parametrize("name", ["cp, ring", "cp, ulysses"])
def test_attention_that_decodes_by_its_mixer(name, tmp_path):
    prompts = [[5, 6, 7, 8]]
    expected = rows(built(tmp_path).model, prompts, use_cache=False)

    def rank(number):
        network = attend_by_the_mixer(built(tmp_path, LAYOUTS[name]).model)
        replaced = network.layers["0"].attention.core
        written = rows(network, prompts, use_cache=False)
        return written, network.layers["0"].attention.core is replaced

    assert run_on_ranks(2, rank) == [(expected, True)] * 2


def test_ranks_of_fsdp_have_rows_of_their_own_that_end_at_different_times(tmp_path):
    prompts = [[[1, 2, 3]], [[4], [5, 6, 7, 8, 9]]]
    network = built(tmp_path).model
    expected = [rows(network, own) for own in prompts]
    # One rank's row ends after a token, the other's never do: the first rank goes on with it.
    never = next(end for end in range(VOCABULARY) if {*map(len, rows_until(network, prompts[1], end))} == {12})
    tokens = (rows_until(network, prompts[0], never)[0][1], never)
    ends = [rows_until(network, own, token) for own, token in zip(prompts, tokens, strict=True)]

    def rank(number):
        network = built(tmp_path, {"fsdp": {}}).model
        return rows(network, prompts[number]), rows_until(network, prompts[number], tokens[number])

    assert run_on_ranks(2, rank) == list(zip(expected, ends, strict=True))
    assert [len(row) for own in ends for row in own] == [1, 12, 12]


def rows_until(network, prompts, end):
    return generate(network, prompts, 12, end, GREEDY)


def test_training_goes_on_with_fresh_weights_after_a_generation(tmp_path):
    def losses(parallel, generates):
        run = built(tmp_path, parallel, micro_batch_size=2)
        if generates:
            generate(run.model, PROMPTS, 4, END, GREEDY)
        run.model.train()
        advance(run, 2)
        return [parameter.sum().item() for parameter in map(local, run.model.parameters())]

    def local(parameter):
        return parameter.to_local() if hasattr(parameter, "to_local") else parameter

    layouts = ({"fsdp": {"reshard_after_forward": False}}, {"tp": {"degree": 2}}, {"pp": {"degree": 2}})

    def rank(number):
        return [[losses(parallel, generates) for parallel in layouts] for generates in (False, True)]

    for without, after in run_on_ranks(2, rank):
        assert after == without


def test_draws_without_a_seed_are_refused_where_ranks_must_draw_alike(tmp_path):
    def rank(number):
        network = built(tmp_path, {"tp": {"degree": 2}}).model
        with pytest.raises(ForgeError, match=naming("seed")):
            generate(network, PROMPTS, 4, END, DRAWN)
        return generate(network, PROMPTS, 12, END, GREEDY)  # nothing is drawn

    one, other = run_on_ranks(2, rank)
    assert one == other


def test_logits_are_those_of_the_whole_vocabulary_on_every_rank(tmp_path):
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "positions": torch.arange(3)[None]}

    def logits(network):
        with torch.no_grad():
            return joint_generation(network).next_logits(batch, network.new_cache(1, 3))

    whole = logits(built(tmp_path).model)
    names = ("tp", "pp")
    for of_rank in run_on_ranks(2, lambda rank: [logits(built(tmp_path, LAYOUTS[name]).model) for name in names]):
        for found in of_rank:
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
