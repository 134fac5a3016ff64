"""Files that users give instead of a SavedModel, and how to make a SavedModel of each."""

from __future__ import annotations

from pathlib import Path

_EXPORT = 'model.export("DIRECTORY") writes a SavedModel of it'
_BUILD = f"Build the model in Python and load them into it: {{}}; then {_EXPORT}."


def what_else_it_is(path: Path) -> str:
    """Returns the message for a path that is not the directory of a SavedModel."""
    name = str(path)
    for folder in path.parents[:2]:
        if path.exists() and (folder / "saved_model.pb").is_file():
            return f"{name} is not a SavedModel but a part of one; give its directory, {folder}."
    checkpoint = _checkpoint(path)
    if checkpoint is not None:
        call = f"for example tf.train.Checkpoint(model=model).restore({checkpoint!r})"
        return f"{name} is a checkpoint: it holds variables without a model. {_BUILD.format(call)}"
    if not path.exists():
        return (
            f"There is no directory {name}; give the directory of a SavedModel. "
            'Of a Keras model, model.export("DIRECTORY") writes one.'
        )
    if name.endswith(".weights.h5"):
        call = f"model.load_weights({name!r})"
        return f"{name} holds weights without a model. {_BUILD.format(call)}"
    load = f"keras.saving.load_model({name!r}, compile=False)"
    if path.suffix == ".keras":
        return f"{name} is a Keras model, not a SavedModel. In Python, model = {load}; {_EXPORT}."
    if path.suffix in (".h5", ".hdf5"):
        call = f"model.load_weights({name!r})"
        return (
            f"{name} is an HDF5 file, not a SavedModel. If it holds a whole model, model = {load} "
            f"in Python. If it holds weights, build the model and call {call}. Then {_EXPORT}."
        )
    return (
        f"{name} is not a SavedModel: it has no saved_model.pb. Give the directory that "
        'tf.saved_model.save or model.export("DIRECTORY") wrote.'
    )


def _checkpoint(path: Path) -> str | None:
    """Returns the prefix of a checkpoint that a path means; None for anything else."""
    if path.is_dir():
        indexes = sorted(path.glob("*.index"), key=lambda file: file.stat().st_mtime)
        return str(indexes[-1].with_suffix("")) if indexes else None
    if path.name == "checkpoint" and path.is_file():
        return _checkpoint(path.parent)
    prefix = path.with_suffix("") if path.suffix == ".index" or ".data-" in path.name else path
    return str(prefix) if Path(f"{prefix}.index").is_file() else None
