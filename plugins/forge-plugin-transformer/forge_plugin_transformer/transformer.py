"""The components `transformer` and, within it, its multi-token prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs
from attrs import define, field, frozen
from attrs.validators import ge, gt, le

from forge_core.contracts.components import (
    LossComponent,
    ModelComponent,
    SchedulerComponent,
    TrainingHook,
    default_type,
    when_resumed,
)
from forge_core.contracts.errors import JobError, Problem
from forge_kit.optim.fields import DEPTH, TRAINING_ONLY
from forge_plugin_transformer.altup import AltUp
from forge_plugin_transformer.canon import Canon
from forge_plugin_transformer.kinds import (
    AttentionComponent,
    FFNComponent,
    InitStd,
    NormComponent,
    ResidualComponent,
)
from forge_plugin_transformer.per_layer_inputs import PerLayerInputs
from forge_plugin_transformer.residual import Add

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext, StepContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_kit.nn.modules import Embedding, LinearHead
    from forge_plugin_transformer.modules.block import Block
    from forge_plugin_transformer.modules.multi_token import PredictionBlock, Predictions


NORMS: Mapping[str, Sequence[str]] = {
    "pre": ("attention_norm", "ffn_norm"),
    "post": ("attention_post_norm", "ffn_post_norm"),
    "both": ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"),
    "shared": ("attention_norm",),
}
"""Norms of a block by `norm_placement`."""


def _weight(_instance: object, _attribute: object, value: float | SchedulerComponent) -> None:
    if not isinstance(value, SchedulerComponent) and value < 0:
        raise ValueError(f"must be >= 0, or a schedule, got {value}")


@frozen(kw_only=True)
class MultiTokenPrediction:
    """Modules that predict tokens after the next, one after the other (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Module k has a norm for the states of the previous module (for the first, the model's states), one for the embedding
    of the k-th next token, a matrix that joins the two, a block like the model's layers, and a last norm. Embedding and
    head are the model's. Its targets are the labels k positions later, in the same document. Modules run in training
    only, but for proposals in generation (`generate --speculate`): the reported loss, evaluations and texts are the
    model's own.
    """

    depth: int = field(default=1, validator=DEPTH)
    """Number of modules, each of which predicts one token further ahead."""
    weight: float | SchedulerComponent = field(default=0.3, validator=_weight, metadata=when_resumed("flag"))
    """Factor on the mean of the modules' losses in the objective: with one module, the weight of its targets relative
    to the next-token targets. A table makes it a schedule; the weight of a step is logged as `mtp/weight`.
    DeepSeek-V3 has 0.3 for two thirds of its tokens, then 0.1."""
    loss: LossComponent = default_type("forge-plugin-losses/chunked_cross_entropy")
    """`[model.mtp.loss]`: the loss of a module. Only its objective is used; its metrics are not logged."""

    def weights(self, context: BuildContext) -> Callable[[int], float]:
        """Returns a function from completed steps to the weight of the next."""
        weight = self.weight
        if not isinstance(weight, SchedulerComponent):
            return lambda completed: weight
        schedule, total = context.build(weight), context.job.train.steps
        return lambda completed: schedule(completed, total)

    def problems(self, job: Job) -> Iterable[Problem]:
        """Yields problems; paths are relative to this table."""
        if self.depth >= job.train.seq_len:
            message = f"{self.depth} leaves no targets: sequences have train.seq_len = {job.train.seq_len} positions"
            yield Problem("depth", f"{message}; lower it, or lengthen them")


@define(kw_only=True, slots=False)
class PredictionWeight(TrainingHook):
    """Sets the weight of multi-token prediction before each step, by its schedule."""

    def on_step_begin(self, context: StepContext) -> None:
        """Sets the weight of step `context.step`, which follows `context.step - 1` completed ones."""
        from forge_plugin_transformer.modules.multi_token import Predictions

        for module in context.model.modules():  # type: ignore[attr-defined]
            if isinstance(module, Predictions):
                module.begin_step(context.step - 1)


@frozen(kw_only=True)
class Borrowed(AttentionComponent):
    """The attention of a layer without keys and values."""

    attention: AttentionComponent

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns the module that attends to keys and values of another layer."""
        return self.attention.build_borrowing(context, dim, init)


@frozen(kw_only=True)
class Transformer(ModelComponent):
    """Decoder-only transformer of residual blocks; by default normalised before each part, as Llama, Qwen, Mistral."""

    dim: int = field(default=256, validator=[gt(0), le(1 << 24)])  # a thousand times the published widths
    """Width of the residual stream."""
    layers: int = field(default=6, validator=DEPTH)
    """Number of blocks, each an attention and a feed-forward part, or one of them."""
    vocab_size: int = field(default=0, validator=ge(0))
    """Rows of the embedding table and of the head; 0: the tokenizer's."""
    attention: AttentionComponent = default_type("forge-plugin-transformer/gqa")
    """`[model.attention]`: mixes positions. Every layer builds its own, and may depend on its number. A `pattern` gives
    layers different ones, or none."""
    ffn: FFNComponent = default_type("forge-plugin-transformer/swiglu")
    """`[model.ffn]`: transforms each position separately. A `pattern` gives layers different ones, or none."""
    norm: NormComponent = default_type("forge-plugin-transformer/rmsnorm")
    """`[model.norm]`: of attention, of the feed-forward part, and before the head."""
    norm_placement: Literal["pre", "post", "both", "shared"] = "pre"
    """Where a block normalises attention and feed-forward part. pre: their input. post: their output, before it is
    added to the residual stream (OLMo 2). both: each has a norm before and one after it (Gemma 2 and 3). shared: their
    input, by one norm for both, with `residual = "parallel"` (phi-1 and 2, Cohere)."""
    residual: Literal["sequential", "parallel"] = "sequential"
    """Whether the feed-forward part of a block reads what attention has been added to, or, parallel, what attention
    reads, so that both are added at once (GPT-NeoX, Pythia)."""
    residual_connection: ResidualComponent = default_type("forge-plugin-transformer/add")
    """`[model.residual_connection]`: how the result of a part joins the residual stream. Each part of each layer builds
    its own."""
    residual_scale: float = field(default=1.0, validator=gt(0), metadata=when_resumed("flag"))
    """Factor on what attention and feed-forward part add to the residual stream; in Granite, 0.22 and the like."""
    kv_shared_layers: int = field(default=0, validator=ge(0))
    """The last N layers have no keys and values: each attends to those of the last layer before these N with the same
    `[model.attention]`, as it has them after norm and position encoding (Gemma 3n, Gemma 4 E2B and E4B)."""
    per_layer_inputs: PerLayerInputs | None = None
    """`[model.per_layer_inputs]`: an input of each layer beside the residual stream. Without the table, none."""
    canon: Canon | None = None
    """`[model.canon]`: short causal convolutions before and within attention and feed-forward part. Without the table
    there are none."""
    altup: AltUp | None = None
    """`[model.altup]`: residual streams that each layer predicts and corrects. Without the table there is one."""
    laurel_rank: int = field(default=0, validator=ge(0))
    """r > 0: what attention reads, n, and a linear function of it of rank r are added to its output, n +
    norm(R L n), and the sum with the stream is divided by sqrt(2) (LAuReL, Menghani et al. 2024, arXiv 2411.07501;
    Gemma 3n)."""
    layer_scalar: bool = False
    """Whether the residual stream behind each layer is multiplied by a number of that layer (Gemma 4). It is in
    checkpoints, 1 in a new model, and is not trained."""
    learned_positions: int = field(default=0, validator=ge(0))
    """Rows of a table of position embeddings, added to the token embeddings (GPT-2): the longest sequence. 0: there
    is none. The position encoding of attention is separate."""
    embedding_scale: float = field(default=1.0, validator=gt(0), metadata=when_resumed("flag"))
    """Factor on the embeddings of tokens, rounded to the compute dtype; the square root of `dim` in Gemma."""
    logit_scale: float = field(default=1.0, validator=gt(0), metadata=when_resumed("flag"))
    """Factor on the logits."""
    logit_soft_cap: float = field(default=0.0, validator=ge(0), metadata=when_resumed("flag"))
    """Bound c of the logits l, which become c tanh(l / c); 30 in Gemma 2. 0: they are unbounded."""
    head_precision: Literal["train", "fp32"] = field(default="train", metadata=TRAINING_ONLY | when_resumed("safe"))
    """Precision of the logits. train: `train.precision`. fp32: states and weights, rounded to that precision, are
    multiplied in float32, in training as in generation, whose log-probabilities then differ less: of use in
    reinforcement learning (MiniMax-M1, arXiv 2506.13585, section 3.2; ScaleRL, arXiv 2510.13786). No effect with
    `train.precision = "fp64"`."""
    tie_embeddings: bool = False
    """Whether the head is the embedding table, as one parameter."""
    head_bias: bool = False
    """Whether the head adds a learned bias to the logits (phi-1 and 2)."""
    init_std: float = field(default=0.02, validator=gt(0), metadata=when_resumed("safe"))
    """Standard deviation of all initial matrices, embedding and head included."""
    depth_scaled_init: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether matrices that write into the residual stream are drawn with init_std / sqrt(2 layers) (GPT-2)."""
    mtp: MultiTokenPrediction | None = field(default=None, metadata=TRAINING_ONLY)
    """`[model.mtp]`: modules that predict tokens after the next, in training. Without the table there are none."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks vocabulary, positions, norms, multi-token prediction, and attention against width and depth."""
        if not self.vocab_size and job.data.tokenizer is None:
            message = "0 takes the tokenizer's size, but there is no [data.tokenizer]; add one or give the number"
            yield Problem("vocab_size", message)
        if 0 < self.learned_positions < job.train.seq_len:
            message = f"{self.learned_positions} are fewer than train.seq_len = {job.train.seq_len}"
            yield Problem("learned_positions", f"{message}; raise it, or shorten the sequences")
        if self.norm_placement == "shared" and self.residual != "parallel":
            message = 'one norm for both parts needs parts that read the same input; set model.residual = "parallel"'
            yield Problem("norm_placement", f"{message}, or take another placement")
        if self.norm_placement == "shared" and self.ffn.normalises_input(0):
            message = f"{type(self.ffn).__name__} reads the residual stream, and has norms itself"
            yield Problem("norm_placement", f'{message}; take "pre", "post" or "both"')
        if self.residual == "parallel" and (streams := self.residual_connection.stream_count()) > 1:
            message = f"parallel parts read one stream, and model.residual_connection has {streams}"
            yield Problem("residual", f'{message}; take "sequential", or a residual connection of one stream')
        for problem in (*self.attention.width_problems(self.dim), *self.attention.depth_problems(self.layers)):
            yield problem.below("attention")
        yield from (problem.below("ffn") for problem in self.ffn.depth_problems(self.layers))
        yield from self._part_problems()
        if self.canon is not None:
            yield from (problem.below("canon") for problem in self.canon.problems(self))
        yield from self._carry_problems()
        if self.mtp is not None:
            yield from (problem.below("mtp") for problem in self.mtp.problems(job))
            masks = (getattr(attention, "mask", None) for attention in self.attention.of_layers())
            for mask in dict.fromkeys(type(mask) for mask in masks if mask is not None and not mask.causal):
                message = f"its modules predict later tokens, which {mask.__name__} shows"
                yield Problem("mtp", f"{message}; take a causal mask, or leave the table out")

    @property
    def _parts(self) -> Mapping[str, AttentionComponent | FFNComponent]:
        return {"attention": self.attention, "ffn": self.ffn}

    def _part_problems(self) -> Iterable[Problem]:
        """Checks that every layer has a part, and both where they read the same input."""
        # Modules of multi-token prediction have the numbers behind the layers'
        modules = 0 if self.mtp is None else self.mtp.depth
        for layer in range(self.layers + modules):
            absent = [name for name, part in self._parts.items() if part.left_out(layer)]
            what = f"layer {layer}" if layer < self.layers else f"module {layer - self.layers} of model.mtp"
            if len(absent) == len(self._parts):
                message = f"{what} has neither attention nor a feed-forward part"
                yield Problem("ffn", f'{message}: both have the type "none" there; give it one of them')
                return
            if absent and self.residual == "parallel":
                message = f"parallel parts read one input, and {what} has no {absent[0]}"
                yield Problem("residual", f'{message}; take "sequential"')
                return

    def _residual_additions(self) -> int:
        """Returns how often the layers add to the residual stream."""
        return sum(not part.left_out(layer) for part in self._parts.values() for layer in range(self.layers))

    def _carry_problems(self) -> Iterable[Problem]:
        """Checks that shared keys have a layer that makes them, and what reads a carry of the stream alone."""
        if self.kv_shared_layers >= self.layers:
            message = f"{self.kv_shared_layers} of {self.layers} layers leave none that has keys and values"
            yield Problem("kv_shared_layers", f"{message}; lower it")
        elif without := [layer for layer, source in self.kv_sources().items() if source is None]:
            message = f"layer {without[0]} has attention that no layer has before the last {self.kv_shared_layers}"
            hint = "give one of those the same table, or lower it"
            if not self.attention.of_layer(without[0]).shares_kv:
                kind = type(self.attention.of_layer(without[0])).__name__
                message = f"{kind}, the attention of layer {without[0]}, has none to share"
                hint = 'take type = "gqa", without v_head_dim'
            yield Problem("kv_shared_layers", f"{message}; {hint}")
        every = ("kv_shared_layers", "per_layer_inputs", "altup", "laurel_rank")
        names = [name for name in every if getattr(self, name)]
        connection = type(self.residual_connection)
        for name in ("altup", "laurel_rank"):
            if getattr(self, name) and (connection is not Add or self.residual == "parallel"):
                what = "parallel parts" if self.residual == "parallel" else connection.__name__
                yield Problem(name, f"{what} have another sum in its place; leave one of them out")
        if self.altup is not None and self.altup.active >= self.altup.inputs:
            message = f"{self.altup.active} is no number of {self.altup.inputs} streams, which count from 0"
            yield Problem("altup.active", f"{message}; lower it")
        if names and self.mtp is not None:
            yield Problem(names[0], "modules of multi-token prediction have none; leave it out, or model.mtp")
        if (inputs := self.per_layer_inputs) is not None and 0 < inputs.vocab_size <= inputs.padding_row:
            message = f"{inputs.padding_row} is none of {inputs.vocab_size} rows, which count from 0; lower it"
            yield Problem("per_layer_inputs.padding_row", message)
        if self.per_layer_inputs is not None and (streams := self.residual_connection.stream_count()) > 1:
            message = f"is added to one stream, and model.residual_connection has {streams}"
            yield Problem("per_layer_inputs", f"{message}; leave it out, or take a connection of one stream")

    def kv_sources(self) -> Mapping[int, int | None]:
        """Returns the layers without keys and values, and the layer whose they attend to; None if there is none."""
        first = max(self.layers - self.kv_shared_layers, 0)
        kinds = [self.attention.of_layer(layer) for layer in range(self.layers)]
        return {
            layer: next((n for n in reversed(range(first)) if kinds[n] == kinds[layer] and kinds[n].shares_kv), None)
            for layer in range(first, self.layers)
        }

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Returns a hook if the weight of multi-token prediction is a schedule; a constant needs none."""
        # `Predictions` sets the weight of the first step when it is built, and a constant one stays
        scheduled = self.mtp is not None and isinstance(self.mtp.weight, SchedulerComponent)
        return [PredictionWeight()] if scheduled else []

    def build(self, context: BuildContext) -> Model:
        """Returns a `TransformerModel`; each layer is built with its number in `context.layer`.

        Raises:
            JobError: the vocabulary's size is unknown, or less than the tokenizer's.
        """
        from forge_plugin_transformer.modules.ends import PositionTable
        from forge_plugin_transformer.modules.model import TransformerModel

        vocab_size, rows = self._vocab_size(context), self.learned_positions
        further = self._build_inputs(context, vocab_size)
        model = TransformerModel(
            embedding=self._build_embedding(context, vocab_size),
            positions=PositionTable(rows, self.dim, dtype=context.dtype, std=self.init_std) if rows else None,
            layers={str(number): self._build_layer(context, number) for number in range(self.layers)},
            norm=context.at("norm").build(self.norm, dim=self.dim),
            head=self._build_head(context, vocab_size),
            tied=self.tie_embeddings,
            wide_head=self.head_precision == "fp32",
            streams=self._stream_count(),
            mtp=None if self.mtp is None else self._build_predictions(self.mtp, context),
            **further,
        )
        return cast(
            "Model", model
        )  # its head is a subclass of the type that an assignable protocol member must have exactly

    def _build_embedding(self, context: BuildContext, vocab_size: int) -> Embedding:
        from forge_kit.nn.modules import Embedding
        from forge_plugin_transformer.modules.ends import ScaledEmbedding

        if self.embedding_scale == 1:
            return Embedding(vocab_size, self.dim, dtype=context.dtype, std=self.init_std)
        return ScaledEmbedding(vocab_size, self.dim, scale=self.embedding_scale, dtype=context.dtype, std=self.init_std)

    def _build_head(self, context: BuildContext, vocab_size: int) -> LinearHead:
        head = self._head_of_its_class(vocab_size)
        if self.head_precision == "fp32":
            head.rounded = context.dtype
        return head

    def _head_of_its_class(self, vocab_size: int) -> LinearHead:
        from forge_kit.nn.modules import LinearHead
        from forge_plugin_transformer.modules.ends import BoundedHead

        if self.logit_scale == 1 and not self.logit_soft_cap:  # losses have a faster way for this very class
            return LinearHead(self.dim, vocab_size, bias=self.head_bias, std=self.init_std)
        return BoundedHead(
            self.dim,
            vocab_size,
            scale=self.logit_scale,
            cap=self.logit_soft_cap,
            bias=self.head_bias,
            std=self.init_std,
        )

    def _build_inputs(self, context: BuildContext, vocab_size: int) -> dict[str, Any]:
        """Returns the arguments of the model for what its carry has beside the stream."""
        further: dict[str, Any] = {}
        if self.per_layer_inputs is not None:
            sizes = {"dim": self.dim, "layers": self.layers, "vocab_size": vocab_size}
            here = context.at("per_layer_inputs")
            further["per_layer_inputs"] = self.per_layer_inputs.build(here, self.norm, std=self.init_std, **sizes)
        if self.altup is not None:
            further["altup"] = self.altup.build_ends(self.dim, self.init_std)
        if sources := self._known_sources():
            further["kv_sources"] = {str(layer): str(source) for layer, source in sources.items()}
            # By components, as other pipeline ranks have the layers
            kinds = [self.attention.of_layer(source) for source in sorted({*sources.values()})]
            further["kv_shapes"] = [kind.kv_shape(self.dim, context.layout.tp) for kind in kinds]
        return further

    def _known_sources(self) -> Mapping[int, int]:
        sources = self.kv_sources()
        if lost := [layer for layer, source in sources.items() if source is None]:
            message = f"there are no keys and values for layer {lost[0]} in the layers before the last"
            raise JobError([Problem("model.kv_shared_layers", f"{message} {self.kv_shared_layers}")])
        return {layer: source for layer, source in sources.items() if source is not None}

    def _build_layer(self, context: BuildContext, number: int) -> Block:
        from forge_plugin_transformer.modules.block import CarryingBlock

        here, sources = context.at(f"layers.{number}", layer=number), self._known_sources()
        source = sources.get(number)
        borrowed = Borrowed(attention=self.attention.of_layer(number))
        own = self if source is None else attrs.evolve(self, attention=borrowed)
        block = own._build_block(here)
        if not (sources or self.per_layer_inputs or self.altup or self.laurel_rank):
            return block
        pairs = {layer: pair for pair, layer in enumerate(sorted({*sources.values()}))}
        reader = None
        init = self._initial_deviations()
        if self.per_layer_inputs is not None:
            reader = self.per_layer_inputs.build_reader(here.at("layer_input"), self.norm, dim=self.dim, init=init)
        pair = pairs.get(number if source is None else source)
        return CarryingBlock(
            block,
            layer_input=reader,
            number=number,
            pair=pair,
            lends=number in pairs,
            laurel=self._build_laurel(here.at("laurel"), init),
            altup=self.altup.build(here.at("altup"), self.norm, dim=self.dim, init=init) if self.altup else None,
            streams=self._stream_count(),
        )

    def _build_laurel(self, here: BuildContext, init: InitStd) -> nn.Module | None:
        from forge_plugin_transformer.modules.altup import LearnedResidual

        if not self.laurel_rank:
            return None
        return LearnedResidual(
            self.dim, self.laurel_rank, norm=here.at("norm").build(self.norm, dim=self.dim), init=init
        )

    def _stream_count(self) -> int:
        return self.altup.inputs if self.altup is not None else self.residual_connection.stream_count()

    def _initial_deviations(self) -> InitStd:
        # Scaled so, the variance of the sum does not grow with the depth
        additions = self._residual_additions() if self.depth_scaled_init else 1
        return InitStd(self.init_std, self.init_std / math.sqrt(additions))

    def _build_block(self, here: BuildContext) -> Block:
        from forge_plugin_transformer.modules.block import Block, LayerScalar, LeftOut

        init, layer = self._initial_deviations(), here.layer or 0
        modules: dict[str, nn.Module] = {}
        # Each layer has two parts, unless one is left out, with its norms and its residual connection
        for number, (name, part) in enumerate(self._parts.items(), 2 * layer):
            if part.left_out(layer):
                modules[name] = LeftOut()
                continue
            modules[name] = here.at(name).build(part, dim=self.dim, init=init)
            if self.canon is not None:
                modules[name] = self.canon.added_to(name, modules[name], self.dim)
            residual = f"{name}_residual"
            modules[residual] = self._build_residual(here.at(residual), init, number)
            for norm in NORMS[self.norm_placement]:
                inside = norm == "ffn_norm" and self.ffn.normalises_input(layer)
                if norm.startswith(f"{name}_") and not inside:
                    modules[norm] = here.at(norm).build(self.norm, dim=self.dim)
        return Block(
            **modules,
            parallel=self.residual == "parallel",
            shared_norm=self.norm_placement == "shared",
            scale=self.residual_scale,
            scalar=LayerScalar() if self.layer_scalar else None,
            streams=self.residual_connection.stream_count(),
        )

    def _build_residual(self, here: BuildContext, init: InitStd, part: int) -> nn.Module:
        return here.build(self.residual_connection, dim=self.dim, init=init, part=part)

    def _build_predictions(self, component: MultiTokenPrediction, context: BuildContext) -> Predictions:
        import torch

        from forge_core.auxiliary import Auxiliary
        from forge_plugin_transformer.modules.multi_token import Predictions

        # Its metrics would be added to the metrics of the job's own loss.
        silent = attrs.evolve(context, auxiliary=Auxiliary(torch.device("cpu")))
        return Predictions(
            [self._build_prediction(context, number) for number in range(component.depth)],
            silent.build(component.loss),
            component.weights(context),
            context.auxiliary,
        )

    def _build_prediction(self, context: BuildContext, number: int) -> PredictionBlock:
        """Build one prediction block; its layer number follows the model's layers, as in DeepSeek-V3's weights."""
        from forge_kit.nn.modules import Linear
        from forge_plugin_transformer.modules.multi_token import PredictionBlock

        here = context.at(f"mtp.blocks.{number}", layer=self.layers + number)
        norms = ("embedding_norm", "hidden_norm", "norm")
        return PredictionBlock(
            block=self._build_block(here),
            # Not scaled by depth: the result begins a residual stream, and is not added to one
            projection=Linear(2 * self.dim, self.dim, std=self.init_std),
            **{name: here.at(name).build(self.norm, dim=self.dim) for name in norms},
        )

    def _vocab_size(self, context: BuildContext) -> int:
        # Checked here and not in `problems`: a tokenizer that is trained on the corpus has no size before
        known = context.tokenizer.vocab_size if context.tokenizer is not None else 0
        size = self.vocab_size or known
        if not size:
            raise JobError([Problem("model.vocab_size", "0 takes the tokenizer's size, but there is no tokenizer")])
        if size < known:
            message = f"{size} is less than the tokenizer's {known}; give at least that, or 0 to take it"
            raise JobError([Problem("model.vocab_size", message)])
        return size
