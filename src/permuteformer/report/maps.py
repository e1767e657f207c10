"""Figures of attention maps: attention weights by distance, in two dimensions, and token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from permuteformer.report.cells import Group, shorten, slug
from permuteformer.report.figure import INK, Figure, Line, draw, height_with_legend, legend, line_figure, log_ticks
from permuteformer.report.tables import by_column

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    Array = np.ndarray[Any, np.dtype[np.float64]]

MAX_LAYERS = 12
MAX_TOKEN_LABELS = 24
DISTANCE, WEIGHT = "distance i − j (tokens)", "average attention weight"


def map_figures(groups: Sequence[Group], skipped: list[str]) -> list[Figure]:
    """Return for each task the weights by distance of all its models, then each model's maps, of its first seed that has any.

    Maps of another shape are skipped with a message.
    """
    figures: list[Figure] = []
    for column, members in by_column(group for group in groups if _maps_of(group)).items():
        first = members[0]
        stem, task = slug("maps", first.table, first.preset, column), first.column_title
        kernels: list[tuple[Group, Array, Array]] = []
        own_figures: list[Figure] = []
        for group in members:
            name, title, maps = f"{stem}-{slug(group.row)}", f"{task}: {group.row_title}", _maps_of(group)
            if maps.get("reason"):
                skipped.append(f"skipped: the attention maps of {group.first.name}, which has no weights ({maps['reason']})")
                continue
            try:
                if kernel := maps.get("kernel"):
                    distances, layers = _read_kernel(kernel)
                    kernels.append((group, distances, layers))
                    own_figures.append(_kernel_figure(f"{name}-kernel", f"{title}, by layer", distances, layers, kernel))
                if grid := maps.get("kernel_2d"):
                    own_figures.append(_grid_figure(f"{name}-grid", f"{title}, in 2D", grid))
                if (weights := maps.get("maps")) and weights.get("layers"):
                    own_figures.append(_weights_figure(f"{name}-attention", f"{title}, attention", weights))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reason = shorten(str(error), 120)
                skipped.append(f"skipped: the attention maps of {group.first.name}, which have an unknown shape ({reason})")
        if len(kernels) > 1:
            figures.append(_kernels_figure(f"{stem}-kernels", f"{task}: attention by distance", kernels))
        figures += own_figures
    return figures


def similarity_figure(title: str, distances: Sequence[int], panels: Mapping[str, Any], heads: Sequence[str]) -> Figure:
    """Draw the similarity of a token to itself at other distances.

    Args:
        title: the title.
        distances: the distances, in tokens or in pixels.
        panels: by title, numbers by head and distance, or by row and column.
        heads: names of the heads, for the legend; empty for maps by row and column.
    """
    import numpy as np
    from matplotlib import colormaps

    values = _array(list(panels.values()), 3)
    if not heads:
        caption = "Similarity of two pixels by the rows and columns between them."
        low, high = distances[0] - 0.5, distances[-1] + 0.5
        labels = ("columns between (pixels)", "rows between (pixels)")
        return _heat_figure("similarity", title, caption, values, labels, (low, high, high, low), bar="similarity", names=list(panels))
    colors = colormaps["viridis"](np.linspace(0, 0.9, len(heads)))

    def paint_panel(axes: Axes, panel: int) -> None:
        for line, color, name in zip(values[panel], colors, heads, strict=True):
            axes.plot(distances, line, color=color, linewidth=1.2, label=name)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("distance i − j (tokens)")  # a label of the whole figure would be under the legend

    def finish(canvas: Canvas, drawn: Sequence[Axes]) -> None:
        legend(canvas, drawn[0])

    caption = "Similarity of a token to itself by distance: the share of features back in place, times the decay."
    labels = ("", "score relative to distance 0")
    height = height_with_legend(heads, 2.2)
    return _panels("similarity", title, caption, list(panels), paint_panel, labels, height, finish)


def _maps_of(group: Group) -> Mapping[str, Any]:
    return next((run.maps for run in group.runs if run.maps), {})


def _read_kernel(kernel: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return distances, and weights by layer, head and distance."""
    distances, layers = _array(kernel["distances"], 1), _array(kernel["layers"], 3)
    if layers.shape[2] != len(distances):
        raise ValueError(f"{len(distances)} distances and {layers.shape[2]} weights")
    return distances, layers[:MAX_LAYERS]


