"""Figures of looks into models: how attention falls with distance, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from permuteformer.report.figure import INK, Figure, draw, legend, legend_height, log_ticks, style
from permuteformer.report.groups import Group, shorten, slug
from permuteformer.report.table import by_column

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    Array = np.ndarray[Any, np.dtype[np.float64]]

MOST_LAYERS = 12
MOST_TOKENS_NAMED = 24


def figures_of_looks(groups: Sequence[Group], left_out: list[str]) -> list[Figure]:
    """The position kernels of all models of a task in one figure, then each model's kernels, maps of images and maps of attention.

    Of several seeds the lowest that was looked into is shown. A look that does not have the shape it should is left out and told.
    """
    figures: list[Figure] = []
    for column, of_it in by_column(group for group in groups if _look(group)).items():
        first = of_it[0]
        stem, task = slug("look", first.table, first.preset, column), first.column_title
        kernels: list[tuple[Group, Array, Array]] = []
        singles: list[Figure] = []
        for group in of_it:
            name, title = f"{stem}-{slug(group.row)}", f"{task}: {group.row_title}"
            try:
                if _look(group).get("reason"):
                    left_out.append(f"left out: the look into {group.first.run}, which has no weights ({_look(group)['reason']})")
                kernel = _kernel(_look(group))
                if kernel is not None:
                    kernels.append((group, *kernel))
                    sums = bool(_look(group)["kernel"].get("normalised", True))
                    singles.append(_kernel_figure(f"{name}-kernel", f"{title}, kernel by layer", *kernel, sums_to_one=sums))
                singles += _grid_figure(f"{name}-grid", f"{title}, kernel in 2D", _look(group))
                singles += _map_figure(f"{name}-attention", f"{title}, attention", _look(group))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                left_out.append(f"left out: the look into {group.first.run}, which is not of the known shape ({shorten(str(error), 120)})")
        if len(kernels) > 1:
            figures.append(_kernels_figure(f"{stem}-kernels", f"{task}: position kernels", kernels))
        figures += singles
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

    values: Array = np.asarray(list(panels.values()), dtype=np.float64)
    names = list(panels)
    if not heads:
        caption = "Similarity of two pixels by the rows and columns between them."
        low, high = distances[0] - 0.5, distances[-1] + 0.5
        labels = ("columns between (pixels)", "rows between (pixels)")
        return _heat_figure("similarity", title, caption, values, labels, (low, high, high, low), bar="similarity", names=names)
    colors = colormaps["viridis"](np.linspace(0, 0.9, len(heads)))

    def paint_panel(axes: Axes, panel: int) -> None:
        for line, color, name in zip(values[panel], colors, heads, strict=True):
            axes.plot(distances, line, color=color, linewidth=1.2, label=name)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("distance i − j (tokens)")  # the figure's own label would be under the legend

    def finish(canvas: Canvas, every: Sequence[Axes]) -> None:
        legend(canvas, every[0])

    caption = "Similarity of a token to itself by distance: the share of features back in place, times the decay."
    labels = ("", "score relative to distance 0")
    height = 2.2 + legend_height(list(heads))
    return _panels("similarity", title, caption, len(names), paint_panel, labels, panel_height=height, finish=finish, names=names)


def _look(group: Group) -> dict[str, Any]:
    return next((dict(record.looks) for record in group.records if record.looks), {})


def _kernel(look: dict[str, Any]) -> tuple[Array, Array] | None:
    """Distances, and scores by layer, head and distance."""
    kernel = look.get("kernel")
    if not kernel:
        return None
    distances, layers = _array(kernel["distances"], 1), _array(kernel["layers"], 3)
    if layers.shape[2] != len(distances):
        raise ValueError(f"{len(distances)} distances and {layers.shape[2]} scores")
    return distances, layers[:MOST_LAYERS]


def _kernels_figure(name: str, title: str, kernels: Sequence[tuple[Group, Array, Array]]) -> Figure:
    drawn = [entry for entry in kernels if entry[2].mean(axis=(0, 1)).min() >= 0] or kernels
    left_out = [group.row_title for group, _, layers in kernels if layers.mean(axis=(0, 1)).min() < 0] if drawn is not kernels else []
    scale = _Scale([layers.mean(axis=(0, 1)) for _, _, layers in drawn])

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for place, (group, distances, layers) in enumerate(drawn):
            look = style(group.row, place)
            every = max(1, len(distances) // 8)
            axes.plot(
                distances,
                layers.mean(axis=(0, 1)),
                label=group.row_title,
                color=look.color,
                linestyle=look.dashes,
                marker=look.marker,
                markevery=(place * every // len(drawn), every),
            )
        scale.set_on(axes)
        axes.set_xlabel("distance i − j (tokens)")
        axes.set_ylabel("average attention weight")
        legend(canvas, axes)

    caption = "Attention weight at each distance between query i and key j, averaged over inputs, heads and layers." + scale.told
    if left_out:
        caption += f" Of {' and '.join(left_out)}, weights are negative too, and many times as large: see its own picture."
    return draw(name, title, caption, paint, 3.2 + legend_height([group.row_title for group, _, _ in drawn]))


def _kernel_figure(name: str, title: str, distances: Array, layers: Array, *, sums_to_one: bool) -> Figure:
    caption = "" if sums_to_one else "Here the weights of a query do not add up to 1."
    return _heads_figure(name, title, caption, distances, layers, ("distance i − j (tokens)", "average attention weight"))


def _heads_figure(
    name: str, title: str, more: str, distances: Array, layers: Array, labels: tuple[str, str], names: Sequence[str] = ()
) -> Figure:
    """Lines of the heads of each layer, and their mean."""
    from matplotlib import colormaps

    heads = layers.shape[1]
    colors = colormaps["viridis"]([0.3 + 0.5 * head / max(1, heads - 1) for head in range(heads)])
    scale = _Scale([layers.ravel()])

    def paint_layer(axes: Axes, layer: int) -> None:
        for head in range(heads):
            axes.plot(distances, layers[layer, head], color=colors[head], linewidth=0.9, alpha=0.9)
        axes.plot(distances, layers[layer].mean(axis=0), color=INK, linewidth=1.8)
        scale.set_on(axes)

    many = f"its {heads} heads, from blue to green" if heads > 1 else "its one head"
    caption = f"A panel a layer: thin lines are {many}, the thick line is their mean.{scale.told} {more}".strip()
    return _panels(name, title, caption, len(layers), paint_layer, labels, panel_height=1.45, names=names)


class _Scale:
    """The axis of weights: logarithmic where they fall over more than a decade and are above zero."""

    def __init__(self, lines: Sequence[Array]) -> None:
        import numpy as np

        values = np.concatenate(lines)
        values = values[np.isfinite(values)]
        low, high = np.quantile(values, (0.05, 0.95)) if len(values) else (0.0, 0.0)  # a single weight near zero decides nothing
        self.logarithmic = bool(len(values) and values.min() > 0 and high / low > 10)
        least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        if self.logarithmic:
            self.limits = (max(least, float(high) * 1e-6), most * 1.2)
        else:
            margin = 0.05 * (most - min(least, 0.0)) or 1.0
            self.limits = (least - margin if least < 0 else 0.0, most + margin)

    @property
    def told(self) -> str:
        return " The axis of weights is logarithmic." if self.logarithmic else ""

    def set_on(self, axes: Axes) -> None:
        if self.logarithmic:
            axes.set_yscale("log")
        axes.set_ylim(*self.limits)
        if self.logarithmic:
            log_ticks(axes.yaxis)
        axes.margins(x=0.02)


def _grid_figure(name: str, title: str, look: dict[str, Any]) -> list[Figure]:
    grid = look.get("kernel_2d")
    if not grid:
        return []
    rows, columns, layers = _array(grid["rows"], 1), _array(grid["columns"], 1), _array(grid["layers"], 4)[:MOST_LAYERS].mean(axis=1)
    if layers.shape[1:] != (len(rows), len(columns)):
        raise ValueError(f"a grid of {len(rows)} x {len(columns)} and weights of {layers.shape[1]} x {layers.shape[2]}")
    extent = (columns[0] - 0.5, columns[-1] + 0.5, rows[-1] + 0.5, rows[0] - 0.5)
    caption = "Average attention weight by how many rows and columns query i is from key j, mean over heads; a panel a layer."
    return [_heat_figure(name, title, caption, layers, ("column of i − column of j (pixels)", "row of i − row of j (pixels)"), extent)]


def _map_figure(name: str, title: str, look: dict[str, Any]) -> list[Figure]:
    maps = look.get("maps")
    if not maps or not maps.get("layers"):
        return []
    layers = _array(maps["layers"], 3)[:MOST_LAYERS]
    tokens = [shorten(str(token), 8) for token in maps.get("tokens") or []]
    named = tokens if len(tokens) == layers.shape[2] <= MOST_TOKENS_NAMED else []
    caption = "Attention weights of one input, mean over heads; a panel a layer, a row a query."
    return [_heat_figure(name, title, caption, layers, ("key j (token)", "query i (token)"), None, named)]


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
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    finite = layers[np.isfinite(layers)]
    low, top = (float(value) for value in np.quantile(finite, (0.005, 0.995))) if finite.size else (0.0, 1.0)
    signed = low < 0  # weights may be negative where the normaliser is another one: then the middle of the colours is zero
    top = max(-low, top) if signed else top or float(finite.max(initial=0.0)) or 1.0
    low, colors = (-top, "PuOr") if signed else (0.0, "viridis")
    clipped = bool(finite.size and (finite.max() > top or finite.min() < low))
    images: list[Any] = []

    def paint_layer(axes: Axes, layer: int) -> None:
        axes.grid(visible=False)
        images.append(axes.imshow(layers[layer], cmap=colors, vmin=low, vmax=top, extent=extent, interpolation="nearest", aspect="equal"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        if tokens:
            axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=6)
            axes.set_yticks(range(len(tokens)), tokens, fontsize=6)

    def finish(canvas: Canvas, every: Sequence[Axes]) -> None:
        extend = ("both" if signed else "max") if clipped else "neither"
        canvas.colorbar(images[-1], ax=list(every), shrink=0.85, extend=extend).set_label(bar)
        images.clear()

    many = caption + (" The largest weights, one in two hundred, are beyond the scale." if clipped else "")
    return _panels(name, title, many, len(layers), paint_layer, labels, panel_height=2.0, finish=finish, names=names)


def _panels(
    name: str,
    title: str,
    caption: str,
    count: int,
    paint_layer: Callable[[Axes, int], None],
    labels: tuple[str, str],
    panel_height: float,
    finish: Callable[[Canvas, Sequence[Axes]], None] | None = None,
    names: Sequence[str] = (),
) -> Figure:
    """A panel for each layer, two beside each other, with the same axes; they are numbered where they have no names."""
    columns = min(2, count)
    lines = -(-count // columns)

    def paint(canvas: Canvas) -> None:
        every = canvas.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten().tolist()
        for layer, axes in enumerate(every):
            if layer >= count:
                axes.set_visible(False)
                every[layer - columns].tick_params(labelbottom=True)
                continue
            paint_layer(axes, layer)
            axes.set_title(names[layer] if names else f"layer {layer + 1}")
        canvas.supxlabel(labels[0], fontsize=9)
        canvas.supylabel(labels[1], fontsize=9)
        if finish is not None:
            finish(canvas, every[:count])

    return draw(name, title, caption, paint, 0.6 + panel_height * lines + (0.8 if columns == 1 else 0.0))


def _array(values: Any, dimensions: int) -> Array:
    import numpy as np

    array: Array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions or not array.size:
        raise ValueError(f"{dimensions} dimensions are needed, and there are {array.ndim}, of size {array.shape}")
    return array
