"""Decoder-only transformers with attention, feed-forward, norm and position encoding as components."""

from forge_plugin_transformer.altup import AltUp
from forge_plugin_transformer.canon import Canon
from forge_plugin_transformer.kinds import (
    AttentionBackendComponent,
    AttentionComponent,
    AttentionMaskComponent,
    BlockMaskComponent,
    FFNComponent,
    InitStd,
    NormComponent,
    ResidualComponent,
    RopeComponent,
)
from forge_plugin_transformer.layer_parts import (
    GEGLU,
    GELU,
    XIELU,
    GroupedQueryAttention,
    LayerNorm,
    RMSNorm,
    SquaredReLU,
    SwiGLU,
    default_hidden,
)
from forge_plugin_transformer.masks import BidirectionalMask, CausalMask, ChunkedMask, GlobalLocalMask
from forge_plugin_transformer.no_part import NoAttention, NoFFN
from forge_plugin_transformer.parallel import ParallelAttention
from forge_plugin_transformer.pattern import AttentionPattern, FFNPattern
from forge_plugin_transformer.per_layer_inputs import PerLayerInputs
from forge_plugin_transformer.residual import Add, HyperConnections, ManifoldHyperConnections
from forge_plugin_transformer.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRope,
    PlainRope,
    ProportionalRope,
    YarnRope,
)
from forge_plugin_transformer.transformer import MultiTokenPrediction, Transformer

__all__ = [
    "GEGLU",
    "GELU",
    "XIELU",
    "Add",
    "AltUp",
    "AttentionBackendComponent",
    "AttentionComponent",
    "AttentionMaskComponent",
    "AttentionPattern",
    "BidirectionalMask",
    "BlockMaskComponent",
    "Canon",
    "CausalMask",
    "ChunkedMask",
    "DynamicRope",
    "FFNComponent",
    "FFNPattern",
    "GlobalLocalMask",
    "GroupedQueryAttention",
    "HyperConnections",
    "InitStd",
    "LayerNorm",
    "LinearRope",
    "Llama3Rope",
    "LongRope",
    "ManifoldHyperConnections",
    "MultiTokenPrediction",
    "NoAttention",
    "NoFFN",
    "NoRope",
    "NormComponent",
    "ParallelAttention",
    "PerLayerInputs",
    "PlainRope",
    "ProportionalRope",
    "RMSNorm",
    "ResidualComponent",
    "RopeComponent",
    "SquaredReLU",
    "SwiGLU",
    "Transformer",
    "YarnRope",
    "default_hidden",
]
