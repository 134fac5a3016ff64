"""Shows the examples of docstrings as code: a griffe extension that the site's build loads.

A docstring of tfamp ends with "Example:". Griffe knows "Examples:" only, and reads "Example:" as
a note in Markdown: `>>>` becomes three nested quotations, and `[(1, 2)][0]` a broken link, which a
strict build refuses.
"""

import re

import griffe

_SECTION = re.compile(r"^([ \t]*)Example:[ \t]*$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Reads the heading "Example:" as "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called with every module, class, function and attribute that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub(r"\1Examples:", obj.docstring.value)
