"""Code of TensorFlow and Keras that looks at dtypes itself, by the names of its modules."""

# Autocast goes by the code that asks for a cast or a conversion. tests/autocasting/test_ops.py
# fails where a release renames one of these.

from __future__ import annotations

# Keras casts inputs to a layer's dtype, and those and results of its ops to a common one. For a
# float32 layer inside autocast that would undo every cast, so it is left out: each op decides for
# itself instead.
_KERAS_OPS = (
    "keras.src.backend.tensorflow.numpy",
    "keras.src.backend.tensorflow.nn",
    "keras.src.backend.tensorflow.linalg",
)
KERAS_UPCASTS = ("keras.src.dtype_policies.dtype_policy", *_KERAS_OPS)
NEEDS_KERAS_UPCAST = frozenset({"argmax", "argmin", "signbit"})
# Functions that cast a float32 result to the dtype of their input. It stays float32, as that of the
# op they are made of.
RESULTS_CAST_BACK = frozenset(
    {
        *((module, name) for module in _KERAS_OPS for name in ("mean", "moments", "var")),
        ("tensorflow.python.ops.ctc_ops", "_ctc_loss_impl"),
        ("tensorflow.python.ops.ctc_ops", "ctc_loss_dense"),
        ("tensorflow.python.ops.nn_impl", "moments"),
    }
)
# Functions that look at dtypes before an op does. The first refuse low precision, or multiply by
# itself what they then sum up: float16's square overflows from 256 on. The second refuse mixed
# dtypes.
FLOAT32_FUNCTIONS = frozenset(
    {
        ("tensorflow.python.ops.check_ops", "assert_near"),
        ("tensorflow.python.ops.clip_ops", "clip_by_norm"),
        ("tensorflow.python.ops.linalg.linalg_impl", "matrix_exponential"),
        ("tensorflow.python.ops.linalg.linalg_impl", "matrix_rank"),
        ("tensorflow.python.ops.linalg.linalg_impl", "pinv"),
        ("tensorflow.python.ops.linalg_ops", "norm"),
        ("tensorflow.python.ops.math_ops", "complex"),
        ("tensorflow.python.ops.nn_impl", "l2_normalize"),
        ("tensorflow.python.ops.ragged.ragged_math_ops", "range"),
        ("tensorflow.python.ops.signal.fft_ops", "_irfft"),
        ("tensorflow.python.ops.signal.fft_ops", "_rfft"),
    }
)
SAME_DTYPE_FUNCTIONS = frozenset(
    {
        ("tensorflow.python.ops.array_ops", "one_hot"),
        ("tensorflow.python.ops.math_ops", "_div_python2"),
        ("tensorflow.python.ops.math_ops", "div_no_nan"),
        ("tensorflow.python.ops.math_ops", "multiply_no_nan"),
        ("tensorflow.python.ops.nn_ops", "_dropout"),
        ("tensorflow.python.ops.ragged.ragged_math_ops", "matmul"),
    }
)
# Modules whose conversions are for something that has its dtype already: a variable or a queue.
FIXED_DTYPES = (
    "tensorflow.python.ops.data_flow_ops",
    "tensorflow.python.ops.resource_variable_ops",
)
# Modules a cast passes through between whoever asked for it and TensorFlow's cast op.
IN_BETWEEN = (
    "tensorflow.python.autograph.",
    "tensorflow.python.ops.math_ops",
    "tensorflow.python.ops.weak_tensor_ops",
    "tensorflow.python.util.",
    "keras.src.backend.tensorflow.core",
    "keras.src.ops.",
    "keras.src.utils.traceback_utils",
    "tfamp.",
)
LIBRARIES = ("tensorflow.", "keras.", "tf_keras.")
