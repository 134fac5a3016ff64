"""Error and warning classes of tfamp; a leaf module that imports nothing.

Bad arguments are `ValueError` or `TypeError`, as everywhere in Python. The classes here are
specific to tfamp, so that a program can catch or filter them by name.
"""


class TfampError(Exception):
    """Base class of every error that only tfamp can raise.

    Example:
        >>> import tfamp
        >>> issubclass(tfamp.UnsupportedVersionError, tfamp.TfampError)
        True
    """


class UnsupportedVersionError(TfampError):
    """A private TensorFlow or Keras symbol tfamp relies on is missing in the installed release.

    The message names the symbol, the installed version and the versions tfamp was tested with.

    Example:
        >>> import tfamp
        >>> raise tfamp.UnsupportedVersionError("keras.src.x is gone in Keras 9.9")
        Traceback (most recent call last):
        ...
        tfamp.core.errors.UnsupportedVersionError: keras.src.x is gone in Keras 9.9
    """


class UnsupportedBackendError(TfampError, RuntimeError):
    """Keras runs on a backend other than TensorFlow, and this part of tfamp cannot work there.

    The message names the part, the backend, and what to use instead. Policies and
    `LossScaleOptimizer` work on every backend.

    Example:
        >>> import tfamp
        >>> issubclass(tfamp.UnsupportedBackendError, (tfamp.TfampError, RuntimeError))
        True
    """


class TfampWarning(UserWarning):
    """Base class of all warnings of tfamp, so that one filter reaches them all.

    Example:
        >>> import warnings, tfamp
        >>> warnings.filterwarnings("ignore", category=tfamp.TfampWarning)
    """


class TfampDeprecationWarning(TfampWarning, DeprecationWarning):
    """A name or an argument of tfamp has a new name; the message says which, and until when.

    Example:
        >>> import warnings, tfamp
        >>> warnings.filterwarnings("error", category=tfamp.TfampDeprecationWarning)
    """


class RewriteError(TfampError):
    """A graph cannot be rewritten; the message names the node, its op and the cause.

    Example:
        >>> import tfamp
        >>> issubclass(tfamp.RewriteError, tfamp.TfampError)
        True
    """


class SavedModelError(TfampError):
    """A SavedModel cannot be read, rewritten or written; the message names the directory.

    Nothing was written, and an existing destination is unchanged.

    Example:
        >>> import tfamp
        >>> tfamp.rewrite_saved_model("nowhere", "anywhere", dtype="bfloat16")
        Traceback (most recent call last):
        ...
        tfamp.core.errors.SavedModelError: There is no directory nowhere; ...
    """


class NothingConvertedWarning(TfampWarning):
    """A graph was rewritten, and none of its ops computes in low precision: it is unchanged.

    Example:
        >>> import warnings, tfamp
        >>> warnings.filterwarnings("error", category=tfamp.NothingConvertedWarning)
    """


class SkippedStepsError(TfampError):
    """Training was stopped because too many steps in a row were skipped.

    The message names the first variable whose gradient was not finite. Skipped steps change no
    weight, so the model is in the state after the last finite step.

    Example:
        >>> import tfamp
        >>> issubclass(tfamp.SkippedStepsError, tfamp.TfampError)
        True
    """
