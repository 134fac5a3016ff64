"""Shows examples of docstrings as code, and values of defaults: an extension of griffe's.

A docstring of tfamp ends with "Example:". Griffe knows "Examples:" only, and reads "Example:" as
a note in Markdown: `>>>` becomes three nested quotations, and `[(1, 2)][0]` a broken link, which a
strict build refuses.

A default that is a constant of the module, such as the `_DEFAULT_LEVEL` of `prepare`, is shown by
its value.
"""

import re

import griffe

_CONSTANT = re.compile(r"_[A-Z_]+")
_TEXT = re.compile(r"\w+\((\".*\")\)")
_SECTION = re.compile(r"^([ \t]*)Example:[ \t]*$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Reads the heading "Example:" as "Examples:", and constants in signatures as their values."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called with every module, class, function and attribute that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub(r"\1Examples:", obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **kwargs: object) -> None:
        """Called with every function that was loaded."""
        for parameter in func.parameters:
            name = str(parameter.default)
            constant = func.module.members.get(name) if _CONSTANT.fullmatch(name) else None
            if isinstance(constant, griffe.Attribute):
                value = str(constant.value)
                text = _TEXT.fullmatch(value)
                parameter.default = value if text is None else text[1]
