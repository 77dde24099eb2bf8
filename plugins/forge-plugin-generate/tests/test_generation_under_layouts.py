"""Ranks that share a model generate the tokens of one process."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from attrs import frozen

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.generation import joint_generation
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_moe import MoE
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_transformer import (
    AttentionPattern,
    FFNPattern,
    GroupedQueryAttention,
    HyperConnections,
    LongRope,
    NoAttention,
    NoFFN,
    NoRope,
    ParallelAttention,
    SwiGLU,
    Transformer,
)
from forge_plugin_transformer.modules.rotary import rotate
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming
from forge_testing.runs import advance, tiny_run

VOCABULARY, END = 32, 31
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
NEW = 8
"""Tokens to generate: all rows grow beyond the windows, and beyond the original length of `LONG`."""
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
    "compiled pp": {"pp": {"degree": 2}, "compile": {"backend": "eager"}},
}
if splits_backward(torch.__version__):
    LAYOUTS["pp, in a V"] = {"pp": {"degree": 2, "schedule": "zbv"}}
TWO_BY_TWO = {
    "fsdp x tp": {"fsdp": {}, "tp": {"degree": 2}},
    "fsdp x pp": {"fsdp": {}, "pp": {"degree": 2}},
    "tp x pp": {"tp": {"degree": 2}, "pp": {"degree": 2}},
}


def model(**parts):
    return Transformer(**MODEL | {"layers": 4, "attention": GroupedQueryAttention(heads=4, kv_heads=2)} | parts)


def built(folder, parallel=None, **changes):
    return network_of(folder, {"parallel": LayoutCase(ranks=2, parallel=parallel or {}).stages(installed()), **changes})


def network_of(folder, changes):
    keys = {"model": model(), "precision": "fp64", "global_batch_size": 8, "micro_batch_size": 1}
    run = tiny_run(folder, **keys | changes)
    run.model.eval()
    return run


def rows(network, prompts=PROMPTS, **options):
    return [generate(network, prompts, NEW, END, sampling, seed=5, **options) for sampling in (GREEDY, DRAWN)]


def observation(**parts):
    return lambda folder, changes: rows(network_of(folder, {**parts, **changes}).model)


def with_and_without_a_cache(folder, changes):
    network = network_of(folder, changes).model
    return rows(network), generate(network, PROMPTS, NEW, END, GREEDY, use_cache=False)


def same_tokens(ranks, alone):
    assert ranks == [alone] * len(ranks)


def tokens_of_the_cache_too(ranks, alone):
    (greedy, drawn), uncached = alone
    assert len({len(row) for row in drawn}) > 1, "rows end at different times"
    assert greedy == uncached
    same_tokens(ranks, alone)


def named(*names):
    return {name: LayoutCase(ranks=2, parallel=LAYOUTS[name], micro_batch_size=1) for name in names}


def four(**tables):
    return {name: LayoutCase(ranks=4, parallel=table, micro_batch_size=1) for name, table in tables.items()}


@frozen(kw_only=True)
class LongInFirstLayers(LongRope):
    """The layers of the second half have no encoding."""

    def build(self, context, head_dim):
        return super().build(context, head_dim) if context.layer < 2 else NoRope().build(context, head_dim)


LONG = LongInFirstLayers(
    short_factor=(1.0, 1.5), long_factor=(2.0, 9.0), original_max_position_embeddings=8, factor=2.0
)
LEARNED = model(
    attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all"),
    norm_placement="both",
    residual="parallel",
    learned_positions=32,
    logit_soft_cap=5.0,
)
SINKS = {
    name: GroupedQueryAttention(heads=4, kv_heads=2, sinks=True, window=window)
    for name, window in {"full": 0, "window": 4}.items()
}
PATTERN = model(
    attention=AttentionPattern(layers=("full", "window"), kinds=SINKS),
    norm_placement="both",
    embedding_scale=4.0,
    logit_soft_cap=5.0,
)
BOTH = ParallelAttention(
    mixers={"near": GroupedQueryAttention(heads=4, kv_heads=2, window=4), "full": GroupedQueryAttention(heads=2)},
    scales={"near": 0.5},
)
APART = model(
    attention=AttentionPattern(layers=("both", "none"), kinds={"both": BOTH, "none": NoAttention()}),
    ffn=FFNPattern(layers=("none", "dense"), kinds={"none": NoFFN(), "dense": SwiGLU()}),
)
SEVERAL = named("tp", "pp", "cp, ring")
test_layouts = layout_law(
    Case("model", observe=with_and_without_a_cache, compare=tokens_of_the_cache_too, layouts=named(*LAYOUTS)),
    Case("model", observe=observation(), compare=same_tokens, layouts=four(**TWO_BY_TWO)),
    Case(
        "experts",
        observe=observation(model=model(ffn=MoE(experts=4))),
        compare=same_tokens,
        layouts=four(**{"fsdp x ep": {"fsdp": {}, "ep": {"degree": 2}}}),
    ),
    Case(
        "latent attention",
        observe=observation(model=model(attention=MultiHeadLatentAttention(heads=4))),
        compare=same_tokens,
        layouts=named("tp", "pp", "cp, ring"),
    ),
    Case(
        "learned positions and norms over all heads",
        observe=observation(model=LEARNED),
        compare=same_tokens,
        layouts=named("tp", "pp, interleaved", "cp, ring"),
    ),
    Case(
        "residual streams, all of which a pipeline sends",
        observe=observation(model=model(residual_connection=HyperConnections(streams=3))),
        compare=same_tokens,
        layouts=named("tp", "pp"),
    ),
    Case(
        "layers of one part, mixers side by side",
        observe=observation(model=APART),
        compare=same_tokens,
        layouts=SEVERAL,
    ),
    Case("windows, patterns and sinks", observe=observation(model=PATTERN), compare=same_tokens, layouts=SEVERAL),
    Case(
        "rows that become long, whichever layers see it",
        observe=observation(model=model(attention=GroupedQueryAttention(heads=4, kv_heads=2, rope=LONG))),
        compare=same_tokens,
        layouts=SEVERAL,
    ),
)


def test_rows_that_become_long_are_the_same_without_a_cache(tmp_path):
    network = built(tmp_path, model=model(attention=GroupedQueryAttention(heads=4, kv_heads=2, rope=LONG))).model
    assert rows(network) == rows(network, use_cache=False)


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
    never = next(end for end in range(VOCABULARY) if {*map(len, rows_until(network, prompts[1], end))} == {NEW})
    tokens = (rows_until(network, prompts[0], never)[0][1], never)
    ends = [rows_until(network, own, token) for own, token in zip(prompts, tokens, strict=True)]

    def rank(number):
        network = built(tmp_path, {"fsdp": {}}).model
        return rows(network, prompts[number]), rows_until(network, prompts[number], tokens[number])

    assert run_on_ranks(2, rank) == list(zip(expected, ends, strict=True))
    assert [len(row) for own in ends for row in own] == [1, NEW, NEW]


def rows_until(network, prompts, end):
    return generate(network, prompts, NEW, end, GREEDY)


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
        return generate(network, PROMPTS, NEW, END, GREEDY)  # nothing is drawn

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