def _kernels_figure(name: str, title: str, kernels: Sequence[tuple[Group, Array, Array]]) -> Figure:
    """Draw the mean weight by distance of several models. Models with negative weights would hide the others."""
    means = [(group, distances, layers.mean(axis=(0, 1))) for group, distances, layers in kernels]
    drawn = [entry for entry in means if entry[2].min() >= 0] or means
    scale, log_note = _weight_scale([mean for *_, mean in drawn])
    caption = "Attention weight by distance between query i and key j, averaged over inputs, heads and layers." + log_note
    missing = [group.row_title for group, _, mean in means if mean.min() < 0] if len(drawn) < len(means) else []
    if missing:
        caption += f" Without {' and '.join(missing)}, whose weights are also negative."
    lines = [Line(group.row, group.row_title, tuple(distances), tuple(mean)) for group, distances, mean in drawn]
    return line_figure(name, title, caption, lines, (DISTANCE, WEIGHT), finish=scale)


def _kernel_figure(name: str, title: str, distances: Array, layers: Array, kernel: Mapping[str, Any]) -> Figure:
    """Draw the weights by distance of each head of each layer, and their mean."""
    from matplotlib import colormaps

    heads = layers.shape[1]
    colors = colormaps["viridis"]([0.3 + 0.5 * head / max(1, heads - 1) for head in range(heads)])
    scale, log_note = _weight_scale([layers.ravel()])

    def paint_layer(axes: Axes, layer: int) -> None:
        for head in range(heads):
            axes.plot(distances, layers[layer, head], color=colors[head], linewidth=0.9, alpha=0.9)
        axes.plot(distances, layers[layer].mean(axis=0), color=INK, linewidth=1.8)
        axes.margins(x=0.02)
        scale(axes)
        if log_note:
            log_ticks(axes.yaxis)

    thin = f"its {heads} heads, from blue to green" if heads > 1 else "its one head"
    caption = f"One panel per layer: thin lines are {thin}, the thick line is their mean.{log_note}"
    caption += "" if kernel.get("normalised", True) else " The weights of a query do not add up to 1 here."
    return _panels(name, title, caption, len(layers), paint_layer, (DISTANCE, WEIGHT), 1.45)


def _weight_scale(lines: Sequence[Array]) -> tuple[Callable[[Axes], None], str]:
    """Return a function that sets the axis of weights, and a sentence if it is logarithmic: positive weights that fall by more than ten."""
    import numpy as np

    values = np.concatenate(lines)
    values = values[np.isfinite(values)] if np.isfinite(values).any() else np.array([0.0, 1.0])
    low, high = np.quantile(values, (0.05, 0.95))  # so that a single weight near zero does not decide
    least, most = float(values.min()), float(values.max())
    is_log = least > 0 and high / low > 10
    margin = 0.05 * (most - min(least, 0.0)) or 1.0
    bottom, top = (max(least, high * 1e-6), most * 1.2) if is_log else (least - margin if least < 0 else 0.0, most + margin)

    def scale(axes: Axes) -> None:
        axes.set_yscale("log" if is_log else "linear")
        axes.set_ylim(bottom, top)

    return scale, " The axis of weights is logarithmic." if is_log else ""


def _grid_figure(name: str, title: str, grid: Mapping[str, Any]) -> Figure:
    rows, columns, layers = _array(grid["rows"], 1), _array(grid["columns"], 1), _array(grid["layers"], 4)[:MAX_LAYERS].mean(axis=1)
    if layers.shape[1:] != (len(rows), len(columns)):
        raise ValueError(f"a grid of {len(rows)} x {len(columns)} and weights of {layers.shape[1]} x {layers.shape[2]}")
    extent = (columns[0] - 0.5, columns[-1] + 0.5, rows[-1] + 0.5, rows[0] - 0.5)
    caption = "Average attention weight by the rows and columns between query i and key j, mean over heads; one panel per layer."
    return _heat_figure(name, title, caption, layers, ("column of i − column of j (pixels)", "row of i − row of j (pixels)"), extent)


