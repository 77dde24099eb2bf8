"""What the suite of models says of wrong ones."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from torch import nn

from forge_core.contracts.components import ModelComponent
from forge_testing.refusals import naming
from forge_testing.suites import ModelSuite
from forge_testing.tiny_model import SplittableNetwork

pytestmark = pytest.mark.thorough


class Network(SplittableNetwork):
    """Right, and altered by subclasses."""

    def __init__(self, context):
        super().__init__(16, 2, 32, context.dtype)


class OnTheCPU(Network):
    def __init__(self, context):
        super().__init__(context)
        self.register_buffer("table", torch.zeros(3, device="cpu"))


class MoreInForward(Network):
    def forward(self, batch):
        return 2 * super().forward(batch)


class OtherKeys(Network):
    def __init__(self, context):
        super().__init__(context)
        self.layers = nn.ModuleDict({f"layer{key}": layer for key, layer in self.layers.items()})


class BareHead(Network):
    def __init__(self, context):
        super().__init__(context)
        self.head = nn.Linear(16, 32)


class Wide(Network):
    def embed(self, batch):
        return (super().embed(batch)[0].float(),)


class WideNorm(Network):
    """A norm with weights that FSDP would have rounded."""

    def finish(self, carry, batch):
        (x,) = carry
        return self.norm(x.float()).to(x.dtype)


class NoTuple(Network):
    def __init__(self, context):
        super().__init__(context)
        self.layers = nn.ModuleDict()

    def embed(self, batch):
        return super().embed(batch)[0]

    def finish(self, carry, batch):
        return super().finish((carry,), batch)


class Uninitialised(Network):
    """A module that fills nothing of its own."""

    def __init__(self, context):
        super().__init__(context)
        self.norm = Scale()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16))

    def forward(self, x):
        return x * self.weight

    def init_parameter(self, name, fill):
        pass

    def init_buffers(self, device):
        pass


class RandomBuffer(Network):
    def __init__(self, context):
        super().__init__(context)
        self.register_buffer("table", torch.empty(3))

    def init_parameter(self, name, fill):
        raise NotImplementedError

    def init_buffers(self, device):
        self.table = torch.randn(3, device=device)


class Unseeded(Network):
    def __init__(self, context):
        super().__init__(context)
        for module in self.modules():
            module.init_parameter = lambda name, fill: fill.constant(0.5)
            module.init_buffers = lambda device: None


class OtherNames(Network):
    def ends(self):
        return ["embed_tokens"], ["norm", "head"]


class PartOfAPlan(Network):
    def tensor_parallel_plan(self):
        return {name: way for name, way in super().tensor_parallel_plan().items() if name != "norm"}


class NoTie(Network):
    def tied_parameters(self):
        return {"head.weight": "embedding.weight"}


class StrangeRole(Network):
    def parameter_roles(self):
        return {"embeddings.weight": "embedding"}


class NoWork(Network):
    def flops(self, seq_len):
        return 0.0


class MeanOfTheRow(Network):
    """Every position sees its whole row: documents leak, and so does the future."""

    def finish(self, carry, batch):
        hidden = super().finish(carry, batch)
        return hidden + hidden.mean(1, keepdim=True)

    def new_cache(self, batch_size, length):
        return None

    def decode(self, batch, cache):
        return self(batch)


class OfTheBatch(Network):
    """Every sequence sees its micro-batch."""

    def finish(self, carry, batch):
        hidden = super().finish(carry, batch)
        return hidden - hidden.mean(0, keepdim=True)


class WrongPlan(Network):
    """A plan by which matrices would see some positions only."""

    def tensor_parallel_plan(self):
        return {**super().tensor_parallel_plan(), "layers.*.pair": "sequence"}


def component_of(network):
    @frozen(kw_only=True)
    class Wrong(ModelComponent):
        layers: int = 2

        def build(self, context):
            return network(context)

    return Wrong()


DECLARED, INITIAL = "test_what_it_declares_is_there", "test_every_tensor_is_initialised_from_the_seed_alone"


@pytest.mark.parametrize(
    ("check", "network", "told"),
    [
        ("test_it_is_built_on_the_meta_device", OnTheCPU, "table has memory; make tensors with torch.empty"),
        ("test_forward_is_the_sum_of_its_parts", MoreInForward, "forward differs from finish(layers(embed(batch))) by"),
        ("test_forward_is_the_sum_of_its_parts", NoTuple, "embed returns a Tensor; a carry is a tuple of tensors"),
        ("test_forward_is_the_sum_of_its_parts", OtherKeys, "keys ['layer0', 'layer1'], which must be ['0', '1']"),
        ("test_the_head_is_a_head", BareHead, "`head` is a Linear without logits, whole and vocab_shard"),
        (
            "test_parameters_are_float32_and_activations_of_the_job",
            Wide,
            "hidden states are torch.float32; give embeddings",
        ),
        ("test_weights_are_used_in_the_compute_dtype", WideNorm, "weights rounded to bf16 change hidden states by"),
        (INITIAL, Uninitialised, "parameter norm.weight is not finite after initialisation"),
        (INITIAL, RandomBuffer, "the initial values of table depend on torch's default generator"),
        (INITIAL, Unseeded, "another seed results in the same initial values; draw them with `fill`"),
        (DECLARED, OtherNames, "ends names 'embed_tokens': no such module"),
        (DECLARED, PartOfAPlan, "tensor_parallel_plan does not name norm, which has parameters"),
        (DECLARED, NoTie, "tied_parameters has head.weight and embedding.weight, which are two parameters"),
        (DECLARED, StrangeRole, "parameter_roles: no parameter 'embeddings.weight'"),
        ("test_its_flops_are_a_number", NoWork, "flops(8) = 0 and flops(512) = 0; they are positive"),
        ("test_documents_of_a_row_do_not_see_each_other", MeanOfTheRow, "attention must stay within a document"),
        ("test_a_cache_changes_nothing", MeanOfTheRow, "differ by"),
    ],
)
def test_what_is_wrong_is_told(refusal, check, network, told):
    assert told in refusal(ModelSuite, check, component_of(network))


@pytest.mark.parametrize(
    ("network", "layout", "told"),
    [
        (
            OfTheBatch,
            "replicate2",
            "trains differently under replicate2 than in one process, by Difference(initial=0.0",
        ),
        (WrongPlan, "tp2", "cannot train under tp2: rank "),
    ],
)
def test_layouts_that_differ_are_told(refusal, network, layout, told):
    check = "test_every_layout_trains_like_one_process"
    assert told in refusal(ModelSuite, check, component_of(network), layout, layouts=(layout,))


def test_a_layout_whose_protocol_the_model_lacks_is_skipped():
    class TestRight(ModelSuite):
        component = component_of(Network)

    with pytest.raises(pytest.skip.Exception, match=naming("cp2", "sequence_mixers()")):
        TestRight().test_every_layout_trains_like_one_process("cp2")
