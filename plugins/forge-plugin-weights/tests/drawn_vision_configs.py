"""Configurations of vision towers, and of models that see images, that hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drawn_configs import EPS, INSTALLED, RATES, SEEING, SET_BY_ROPES, SPELLINGS, THETAS, configs
from hypothesis import strategies as st

from forge_plugin_weights.kinds import TIED
from forge_plugin_weights.tables import all_fields

ACTIVATIONS = st.sampled_from(["gelu", "gelu_pytorch_tanh", "quick_gelu"])
LANGUAGES = st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "olmo2"])
"""Of those that leave their logits as they are, as a part of a larger model must."""
PIXELS = "preprocessor_config"
ELSEWHERE: Mapping[str, str] = {
    PIXELS: "test_published_processors.py, test_published_pixels.py",
    "quantization_config": "test_weights_deepseek.py, test_weights_gpt_oss.py",
}
"""Keys that no configuration here has, and the tests that are about them."""


@st.composite
def some(draw: st.DrawFn, **keys: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Some of the keys."""
    return draw(st.fixed_dictionaries({}, optional=keys))


@st.composite
def vits(draw: st.DrawFn, activations: st.SearchStrategy[str] = ACTIVATIONS) -> dict[str, Any]:
    """What all towers have but their sizes in pixels."""
    heads = draw(st.sampled_from([1, 2, 4]))
    sizes = {
        "hidden_size": heads * draw(st.sampled_from([8, 16, 32])),
        "num_hidden_layers": draw(st.integers(2, 6)),
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(1, 99)),
        "patch_size": draw(st.sampled_from([8, 14, 16])),
    }
    further = some(layer_norm_eps=EPS, hidden_act=activations, num_channels=st.just(3), attention_dropout=RATES)
    return {**sizes, **draw(further)}


@st.composite
def towers(draw: st.DrawFn) -> dict[str, Any]:
    """One for images of one size, of whole patches or with some pixels left over."""
    config = draw(vits())
    return {**config, "image_size": config["patch_size"] * draw(st.integers(1, 9)) + draw(st.sampled_from([0, 0, 6]))}


@st.composite
def any_shape_towers(draw: st.DrawFn) -> dict[str, Any]:
    """One for images of any shape, whose table of positions is a square."""
    return {**draw(vits()), "num_patches": draw(st.integers(1, 9)) ** 2}


@st.composite
def tiled_towers(draw: st.DrawFn) -> dict[str, Any]:
    """Llama 3.2 Vision's, with some of the arrangements of its tiles."""
    config = draw(vits())
    config["norm_eps"] = config.pop("layer_norm_eps", 1e-5)
    config.pop("attention_dropout", None)
    if draw(st.booleans()):
        config["attention_heads"] = config.pop("num_attention_heads")
    layers = st.integers(0, config["num_hidden_layers"] - 1)
    taken = draw(st.lists(layers, min_size=1, unique=True))
    most = draw(st.integers(1, 4))
    pairs = [[1, most], *([rows, 1] for rows in range(1, most + 1) if rows > 1 or most > 1)]
    return {
        **config,
        "image_size": config["patch_size"] * draw(st.integers(1, 9)),
        "num_global_layers": draw(st.integers(1, 3)),
        "supported_aspect_ratios": draw(st.permutations(pairs)),
        "max_num_tiles": most,
        "intermediate_layers_indices": taken,
        "vision_output_dim": config["hidden_size"] * (1 + len(taken)),
    }


TOWERS: Mapping[str, Callable[[], st.SearchStrategy[dict[str, Any]]]] = {
    "siglip_vision_model": lambda: st.builds(dict.__or__, towers(), some(vision_use_head=st.booleans())),
    "siglip2_vision_model": lambda: st.builds(dict.__or__, any_shape_towers(), some(vision_use_head=st.booleans())),
    "clip_vision_model": towers,
    "mllama_vision_model": tiled_towers,
}


