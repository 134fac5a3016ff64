"""Each private TensorFlow symbol, so that a release that changes one says which."""

import pytest
import tensorflow as tf

import tfamp
from tfamp import _tf_private


def test_no_strategy_needs_no_merge_call():
    assert not _tf_private.strategy_needs_merge_call()


def test_mirrored_strategy_on_cpus_needs_merge_call(two_replicas):
    answers = []
    two_replicas.run(lambda: answers.append(_tf_private.strategy_needs_merge_call()))
    assert answers == [True, True]


def test_missing_symbol_names_itself_and_the_versions(monkeypatch):
    monkeypatch.delattr(
        tf.__internal__.distribute, "strategy_supports_no_merge_call", raising=True
    )
    with pytest.raises(
        tfamp.UnsupportedVersionError,
        match=rf"strategy_supports_no_merge_call is not in TensorFlow {tf.__version__}",
    ):
        _tf_private.strategy_needs_merge_call()
