"""What all pictures share: matplotlib where it is installed, colours and axes; no global state."""

from __future__ import annotations

from typing import Any

# Of Okabe and Ito's palette, which people with all common kinds of colour blindness tell apart.
BLUE, ORANGE, GREEN, RED, SKY, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#5b6675",
)
INK, FAINT, GRID = "#1c2430", "#5b6675", "#d5dae1"


def new_figure(width: float, height: float, **options: Any) -> Any:
    """Returns an empty figure on white, of inches, that belongs to no window.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'Pictures need matplotlib: pip install "tfamp[plot]".', name="matplotlib"
        ) from error
    # White and dark ink whatever style is set: pictures are put on pages of any colour.
    return Figure(
        figsize=(width, height), dpi=120, layout="constrained", facecolor="white", **options
    )


def dress(axes: Any, *, title: str | None = None) -> None:
    """Gives axes the look of all pictures."""
    axes.set_facecolor("white")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.set_axisbelow(True)
    if title is not None:
        axes.set_title(title, loc="left", fontsize=10, color=INK)


def power_of_two(exponent: float, _: Any = None) -> str:
    """Returns the label of a tick at an exponent."""
    return f"$2^{{{exponent:.0f}}}$"