@st.composite
def llavas(draw: st.DrawFn) -> dict[str, Any]:
    """LLaVA: the tower of CLIP or of SigLIP, and features of one of its blocks."""
    tower = draw(st.sampled_from(["clip_vision_model", "siglip_vision_model"]))
    vision = {**draw(TOWERS[tower]()), "model_type": tower}
    layers = vision["num_hidden_layers"]
    type_ = draw(LANGUAGES)
    further = some(
        multimodal_projector_bias=st.booleans(),
        projector_hidden_act=st.sampled_from(["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu"]),
    )
    return {
        "text_config": draw(configs(type_)),
        "vision_config": vision,
        "vision_feature_layer": draw(st.integers(-layers, layers)),
        "vision_feature_select_strategy": "default" if tower == "clip_vision_model" else "full",
        **draw(some(**{TIED: st.booleans()})),
        **draw(further),
    }


@st.composite
def joined(draw: st.DrawFn, onevision: bool = False) -> dict[str, Any]:
    """LLaVA-NeXT and LLaVA-OneVision: LLaVA, of which images are tiles."""
    config = draw(llavas().filter(lambda config: not onevision or "siglip" in config["vision_config"]["model_type"]))
    side = config["vision_config"]["image_size"]
    pairs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5, unique=True)
    config["image_grid_pinpoints"] = [[side * rows, side * columns] for rows, columns in draw(pairs)]
    if TIED in config["text_config"]:  # as both versions of `transformers` say it
        config[TIED] = config["text_config"][TIED]
    if onevision:
        config |= draw(some(vision_aspect_ratio=st.integers(1, 12).map(lambda most: f"anyres_max_{most}")))
    return config


@st.composite
def shuffled(draw: st.DrawFn, tower: str) -> dict[str, Any]:
    """Idefics3 and SmolVLM, whose patches are joined in squares of `scale_factor`."""
    factor = draw(st.integers(1, 3))
    vision = {**draw(vits()), "model_type": tower}
    vision["image_size"] = vision["patch_size"] * factor * draw(st.integers(1, 4))
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    text = {**draw(configs(draw(LANGUAGES))), TIED: tied}
    return {"text_config": text, "vision_config": vision, "scale_factor": factor, TIED: tied}


@st.composite
def mllamas(draw: st.DrawFn) -> dict[str, Any]:
    """Llama 3.2 Vision: a Llama some of whose layers are cross-attention."""
    text = draw(configs("llama"))
    # Keys that this Llama has not
    text = {key: value for key, value in text.items() if key not in ("attention_bias", "mlp_bias", "head_dim", TIED)}
    crossing = sorted(draw(st.sets(st.integers(0, text["num_hidden_layers"] - 1), min_size=1)))
    text |= {
        "model_type": "mllama_text_model",
        "num_hidden_layers": text["num_hidden_layers"] + len(crossing),
        "cross_attention_layers": [layer + number for number, layer in enumerate(crossing)],
        "num_key_value_heads": text.get("num_key_value_heads", text["num_attention_heads"]),
    }
    token = draw(st.sampled_from(["image_token_index", "image_token_id"]))
    ties = draw(some(**{TIED: st.booleans()}))  # of which nothing follows
    return {"text_config": text, "vision_config": draw(tiled_towers()), token: text["vocab_size"], **ties}


@st.composite
def paligemmas(draw: st.DrawFn) -> dict[str, Any]:
    """PaliGemma: SigLIP's tower, and Gemma or Gemma 2, whose width stands in three tables."""
    text = draw(configs(draw(st.sampled_from(["gemma", "gemma2"]))))
    text["use_bidirectional_attention"] = draw(st.sampled_from([True, None]))
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    width = {"projection_dim": text["hidden_size"]}
    tower = {**draw(TOWERS["siglip_vision_model"]()), "model_type": "siglip_vision_model"}
    further = draw(some(hidden_size=st.just(text["hidden_size"])))
    return {"text_config": {**text, TIED: tied}, "vision_config": {**tower, **width}, TIED: tied, **width, **further}


