"""Pictures: what is drawn, that nothing global is touched, what is said where they cannot be."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.cases import first_of
from helpers.monitor_records import made_record
from tfamp.diagnostics import plot_exponents, plot_loss_scale

matplotlib = pytest.importorskip("matplotlib")
FigureCanvasAgg = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg

HISTORY = [
    made_record(100, changes=[[1, 2.0**16], [31, 2.0**15]], skipped=[30]),
    made_record(200, scale=2.0**13, changes=[[101, 2.0**15], [150, 2.0**14], [151, 2.0**13]],
                skipped=[149, 150]),
]  # fmt: skip


def heights(axes):
    """Exponent -> height of the bars."""
    return {round(bar.get_x()): bar.get_height() for bar in axes.patches if bar.get_width() < 1}


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_the_loss_scale_is_drawn_step_by_step_with_the_skips():
    before = dict(matplotlib.rcParams)
    figure = plot_loss_scale(HISTORY)
    assert dict(matplotlib.rcParams) == before
    assert figure.canvas.manager is None
    assert figure._repr_png_().startswith(b"\x89PNG")
    (axes,) = figure.axes
    scale, suggested, skips = axes.lines
    assert list(zip(*scale.get_data(), strict=True)) == [
        (1, 16), (31, 15), (150, 14), (151, 13), (200, 13)
    ]  # fmt: skip
    assert list(zip(*skips.get_data(), strict=True)) == [(30, 16), (149, 15), (150, 14)]
    assert list(suggested.get_xdata()) == [100, 200]
    assert "skipped step (3)" in texts(figure)


def test_exponents_of_all_or_one_variable_are_drawn_before_and_after_scaling():
    above, below = plot_exponents(HISTORY[0]).axes
    assert heights(above) == {-20: 0.3, -8: 0.6, 0: 0.1}
    assert heights(below) == {-5: 0.3, 7: 0.6, 15: 0.1}
    assert above.get_title(loc="right") == "flushed 0.0%   subnormal 30.0%   overflow 0.0%"
    assert below.get_title(loc="right") == "flushed 0.0%   subnormal 0.0%   overflow 0.0%"
    edges = [bar.get_x() for bar in above.patches if bar.get_width() > 1]
    assert edges[1:] == [-24, -14, 16]
    drawn = texts(plot_exponents(HISTORY, variable="dense/bias"))
    assert any("dense/bias" in text for text in drawn)
    with pytest.raises(ValueError, match="'x'.*dense/kernel, dense/bias"):
        plot_exponents(HISTORY, variable="x")


def test_several_records_are_drawn_together_each_with_its_own_scale():
    figure = plot_exponents(HISTORY)
    below = figure.axes[1]
    assert heights(below) == pytest.approx({-5: 0.15, 7: 0.3, 15: 0.05, -7: 0.15, 5: 0.3, 13: 0.05})
    assert "with loss scale $2^{13}$ to $2^{15}$" in texts(figure)
    assert any("20.0% of the values are zero" in text for text in texts(figure))


def pixels(figure):
    """The share of a figure's pixels that are not white, by colour channel."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return (np.asarray(canvas.buffer_rgba())[..., :3] < 250).mean(axis=(0, 1))


def test_far_away_exponents_are_drawn_at_the_ends_of_the_axes():
    figure = plot_exponents(made_record(counts={-127: 1, 100: 1}))
    for axes in figure.axes:
        left, right = axes.get_xlim()
        assert heights(axes) == {left: 0.5, right - 1: 0.5}
        assert axes.get_title(loc="right") == "flushed 50.0%   subnormal 0.0%   overflow 50.0%"
    assert (pixels(figure) > 0.01).all()


def test_without_a_gradient_there_are_no_bars_and_the_text_says_so():
    figure = plot_exponents(made_record(counts={}))
    for axes in figure.axes:
        assert not heights(axes)
        assert axes.get_title(loc="right") == "flushed 0.0%   subnormal 0.0%   overflow 0.0%"
    assert any("100.0% of the values are zero" in text for text in texts(figure))
    assert (pixels(figure) > 0.01).all()


def test_a_scale_of_one_without_a_gradient_is_a_line_at_one():
    figure = plot_loss_scale(made_record(counts={}, scale=1.0))
    (axes,) = figure.axes
    assert [set(line.get_ydata()) for line in axes.lines] == [{0.0}]
    left, right = axes.get_ylim()
    assert left < 0.0 < right
    assert (pixels(figure) > 0.005).all()
    assert "$2^{0}$" in [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("plot", first_of([plot_loss_scale, plot_exponents]))
def test_a_monitor_its_history_and_its_file_are_drawn_alike(plot, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in HISTORY))
    given = [HISTORY, SimpleNamespace(history=HISTORY), path, str(path)]
    drawn = []
    for i, history in enumerate(given):
        plot(history).savefig(tmp_path / f"{i}.png")
        drawn.append((tmp_path / f"{i}.png").read_bytes())
    assert drawn[0].startswith(b"\x89PNG")
    assert len(set(drawn)) == 1


@pytest.mark.parametrize("plot", [plot_exponents, plot_loss_scale])
def test_without_a_record_there_is_an_error(plot):
    with pytest.raises(ValueError, match="no record to show"):
        plot([])
    with pytest.raises(ValueError, match="take a NumericsMonitor"):
        plot({"loss": [0.5]})


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch):
    for name in {"matplotlib", *sys.modules}:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
    for plot in (plot_loss_scale, plot_exponents):
        with pytest.raises(ModuleNotFoundError, match=r'pip install "tfamp\[plot\]"'):
            plot(HISTORY)


@pytest.mark.parametrize("scale", [math.inf, 0.0])
def test_scales_that_kerass_optimizer_lets_go_beyond_float32_are_drawn(scale, tmp_path):
    records = [made_record(step=step, counts={-4: 1}, scale=1.0) for step in (10, 20)]
    records[1] |= {"loss_scale": scale, "loss_scales": [[11, scale]], "suggested_scale": None}
    path = tmp_path / "log.jsonl"
    plain = [json.loads(json.dumps(each), parse_constant=lambda name: None) for each in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in plain))
    for history in (records, path):
        (axes,) = plot_loss_scale(history).axes
        assert axes.lines[0].get_ydata()[-1] == (128.0 if scale else -149.0)
        assert len(plot_exponents(history).axes) == 2
