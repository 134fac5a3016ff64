"""KerasHub's backbones in their smallest sensible size, with random weights, and their inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

_TOKENS, _SIDE, _AUDIO, _BATCH = 8, 64, 1024, 2
_VOCABULARY = 32

_WORDS = {"vocabulary_size": _VOCABULARY}
# What most text models call their sizes.
_TEXT = _WORDS | {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
_LENGTH = {"max_sequence_length": 16}
# Decoders whose keys have fewer heads than their queries.
_GROUPED = _WORDS | {
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
_EXPERTS = {"num_experts": 4, "top_k": 2}
_GEMMA = _GROUPED | {"head_dim": 4}
_IMAGE = {"image_shape": (_SIDE, _SIDE, 3)}
_VIT = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
_PATCHES = {"patch_size": 16}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
_SIDES = {
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "num_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_T5GEMMA = (
    _WORDS
    | {f"encoder_{key}": value for key, value in _SIDES.items()}
    | {f"decoder_{key}": value for key, value in _SIDES.items()}
    | {"sliding_window": 4, "cross_attention_hidden_size": 16}
)

# Backbone -> its arguments. What is made of other models is a function below.
_PLAIN: dict[str, dict[str, Any]] = {
    "Albert": _TEXT | {"embedding_dim": 8} | _LENGTH,
    "Bart": _TEXT | _LENGTH,
    "Bert": _TEXT | _LENGTH,
    "Bloom": _TEXT,
    "DebertaV3": _TEXT | _LENGTH | {"bucket_size": 4},
    "DistilBert": _TEXT | _LENGTH,
    "EdRec": {
        "vocab_size": _VOCABULARY,
        "num_layers_enc": 1,
        "num_layers_dec": 1,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_heads": 2,
    },
    "Electra": {key: value for key, value in _TEXT.items() if key != "vocabulary_size"}
    | {"vocab_size": _VOCABULARY, "embedding_dim": 16}
    | _LENGTH,
    "ESM": _TEXT | _LENGTH,
    "FNet": {key: value for key, value in _TEXT.items() if key != "num_heads"} | _LENGTH,
    "Falcon": _WORDS
    | {"num_layers": 2, "num_attention_heads": 2, "hidden_dim": 16, "intermediate_dim": 64},
    "GPT2": _TEXT | _LENGTH,
    "GPTNeoX": _TEXT | _LENGTH,
    "Gemma": _GEMMA,
    "Gemma3": _GEMMA | {"image_size": 16},
    "Gemma4": _GEMMA | {"image_size": 16},
    "GptOss": _GROUPED | _EXPERTS,
    "Llama": _GROUPED,
    "Llama3": _GROUPED,
    "Mistral": _GROUPED,
    "Mixtral": _GROUPED | _EXPERTS,
    "OPT": _TEXT | _LENGTH,
    "Phi3": _GROUPED,
    "Qwen": _GROUPED,
    "Qwen3": _GROUPED | {"head_dim": 4},
    "Qwen3Moe": _GROUPED | _EXPERTS | {"head_dim": 4, "moe_intermediate_dim": 8},
    "Qwen3_5": _GROUPED | _HYBRID,
    "Qwen3_5Moe": {key: value for key, value in _GROUPED.items() if key != "intermediate_dim"}
    | _EXPERTS
    | _HYBRID
    | {"moe_intermediate_dim": 8, "shared_expert_intermediate_size": 8},
    "QwenMoe": _GROUPED
    | _EXPERTS
    | {"moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 8},
    "RWKV7": _WORDS
    | {"hidden_size": 16, "head_size": 8, "num_layers": 2, "intermediate_dim": 32}
    | {"gate_lora": 4, "mv_lora": 4, "aaa_lora": 4, "decay_lora": 4},
    "Roberta": _TEXT | _LENGTH,
    "RoformerV2": _TEXT | {"head_size": 8},
    "SmolLM3": _WORDS
    | {"hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": False}
    | {"attention_dropout": 0.0, "rope_layer_enabled_list": [True, False], "mlp_bias": False}
    | {"layer_types": ["full_attention"] * 2, "layer_norm_epsilon": 1e-6}
    | {"max_position_embeddings": 16, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "T5": _TEXT,
    "T5Gemma": _T5GEMMA,
    "T5Gemma2": _T5GEMMA,
    "XLMRoberta": _TEXT | _LENGTH,
    "XLNet": _TEXT,
    "Moonshine": _WORDS
    | {"filter_dim": 16, "encoder_num_layers": 1, "decoder_num_layers": 1, "hidden_dim": 16}
    | {"intermediate_dim": 32, "encoder_num_heads": 2, "decoder_num_heads": 2},
    "Whisper": _TEXT
    | {"num_mels": 8, "max_encoder_sequence_length": _AUDIO, "max_decoder_sequence_length": 16},
    "PaliGemma": _GEMMA
    | {"image_size": 16, "vit_patch_size": 8, "vit_num_heads": 2, "vit_hidden_dim": 8}
    | {"vit_num_layers": 1, "vit_intermediate_dim": 16},
    "CSPNet": _IMAGE
    | {"stem_filters": 8, "stem_kernel_size": 3, "stem_strides": 2, "stackwise_depth": [1, 1]}
    | {"stackwise_strides": [2, 2], "stackwise_num_filters": [16, 32], "block_type": "dark_block"}
    | {"stage_type": "dark"},
    "DeiT": _IMAGE | _PATCHES | _VIT,
    "DINOV2": _IMAGE | _PATCHES | _VIT | {"position_embedding_shape": (_SIDE, _SIDE, 3)},
    "DINOV3": _IMAGE | _PATCHES | _VIT,
    "DenseNet": _IMAGE | {"stackwise_num_repeats": [1, 1, 1], "growth_rate": 8},
    "EfficientNet": {
        "input_shape": (_SIDE, _SIDE, 3),
        "stackwise_width_coefficients": [1.0] * 2,
        "stackwise_depth_coefficients": [1.0] * 2,
        "stackwise_kernel_sizes": [3, 3],
        "stackwise_num_repeats": [1, 1],
        "stackwise_input_filters": [8, 8],
        "stackwise_output_filters": [8, 16],
        "stackwise_expansion_ratios": [1, 4],
        "stackwise_squeeze_and_excite_ratios": [0.25] * 2,
        "stackwise_strides": [2, 2],
        "stackwise_block_types": ["v1"] * 2,
        "stackwise_force_input_filters": [0] * 2,
        "stackwise_nores_option": [False] * 2,
    },
    "MiT": _IMAGE
    | {"layerwise_depths": [1, 1], "num_layers": 2, "layerwise_num_heads": [1, 2]}
    | {"layerwise_sr_ratios": [2, 1], "max_drop_path_rate": 0.0, "layerwise_patch_sizes": [7, 3]}
    | {"layerwise_strides": [4, 2], "hidden_dims": [8, 16]},
    "MobileNet": _IMAGE
    | {"stackwise_expansion": [[8, 16]], "stackwise_num_blocks": [2]}
    | {"stackwise_num_filters": [[8, 8]], "stackwise_kernel_size": [[3, 3]]}
    | {"stackwise_num_strides": [[2, 1]], "stackwise_se_ratio": [[None, 0.25]]}
    | {"stackwise_activation": [["relu", "hard_swish"]], "stackwise_padding": [[1, 1]]}
    | {"output_num_filters": 16, "depthwise_filters": 8, "depthwise_stride": 2}
    | {"depthwise_residual": False, "last_layer_filter": 16},
    "ResNet": _IMAGE
    | {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 16],
    }
    | {
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
    },
    "SwinTransformer": _IMAGE
    | {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4, "drop_path": 0.0},
    "VAE": {
        "encoder_num_filters": [32, 32],
        "encoder_num_blocks": [1, 1],
        "decoder_num_filters": [32, 32],
        "decoder_num_blocks": [1, 1],
        "sampler_method": "mode",
    },
    "VGG": _IMAGE | {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16]},
    "VideoPrism": _PATCHES
    | {"num_frames": 2, "image_shape": (32, 32, 3), "hidden_dim": 16, "intermediate_dim": 32}
    | {"num_heads": 2, "num_spatial_layers": 1, "num_temporal_layers": 1}
    | {"num_auxiliary_layers": 0},
    "ViT": _IMAGE
    | {"patch_size": (16, 16), "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32},
    "ViTDet": _IMAGE
    | _PATCHES
    | {"hidden_size": 16, "num_layers": 2, "intermediate_dim": 32, "num_heads": 2}
    | {"global_attention_layer_indices": [1], "num_output_channels": 8, "window_size": 2},
    "Xception": _IMAGE
    | {"stackwise_conv_filters": [[8, 16], [16, 16]], "stackwise_pooling": [1, 0]},
    "HGNetV2": _IMAGE
    | {"depths": [1, 1], "embedding_size": 8, "hidden_sizes": [16, 32], "stem_channels": [3, 8, 8]}
    | {"hidden_act": "relu", "use_learnable_affine_block": True}
    | {"stackwise_stage_filters": [[8, 8, 16, 1, 2, 3], [16, 8, 32, 1, 2, 3]]}
    | {"apply_downsample": [False, True], "use_lightweight_conv_block": [False, True]},
    "RQVAE": {
        "input_dim": 10,
        "encoder_layer_dims": [16, 8],
        "output_dim": 8,
        "decoder_layer_dims": [8, 16],
        "num_embeddings": 16,
        "num_quantizers": 2,
    },
}


# Those that keras_hub.models does not list, and where they are.
_UNLISTED = {"RQVAE": "rqvae.rqvae_backbone", "VAE": "vae.vae_backbone"}


def _make(name: str) -> Any:
    listed = name not in _UNLISTED
    place = "keras_hub.models" if listed else f"keras_hub.src.models.{_UNLISTED[name]}"
    return getattr(importlib.import_module(place), f"{name}Backbone")(**_PLAIN[name])


def _resnet(**changes: Any) -> Any:
    """A ResNet of four stages: enough for the models that want a pyramid."""
    from keras_hub import models

    stages = {
        "stackwise_num_filters": [64, 16, 16, 16],
        "stackwise_num_blocks": [1] * 4,
        "stackwise_num_strides": [1, 2, 2, 2],
    }
    return models.ResNetBackbone(**_PLAIN["ResNet"] | stages | changes)


def _basnet() -> Any:
    from keras_hub import models

    return models.BASNetBackbone(
        image_encoder=_resnet(image_shape=(None, None, 3)),
        num_classes=1,
        projection_filters=64,
        **_IMAGE,
    )


def _blip2() -> Any:
    from keras_hub import models

    return models.BLIP2Backbone(vision_encoder=None, qformer=None, language_model=_make("OPT"))


def _clip() -> Any:
    from keras_hub import models

    return models.CLIPBackbone(
        vision_encoder=models.CLIPVisionEncoder(**_PATCHES | _VIT | _IMAGE),
        text_encoder=models.CLIPTextEncoder(**_TEXT | _LENGTH | {"embedding_dim": 16}),
        projection_dim=8,
    )


def _metaclip2() -> Any:
    from keras_hub import models
    from keras_hub.src.models.metaclip_2.metaclip_2_text_encoder import MetaCLIP2TextEncoder
    from keras_hub.src.models.metaclip_2.metaclip_2_vision_encoder import MetaCLIP2VisionEncoder

    return models.MetaCLIP2Backbone(
        vision_encoder=MetaCLIP2VisionEncoder(**_PATCHES | _VIT | _IMAGE),
        text_encoder=MetaCLIP2TextEncoder(**_TEXT | _LENGTH | {"embedding_dim": 16}),
        projection_dim=8,
    )


def _siglip() -> Any:
    from keras_hub import models

    # Its positions are as many as its tokens, always.
    text = _TEXT | {"max_sequence_length": _TOKENS, "embedding_dim": 16, "projection_dim": 16}
    return models.SigLIPBackbone(
        vision_encoder=models.SigLIPVisionEncoder(**_PATCHES | _VIT | _IMAGE),
        text_encoder=models.SigLIPTextEncoder(**text),
    )


def _deeplab() -> Any:
    from keras_hub import models

    return models.DeepLabV3Backbone(
        image_encoder=_resnet(),
        spatial_pyramid_pooling_key="P5",
        low_level_feature_key="P2",
        upsampling_size=8,
        dilation_rates=[2, 4],
        projection_filters=8,
        **_IMAGE,
    )


def _segformer() -> Any:
    from keras_hub import models

    four = {"num_layers": 4, "hidden_dims": [8, 16, 24, 32], "layerwise_depths": [1] * 4}
    four |= {"layerwise_num_heads": [1] * 4, "layerwise_sr_ratios": [2, 2, 1, 1]}
    four |= {"layerwise_patch_sizes": [7, 3, 3, 3], "layerwise_strides": [4, 2, 2, 2]}
    encoder = models.MiTBackbone(**_PLAIN["MiT"] | four)
    return models.SegFormerBackbone(image_encoder=encoder, projection_filters=8)


def _retinanet() -> Any:
    from keras_hub import models

    return models.RetinaNetBackbone(
        image_encoder=_resnet(), min_level=3, max_level=5, use_p5=False, **_IMAGE
    )


def _depth_anything() -> Any:
    from keras_hub import models

    four = {"num_layers": 4, "patch_size": 14, "image_shape": (84, 84, 3)}
    encoder = models.DINOV2Backbone(**_PLAIN["DINOV2"] | four)
    return models.DepthAnythingBackbone(
        image_encoder=encoder,
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[8] * 4,
        fusion_hidden_dim=8,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )


def _parseq() -> Any:
    from keras_hub import models

    return models.PARSeqBackbone(
        image_encoder=_make("ViT"),
        vocabulary_size=_VOCABULARY,
        max_label_length=_TOKENS,
        decoder_hidden_dim=16,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=32,
    )


_COMPOSED: dict[str, Callable[[], Any]] = {
    "BASNet": _basnet,
    "BLIP2": _blip2,
    "CLIP": _clip,
    "DeepLabV3": _deeplab,
    "DepthAnything": _depth_anything,
    "MetaCLIP2": _metaclip2,
    "PARSeq": _parseq,
    "RetinaNet": _retinanet,
    "SegFormer": _segformer,
    "SigLIP": _siglip,
}

# Backbone without the word -> makes it.
MODELS: dict[str, Callable[[], Any]] = dict(
    sorted({**{name: (lambda name=name: _make(name)) for name in _PLAIN}, **_COMPOSED}.items())
)


def inputs_of(model: Any) -> Any:
    """One batch that fits the model's inputs, made from their names, shapes and dtypes."""
    import tensorflow as tf

    rng = np.random.default_rng(5)
    return tf.nest.map_structure(lambda spec: tf.constant(_batch(spec, rng)), model.input)


def _batch(spec: Any, rng: np.random.Generator) -> np.ndarray:
    shape = (_BATCH, *(size or _free(spec) for size in spec.shape[1:]))
    if "mask" in spec.name:
        return np.ones(shape, spec.dtype)
    if "int" in spec.dtype:
        high = 2 if "segment" in spec.name else _VOCABULARY
        return rng.integers(0, high, shape).astype(spec.dtype)
    return rng.uniform(-1, 1, shape).astype(spec.dtype)


def _free(spec: Any) -> int:
    """The size of an axis that the model leaves open."""
    return {4: _SIDE, 3: _AUDIO}.get(len(spec.shape), _TOKENS)