QWEN_LANGUAGES = {
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
WITHOUT = {*SET_BY_ROPES, *("use_sliding_window", "sliding_window", "layer_types", "max_window_layers", "use_mrope")}
"""Keys of these language models that the table of a larger one has otherwise, or not at all."""


@st.composite
def qwen_ropes(draw: st.DrawFn, interleaved: bool, share: bool = False) -> dict[str, Any]:
    """A position encoding of frame, row and column, as either version of `transformers` spells it, or both."""
    form: dict[str, Any] = {"mrope_section": draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))}
    form |= {"mrope_interleaved": True} if interleaved else {}
    form |= {"partial_rotary_factor": draw(st.sampled_from([0.25, 0.5]))} if share else {}
    theta, spelling = draw(THETAS), draw(st.sampled_from(SPELLINGS))
    keys: dict[str, Any] = {}
    if spelling != "5":
        named = {"type": "mrope"} if not interleaved and draw(st.booleans()) else {"rope_type": "default"}
        keys |= {"rope_theta": theta, "rope_scaling": {**form, **named}}
    if spelling != "4":
        keys["rope_parameters"] = {**form, "rope_type": "default", "rope_theta": theta}
    return keys


@st.composite
def qwen_towers(draw: st.DrawFn, type_: str) -> dict[str, Any]:
    """With windows, or with a table of positions and DeepStack."""
    heads, depth, patch = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 6)), draw(st.sampled_from([8, 14, 16]))
    config = {
        "model_type": draw(st.sampled_from([f"{type_}_vision", type_])),
        "depth": depth,
        "num_heads": heads,
        "hidden_size": heads * draw(st.sampled_from([8, 16])),
        "intermediate_size": draw(st.integers(1, 99)),
        "patch_size": patch,
        "spatial_merge_size": (merge := draw(st.integers(1, 3))),
        **draw(some(temporal_patch_size=st.integers(1, 3), in_channels=st.just(3))),
        **draw(some(rope_parameters=st.builds(lambda base: {"rope_type": "axial", "rope_theta": base}, THETAS))),
    }
    blocks = sorted(draw(st.sets(st.integers(0, depth - 1))))
    if type_ in HYBRIDS:
        empty = draw(some(deepstack_visual_indexes=st.just([])))
        return {**config, "num_position_embeddings": draw(st.integers(1, 9)) ** 2, **empty}
    if type_ != "qwen2_5_vl":
        return {**config, "num_position_embeddings": draw(st.integers(1, 9)) ** 2, "deepstack_visual_indexes": blocks}
    window = {"window_size": patch * merge * draw(st.integers(1, 4)), "fullatt_block_indexes": blocks}
    return {**config, **window, **draw(some(tokens_per_second=st.integers(1, 30)))}


@st.composite
def qwens(draw: st.DrawFn, type_: str) -> dict[str, Any]:
    """Qwen2.5-VL, in tables or as its first files have it, Qwen3-VL, and Qwen3.5."""
    is_first, is_hybrid = type_ == "qwen2_5_vl", type_ in HYBRIDS
    drawn = draw(configs(QWEN_LANGUAGES[type_]))
    text = {key: value for key, value in drawn.items() if key not in WITHOUT or (is_hybrid and key == "layer_types")}
    for key in ("head_dim", "attention_bias") if is_first else ("norm_topk_prob",):
        text.pop(key, None)
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    text |= {**draw(qwen_ropes(not is_first, is_hybrid)), "model_type": f"{type_}_text", TIED: tied}
    tokens = draw(some(image_token_id=st.just(5), video_token_id=st.just(6)))
    if is_hybrid:
        tokens |= draw(some(language_model_only=st.just(False)))
    vision = {**draw(qwen_towers(type_)), "out_hidden_size": text["hidden_size"]}
    if is_first and draw(st.booleans()):
        return {**text, "model_type": type_, "vision_config": vision, **tokens}
    return {"text_config": text, "vision_config": vision, TIED: tied, **tokens}


