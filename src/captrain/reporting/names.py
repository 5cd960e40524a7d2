"""Names beside points that hide neither each other nor, where there is room, a point.

Where words stand is known when a figure is laid out: so they are measured then, and those that overlap are moved.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from captrain.reporting.style import DPI

Place = tuple[float, float, Literal["left", "right"]]
"""Place of a name, and which of its ends stands there."""
PADDING = 1.5
"""Pixels around the words of a name that no other name may reach."""
ROUNDS = 5
"""Times that names are laid out to part them."""


def part_names(figure: Figure, names: Sequence[Annotation], step: float, marker: float) -> None:
    """Part names that overlap: move each to the nearest place that no earlier name takes, up or down by steps, on
    either side of its point, and if there is such a place, inside the axes and on no point. A name that moves may give
    the axes another size, so it is looked at again as it is laid out.

    Args:
        figure: made with `DPI`; its first axes have the points.
        names: beside their points, left or right of them.
        step: in the units of the vertical axis.
        marker: size of the points' markers, in square points.
    """
    for _ in range(ROUNDS):
        figure.draw_without_rendering()
        boxes = [_box_of_words(name) for name in names]
        if not any(_is_hidden(box, boxes[:number]) for number, box in enumerate(boxes)):
            return
        frame, markers = figure.axes[0].get_window_extent(), [_box_of_point(name, marker) for name in names]
        for number, name in enumerate(names):
            earlier, free = [_box_of_words(neighbour) for neighbour in names[:number]], list[Place]()
            places = [*_places(name, step, 3 * len(names))]
            for place in places:
                _move(name, place)
                box = _box_of_words(name)
                if not _is_hidden(box, earlier):
                    free.append(place)
                    if frame.contains(*box.min) and frame.contains(*box.max) and not _is_hidden(box, markers):
                        break
            else:
                _move(name, [*free, *places][0])


def _move(name: Annotation, place: Place) -> None:
    x, y, side = place
    name.xyann = x, y
    name.set_horizontalalignment(side)


def _places(name: Annotation, step: float, count: int) -> Iterator[Place]:
    """Yield places for the words of an annotation, and the side to which they reach, from its own place outward."""
    (x, y), (point, _) = name.xyann, name.xy
    side, opposite = ("left", "right") if name.get_horizontalalignment() == "left" else ("right", "left")
    for distance in range(count):
        for height in {y + distance * step: None, y - distance * step: None}:
            yield x, height, side
            yield 2 * point - x, height, opposite


def _box_of_words(name: Annotation) -> Bbox:
    """Return the box of an annotation's words, in pixels, with a little around them."""
    return Text.get_window_extent(name).padded(PADDING)


def _box_of_point(name: Annotation, marker: float) -> Bbox:
    """Return the box of the marker of an annotation's point, in pixels."""
    assert name.axes is not None
    centre = name.axes.transData.transform(name.xy)
    return Bbox([centre, centre]).padded(marker**0.5 / 2 * DPI / 72)


def _is_hidden(box: Bbox, obstacles: Sequence[Bbox]) -> bool:
    """Return whether a box overlaps one of others."""
    return any(box.overlaps(obstacle) for obstacle in obstacles)
