"""A matplotlib figure that a notebook shows; matplotlib is loaded with this module."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure of no window: of such, IPython shows only those made after pyplot is imported."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()