@st.composite
def internvls(draw: st.DrawFn) -> dict[str, Any]:
    """InternVL, with sides as version 5 writes them."""
    factor = draw(st.sampled_from([1, 2, 4]))
    vision = draw(vits())
    patch, rates = vision["patch_size"], dict.fromkeys(("hidden_dropout_prob", "projection_dropout"), RATES)
    size = patch * factor * draw(st.integers(1, 4))
    further = some(
        norm_type=st.sampled_from(["layer_norm", "rms_norm"]),
        layer_scale_init_value=st.sampled_from([0.1, 1.0]),
        use_mask_token=st.just(False),
        use_absolute_position_embeddings=st.just(True),
        **dict.fromkeys(("use_qk_norm", "attention_bias", "use_mean_pooling"), st.booleans()),
        **rates,
    )
    vision |= {"image_size": [size, size], "patch_size": [patch, patch]}
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    text = {**draw(configs(draw(LANGUAGES))), TIED: tied}
    same = some(
        projector_hidden_act=st.just("gelu"),
        vision_feature_layer=st.just(-1),
        vision_feature_select_strategy=st.just("default"),
    )
    tower = {**vision, **draw(further), "model_type": "internvl_vision"}
    return {"text_config": text, "vision_config": tower, "downsample_ratio": 1 / factor, TIED: tied, **draw(same)}


@st.composite
def mistrals(draw: st.DrawFn) -> dict[str, Any]:
    """Mistral 3, with the base of the tower's encoding as either version of `transformers` spells it."""
    vision = {**draw(vits(st.sampled_from(["silu", "gelu"]))), "model_type": "pixtral"}
    vision.pop("layer_norm_eps", None)
    theta, spelling = draw(THETAS), draw(st.sampled_from(SPELLINGS))
    if spelling != "5":
        vision["rope_theta"] = theta
    if spelling != "4":
        table = {"rope_theta": theta, **draw(some(rope_type=st.sampled_from(["axial", "default"])))}
        vision["rope_parameters"] = table
    width = st.just(vision["hidden_size"] // vision["num_attention_heads"])
    vision |= draw(some(head_dim=width, image_size=st.just(1540)))
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    further = some(
        spatial_merge_size=st.integers(1, 3),
        multimodal_projector_bias=st.booleans(),
        projector_hidden_act=st.just("gelu"),
        vision_feature_layer=st.just(-1),
    )
    text = {**draw(configs(draw(st.sampled_from(["mistral", "ministral3"])))), TIED: tied}
    return {"text_config": text, "vision_config": vision, TIED: tied, **draw(further)}


@st.composite
def llama4s(draw: st.DrawFn) -> dict[str, Any]:
    """Llama 4, whose tower has one width for joined patches and its feed-forward part, and one for its matrices."""
    factor, width, vision = draw(st.integers(1, 3)), draw(st.integers(1, 99)), draw(vits(st.just("gelu")))
    vision.pop("layer_norm_eps", None)
    theta, spelling = draw(THETAS), draw(st.sampled_from(SPELLINGS))
    if spelling != "5":
        vision["rope_theta"] = theta
    if spelling != "4":
        vision["rope_parameters"] = {"rope_theta": theta, **draw(some(rope_type=st.just("default")))}
    vision |= {
        "intermediate_size": factor**2 * vision["hidden_size"],
        "image_size": vision["patch_size"] * factor * draw(st.integers(1, 4)),
        "pixel_shuffle_ratio": 1 / factor,
        **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), width),
        **draw(some(norm_eps=st.just(1e-5), vision_feature_layer=st.just(-1), projector_dropout=RATES)),
        **draw(some(multi_modal_projector_bias=st.just(False), vision_feature_select_strategy=st.just("default"))),
    }
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    return {"text_config": {**draw(configs("llama4_text")), TIED: tied}, "vision_config": vision, TIED: tied}