def _weights_figure(name: str, title: str, weights: Mapping[str, Any]) -> Figure:
    layers = _array(weights["layers"], 3)[:MAX_LAYERS]
    tokens = [shorten(str(token), 8) for token in weights.get("tokens") or []]
    caption = "Attention weights of one input, mean over heads; one panel per layer, one row per query."
    shown = tokens if len(tokens) == layers.shape[2] <= MAX_TOKEN_LABELS else []
    return _heat_figure(name, title, caption, layers, ("key j (token)", "query i (token)"), None, shown)


def _heat_figure(
    name: str,
    title: str,
    caption: str,
    layers: Array,
    labels: tuple[str, str],
    extent: tuple[float, float, float, float] | None,
    tokens: Sequence[str] = (),
    bar: str = "attention weight",
    names: Sequence[str] = (),
) -> Figure:
    """Draw matrices as colours. The scale ends at the largest of 99 % of the weights; zero is in its middle if there are negative ones."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    finite = layers[np.isfinite(layers)]
    low, high = (float(value) for value in np.quantile(finite, (0.005, 0.995))) if finite.size else (0.0, 1.0)
    is_signed = low < 0
    high = max(-low, high) if is_signed else high or float(finite.max(initial=0.0)) or 1.0
    low, colors = (-high, "PuOr") if is_signed else (0.0, "viridis")
    is_clipped = bool(finite.size and (finite.max() > high or finite.min() < low))
    images: list[Any] = []

    def paint_layer(axes: Axes, layer: int) -> None:
        axes.grid(visible=False)
        images.append(axes.imshow(layers[layer], cmap=colors, vmin=low, vmax=high, extent=extent, interpolation="nearest"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        if tokens:
            axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=6)
            axes.set_yticks(range(len(tokens)), tokens, fontsize=6)

    def finish(canvas: Canvas, drawn: Sequence[Axes]) -> None:
        extend = ("both" if is_signed else "max") if is_clipped else "neither"
        canvas.colorbar(images[-1], ax=list(drawn), shrink=0.85, extend=extend).set_label(bar)

    caption += " One weight in two hundred is beyond the scale." if is_clipped else ""
    return _panels(name, title, caption, names or len(layers), paint_layer, labels, 2.0, finish)


def _panels(
    name: str,
    title: str,
    caption: str,
    panels: int | Sequence[str],
    paint_panel: Callable[[Axes, int], None],
    labels: tuple[str, str],
    panel_height: float,
    finish: Callable[[Canvas, Sequence[Axes]], None] | None = None,
) -> Figure:
    """Draw panels two side by side, with the same axes. ``panels`` are their titles, or a number of layers."""
    names = [f"layer {layer + 1}" for layer in range(panels)] if isinstance(panels, int) else panels
    count, columns = len(names), min(2, len(names))
    lines = -(-count // columns)

    def paint(canvas: Canvas) -> None:
        drawn = canvas.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten().tolist()
        for number, axes in enumerate(drawn[:count]):
            paint_panel(axes, number)
            axes.set_title(names[number])
        if len(drawn) > count:
            drawn[-1].set_visible(False)
            drawn[-1 - columns].tick_params(labelbottom=True)
        canvas.supxlabel(labels[0], fontsize=9)
        canvas.supylabel(labels[1], fontsize=9)
        if finish is not None:
            finish(canvas, drawn[:count])

    return draw(name, title, caption, paint, 0.6 + panel_height * lines + (0.8 if columns == 1 else 0.0))


def _array(values: Any, dimensions: int) -> Array:
    import numpy as np

    array: Array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions or not array.size:
        raise ValueError(f"an array of shape {array.shape}, not of {dimensions} dimensions")
    return array
