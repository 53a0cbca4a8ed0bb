"""A table of a terminal, of which only the visible lines are drawn: as text, in which no markup or control counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from pitools.core.output import format_cell

T = TypeVar("T")
_MAX_CHARS = 400  # of a cell: signs without width would make a line of any length
_GAP = "  "


class Column(NamedTuple):
    """A column. width: of its cells, or the least if it grows. rank: those of the highest are left out first.

    is_id: of a text that is too long, its begin and end are shown.
    """

    title: str
    width: int
    rank: int = 0
    is_number: bool = False
    is_id: bool = False
    grows: bool = False


class Row(NamedTuple):
    """The cells of a line, as many as there are columns, and its colour; "dim" for what may be out of date."""

    cells: tuple[Any, ...]
    style: str = ""


def fit_columns(columns: Sequence[Column], width: int) -> list[tuple[int, int]]:
    """Return the index and the width of the columns that are shown in `width` characters."""
    shown = list(range(len(columns)))
    while (rest := width - sum(columns[index].width + len(_GAP) for index in shown) + len(_GAP)) < 0 and shown[1:]:
        shown.remove(max(shown, key=lambda index: (columns[index].rank, index)))
    growing = sum(columns[index].grows for index in shown)
    more = max(0, rest) // growing if growing else 0
    return [(index, columns[index].width + more * columns[index].grows) for index in shown]


def fit_text(value: Any, column: Column, width: int) -> str:
    """Return a value in exactly `width` cells of a terminal, printable: cut where it is longer."""
    text = format_cell(value)[:_MAX_CHARS]
    if (length := cell_len(text)) > width:
        tail = width // 2 if column.is_id and length == len(text) else 0
        text = set_cell_size(text, width - tail - 1) + "…" + text[len(text) - tail :]
    return " " * (width - cell_len(text)) + text if column.is_number else set_cell_size(text, width)


class LineView(Widget):
    """A line of text, drawn when it changes; a Static would lay out the whole screen anew."""

    _text = ""

    def show(self, text: str) -> None:
        """Show a text."""
        if text != self._text:
            self._text = text
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return the line."""
        return Strip([Segment(set_cell_size(self._text, self.size.width), Style(bold=True))], self.size.width)


class TableView(Widget, Generic[T], can_focus=True):
    """A table with a cursor, which stays on its item while items come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown,space", "move_page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """Enter was pressed on an item."""

    def __init__(
        self, columns: Sequence[Column], key: Callable[[T], str], row: Callable[[T], Row], empty: str, **options: Any
    ) -> None:
        super().__init__(**options)
        self._columns, self._key, self._row, self._empty = columns, key, row, empty
        self._items: Sequence[T] = ()
        self._cursor = self._top = 0
        self._drawn: dict[int, tuple[tuple[Any, ...], str]] = {}

    def show(self, items: Sequence[T]) -> None:
        """Show these items. The cursor stays on its item, or, if that is gone, where it is."""
        if self._items and (items is not self._items):
            key = self._key(self._items[self._cursor])
            same = next((index for index, item in enumerate(items) if self._key(item) == key), self._cursor)
            self._cursor = max(0, min(same, len(items) - 1))
        is_changed, self._items = len(items) != len(self._items), items
        self._scroll()
        if is_changed and self.styles.height and self.styles.height.is_auto:
            self.refresh(layout=True)

    @property
    def selected(self) -> T | None:
        """The item at the cursor; None in an empty table."""
        return self._items[self._cursor] if self._items else None

    @property
    def _page(self) -> int:
        return max(1, self.size.height - 1)

    def _scroll(self) -> None:
        """Keep the cursor's line in sight, and draw."""
        self._top = max(min(self._top, self._cursor, len(self._items) - self._page), self._cursor - self._page + 1, 0)
        for y in range(self.size.height):
            if self._drawn.get(y) != self._line(y):
                self.refresh(Region(0, y, self.size.width, 1))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the height of all lines, for `height: auto`."""
        return len(self._items or "-") + 1

    def on_resize(self) -> None:
        """Keep the cursor in sight."""
        self._scroll()

    def action_move(self, lines: int) -> None:
        """Move the cursor."""
        self._cursor = max(0, min(self._cursor + lines, len(self._items) - 1))
        self._scroll()

    def action_move_page(self, pages: int) -> None:
        """Move the cursor by what is visible."""
        self.action_move(pages * self._page)

    def action_choose(self) -> None:
        """Tell the screen."""
        self.post_message(self.Chosen())

    def on_click(self, event: Click) -> None:
        """Move the cursor to the line."""
        if event.y > 0:
            self.action_move(self._top + event.y - 1 - self._cursor)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move the cursor down."""
        self.action_move(3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move the cursor up."""
        self.action_move(-3)

    def _line(self, y: int) -> tuple[tuple[Any, ...], str]:
        """Return the cells of a line, and its style: the titles, an item, or nothing."""
        index = self._top + y - 1
        if y == 0:
            return tuple(column.title for column in self._columns), "bold underline" if self.has_focus else "bold"
        if index >= len(self._items):
            return ((self._empty,), "dim") if y == 1 else ((), "")
        cells, style = self._row(self._items[index])
        return cells, f"{style} reverse" if index == self._cursor and self.has_focus else style

    def render_line(self, y: int) -> Strip:
        """Return a line as it is drawn."""
        width = self.size.width
        cells, style = self._drawn[y] = self._line(y)
        if len(cells) == len(self._columns):
            shown = fit_columns(self._columns, width)
            text = _GAP.join(fit_text(cells[at], self._columns[at], size) for at, size in shown)
        else:
            text = "".join(cells)
        return Strip([Segment(set_cell_size(text, width), Style.parse(style))], width)