@st.composite
def gemma4s(draw: st.DrawFn) -> dict[str, Any]:
    """Gemma 4 without sounds."""
    vision = draw(vits(st.just("gelu_pytorch_tanh")))
    eps = vision.pop("layer_norm_eps", None)
    vision |= {"hidden_activation": vision.pop("hidden_act")} if "hidden_act" in vision else {}
    vision.pop("num_channels", None)
    rope = st.builds(lambda base, type_: {"rope_theta": base, "rope_type": type_}, THETAS, st.just("axial"))
    width = draw(st.sampled_from([4, 8]))
    vision |= {
        "num_key_value_heads": vision["num_attention_heads"],
        "head_dim": width,
        "pooling_kernel_size": draw(st.integers(1, 4)),
        **({} if eps is None else {"rms_norm_eps": eps}),
        **draw(some(standardize=st.booleans(), position_embedding_size=st.integers(1, 9999), rope_parameters=rope)),
        **draw(some(attention_bias=st.just(False), use_clipped_linears=st.booleans(), global_head_dim=st.just(width))),
    }
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    own = {"use_bidirectional_attention": draw(st.sampled_from([None, "vision"]))}
    text = {**draw(configs("gemma4_text")), **own, TIED: tied}
    return {"text_config": text, "vision_config": vision, TIED: tied, **draw(some(audio_config=st.none()))}


@st.composite
def kimis(draw: st.DrawFn) -> dict[str, Any]:
    """Kimi-K2.5, by the names of version 5, with some keys of the first files."""
    vision = draw(vits(st.just("gelu_pytorch_tanh")))
    for key in ("layer_norm_eps", "num_channels", "attention_dropout"):
        vision.pop(key, None)
    side, merge = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    rope = st.builds(lambda base: {"rope_theta": base, "rope_type": "axial"}, THETAS)
    vision |= {
        **dict.fromkeys(("pos_emb_height", "pos_emb_width"), side),
        **draw(some(merge_kernel_size=st.just([merge, merge]), pos_emb_time=st.just(4), rope_parameters=rope)),
        **draw(some(projector_hidden_act=st.just("gelu"), merge_type=st.just("sd2_tpool"))),
    }
    tied = draw(st.booleans())  # as both versions of `transformers` say it
    width = {"projection_hidden_size": vision["hidden_size"]}
    text = {**draw(configs("deepseek_v3")), TIED: tied}
    tables = {"text_config": text, "vision_config": vision, TIED: tied}
    return {**tables, **width, **draw(some(projection_layer_norm_eps=EPS, image_token_id=st.just(5)))}


MODELS: Mapping[str, Callable[[], st.SearchStrategy[dict[str, Any]]]] = {
    "llava": llavas,
    "llava_next": joined,
    "llava_onevision": lambda: joined(onevision=True),
    "paligemma": paligemmas,
    "internvl": internvls,
    "mistral3": mistrals,
    "llama4": llama4s,
    "gemma4": gemma4s,
    "kimi_k25": kimis,
    "idefics3": lambda: shuffled("idefics3_vision"),
    "smolvlm": lambda: shuffled("smolvlm_vision"),
    "mllama": mllamas,
    "qwen2_5_vl": lambda: qwens("qwen2_5_vl"),
    "qwen3_vl": lambda: qwens("qwen3_vl"),
    "qwen3_vl_moe": lambda: qwens("qwen3_vl_moe"),
    "qwen3_5": lambda: qwens("qwen3_5"),
    "qwen3_5_moe": lambda: qwens("qwen3_5_moe"),
}
DRAWN = {**TOWERS, **MODELS}


def vision_configs(type_: str) -> st.SearchStrategy[dict[str, Any]]:
    """Configurations of a tower, or of a model that sees images."""
    return DRAWN[type_]().map(lambda config: {**config, "model_type": type_})


def keys_that_are_read(type_: str) -> set[str]:
    """All keys that an architecture reads, but for those that other tests draw."""
    return {key for field in all_fields(INSTALLED[type_]) for key in field.keys} - ELSEWHERE.keys()


assert DRAWN.keys() == {*SEEING}
