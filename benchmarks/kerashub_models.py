"""KerasHub's backbones in their smallest sensible size, with random weights, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_TOKENS, _SIDE, _AUDIO, _BATCH = 8, 64, 1024, 2
_VOCABULARY = 32

_WORDS = {"vocabulary_size": _VOCABULARY}
_SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
# Size arguments of most text models.
_TEXT = _WORDS | _SIZES
_SEQUENCE = _TEXT | {"max_sequence_length": 16}
# Decoders whose keys have fewer heads than their queries.
_GROUPED = _WORDS | {
    **{"num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2},
    **{"hidden_dim": 16, "intermediate_dim": 32},
}
_EXPERTS = {"num_experts": 4, "top_k": 2}
_GEMMA = _GROUPED | {"head_dim": 4, "image_size": 16}
_IMAGE = {"image_shape": (_SIDE, _SIDE, 3)}
_VIT = _IMAGE | _SIZES | {"patch_size": 16}

# Backbone without the word -> its arguments.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "Albert": _SEQUENCE | {"embedding_dim": 8},
    "Bart": _SEQUENCE,
    "Bert": _SEQUENCE,
    "Bloom": _TEXT,
    "DebertaV3": _SEQUENCE | {"bucket_size": 4},
    "DeiT": _VIT,
    "DenseNet": _IMAGE | {"stackwise_num_repeats": [1, 1, 1], "growth_rate": 8},
    "DINOV2": _VIT | {"position_embedding_shape": (_SIDE, _SIDE, 3)},
    "DINOV3": _VIT,
    "DistilBert": _SEQUENCE,
    "ESM": _SEQUENCE,
    "EfficientNet": {
        **{"input_shape": (_SIDE, _SIDE, 3), "stackwise_width_coefficients": [1.0] * 2},
        **{"stackwise_depth_coefficients": [1.0] * 2, "stackwise_kernel_sizes": [3, 3]},
        **{"stackwise_num_repeats": [1, 1], "stackwise_input_filters": [8, 8]},
        **{"stackwise_output_filters": [8, 16], "stackwise_expansion_ratios": [1, 4]},
        **{"stackwise_squeeze_and_excite_ratios": [0.25] * 2, "stackwise_strides": [2, 2]},
        **{"stackwise_block_types": ["v1"] * 2, "stackwise_force_input_filters": [0] * 2},
        "stackwise_nores_option": [False] * 2,
    },
    "GPT2": _SEQUENCE,
    "GPTNeoX": _SEQUENCE,
    "Gemma": {key: value for key, value in _GEMMA.items() if key != "image_size"},
    "Gemma3": _GEMMA,
    "Gemma4": _GEMMA,
    "GptOss": _GROUPED | _EXPERTS,
    "Llama": _GROUPED,
    "Llama3": _GROUPED,
    "Mistral": _GROUPED,
    "Mixtral": _GROUPED | _EXPERTS,
    "MobileNet": _IMAGE
    | {"stackwise_expansion": [[8, 16]], "stackwise_num_blocks": [2]}
    | {"stackwise_num_filters": [[8, 8]], "stackwise_kernel_size": [[3, 3]]}
    | {"stackwise_num_strides": [[2, 1]], "stackwise_se_ratio": [[None, 0.25]]}
    | {"stackwise_activation": [["relu", "hard_swish"]], "stackwise_padding": [[1, 1]]}
    | {"output_num_filters": 16, "depthwise_filters": 8, "depthwise_stride": 2}
    | {"depthwise_residual": False, "last_layer_filter": 16},
    "OPT": _SEQUENCE,
    "Phi3": _GROUPED,
    "Qwen": _GROUPED,
    "Qwen3": _GROUPED | {"head_dim": 4},
    "Qwen3Moe": _GROUPED | _EXPERTS | {"head_dim": 4, "moe_intermediate_dim": 8},
    "ResNet": _IMAGE
    | {"input_conv_filters": [64], "input_conv_kernel_sizes": [7]}
    | {"stackwise_num_filters": [64, 16], "stackwise_num_blocks": [1, 1]}
    | {"stackwise_num_strides": [1, 2], "block_type": "basic_block"},
    "Roberta": _SEQUENCE,
    "SwinTransformer": _IMAGE
    | {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4, "drop_path": 0.0},
    "T5": _TEXT,
    "VGG": _IMAGE | {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16]},
    "ViT": _IMAGE
    | {"patch_size": (16, 16), "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32},
    "Whisper": _TEXT
    | {"num_mels": 8, "max_encoder_sequence_length": _AUDIO, "max_decoder_sequence_length": 16},
    "XLMRoberta": _SEQUENCE,
    "XLNet": _TEXT,
    "Xception": _IMAGE
    | {"stackwise_conv_filters": [[8, 16], [16, 16]], "stackwise_pooling": [1, 0]},
}


def _make(name: str) -> Any:
    import keras_hub

    return getattr(keras_hub.models, f"{name}Backbone")(**_ARGUMENTS[name])


# Backbone without the word -> makes it.
MODELS: dict[str, Callable[[], Any]] = {
    name: (lambda name=name: _make(name)) for name in sorted(_ARGUMENTS)
}


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
