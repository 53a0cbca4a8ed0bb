"""The screen of `pit monitor watch`. What it shows is read by threads (`feed`): the screen itself waits for nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.cells import chop_cells
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Input, Static

from pitools.core.errors import PitError, UsageError
from pitools.core.output import format_cell
from pitools.launch.diagnosis import explain
from pitools.launch.monitor import rank_log
from pitools.launch.recovery import cancel_run
from pitools.monitor.live import rows
from pitools.monitor.live.alerts import Alert, alerts, firing_alerts
from pitools.monitor.live.feed import Feed
from pitools.monitor.live.site_feeds import SiteFeeds
from pitools.monitor.live.table import Column, LineView, Row, TableView
from pitools.place.clusters.parallel import site_error
from pitools.run import run_folder
from pitools.run.attempt_records import first_failure
from pitools.site.schema import Site

EVERY_S = 1.0
_TAIL_BYTES = 64 << 10
_NOTE_S = 10.0
_FIRING_EVERY_S = 15.0


class TextScreen(Screen[None]):
    """Lines of text that are read again each second; the newest are in sight until the cursor leaves the end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Back"),
        Binding("up,down", "none", "Scroll", show=True),
    ]

    def __init__(self, title: str, read: Callable[[], list[str]], *, at_end: bool) -> None:
        super().__init__()
        self._at_end, self._count = at_end, 0
        self._feed = Feed(title, read, EVERY_S)
        self._table = TableView[tuple[int, str]](
            [Column(title, 20, grows=True)], lambda line: str(line[0]), lambda line: Row((line[1],)), "reading …"
        )

    def compose(self) -> ComposeResult:
        """The lines, and the keys."""
        yield self._table
        yield Footer()

    def on_mount(self) -> None:
        """Start reading."""
        self._feed.start()
        self._table.focus()
        self.set_interval(EVERY_S / 4, self._show)

    def on_unmount(self) -> None:
        """Read no more."""
        self._feed.stop()

    def _show(self) -> None:
        answer = self._feed.answer
        lines = [str(answer.error)] if answer.error else answer.value
        if lines is None or not self.size.width:
            return
        wrapped = [part for line in lines for part in chop_cells(format_cell(line), self.size.width) or [""]]
        before = self._table.selected
        is_at_end = self._at_end and (before is None or before[0] == self._count - 1)
        self._count = len(wrapped)
        self._table.show(list(enumerate(wrapped)))
        if is_at_end:
            self._table.action_move(len(wrapped))


class ConfirmScreen(ModalScreen[bool]):
    """A question. y is yes; every other key that it names is no, as is Enter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q,enter", "dismiss(False)", "No"),
    ]
    CSS = "ConfirmScreen {align: center middle} #question {width: 70%; height: auto; border: round red; padding: 1 2}"

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question, and the keys."""
        yield Static(f"{self._question}\n\ny: yes    n: no", id="question", markup=False)


class WatchApp(App[None]):
    """All sites, their queues and runs, and what needs a person."""

    CSS = """
    #summary {height: 1}
    #queues {height: auto; max-height: 30%}
    #runs {height: 1fr; min-height: 5; margin-top: 1}
    #alerts {height: auto; max-height: 30%; margin-top: 1}
    #filter {display: none; height: 1; border: none; padding: 0}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/", priority=True),  # keys that follow at once are the filter
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("l", "logs", "Logs"),
        Binding("w", "why", "Why"),
        Binding("c", "cancel", "Cancel"),
        Binding("tab", "app.focus_next", "Next"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("escape", "leave_filter", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, sites: Sequence[SiteFeeds], prometheus: str = "") -> None:
        """sites: their feeds, not started. prometheus: the address of one whose alerts are shown; "" for none."""
        super().__init__(ansi_color=True)
        self._sites = sites
        call = partial(firing_alerts, prometheus)
        self._firing = Feed("prometheus", call, _FIRING_EVERY_S) if prometheus else None
        self._feeds = [feed for site in sites for feed in site.feeds] + ([self._firing] if self._firing else [])
        self._filter, self._order, self._is_reversed = "", 0, False
        self._note, self._noted_s = "", 0.0
        self._summary = LineView(id="summary")
        self._queues = TableView[rows.QueueItem](
            rows.QUEUE_COLUMNS,
            lambda item: f"{item.site.name} {item.queue.partition if item.queue else ''}",
            rows.queue_row,
            "no site: see pit site list",
            id="queues",
        )
        self._runs = TableView[rows.RunItem](
            rows.RUN_COLUMNS, lambda item: item.record.run_id, rows.run_row, "no run", id="runs"
        )
        self._alerts = TableView[Alert](
            rows.ALERT_COLUMNS,
            lambda alert: f"{alert.site} {alert.subject} {alert.text}",
            rows.alert_row,
            "no alert",
            id="alerts",
        )

    def compose(self) -> ComposeResult:
        """The tables from top to bottom, and the keys."""
        with Vertical():
            yield self._summary
            yield self._queues
            yield self._runs
            yield self._alerts
            yield Input(id="filter", placeholder="text, or state=running,name~bc,age<2d; empty: all runs", compact=True)
        yield Footer()

    def on_mount(self) -> None:
        """Start asking the sites."""
        for feed in self._feeds:
            feed.start()
        self._runs.focus()
        self.set_interval(EVERY_S, self.update_tables)
        self.update_tables()

    def on_unmount(self) -> None:
        """Ask no more."""
        for feed in self._feeds:
            feed.stop()

    def update_tables(self) -> None:
        """Show what the threads have read by now."""
        items = rows.run_items(self._sites)
        try:
            shown = rows.filter_items(items, self._filter)
        except UsageError as error:
            shown = []
            self._say(error)
        self._runs.show(rows.sort_items(shown, rows.SORTS[self._order], is_reversed=self._is_reversed))
        self._queues.show(rows.queue_items(self._sites))
        listed = alerts(self._sites, self._firing)
        self._alerts.show(listed)
        self._summary.show(self._summarize(items, len(shown), len(listed)))

    def _summarize(self, items: Sequence[rows.RunItem], shown: int, n_alerts: int) -> str:
        states = [item.record.state for item in items]
        parts = [
            datetime.now(UTC).strftime("%H:%M:%SZ"),
            f"{len(self._sites)} sites",
            f"{len(items)} runs, {states.count('RUNNING')} running, {states.count('PENDING')} waiting",
            f"{n_alerts} alerts",
            f"by {rows.SORTS[self._order]}{' reversed' if self._is_reversed else ''}",
        ]
        if self._filter:
            parts.insert(1, f"{shown} with {self._filter}")
        is_new = time.monotonic() - self._noted_s < _NOTE_S
        return format_cell(self._note if self._note and is_new else "  ".join(parts))

    def _say(self, what: str | PitError) -> None:
        """Show a line in place of the summary for some seconds."""
        hint = f"; {what.hint}" if isinstance(what, PitError) and what.hint else ""
        self._note, self._noted_s = f"{what}{hint}", time.monotonic()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key counts: those of this screen do not, while another one covers it."""
        if action == "filter" and isinstance(self.focused, Input):
            return False
        return action == "quit" or len(self.screen_stack) < 2 or not hasattr(self, f"action_{action}")

    def action_sort(self) -> None:
        """Use the next order."""
        self._order, self._note = (self._order + 1) % len(rows.SORTS), ""
        self.update_tables()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._is_reversed = not self._is_reversed
        self.update_tables()

    def action_filter(self) -> None:
        """Ask for a filter."""
        field = self.query_one("#filter", Input)
        field.display, field.value = True, self._filter
        self.screen.set_focus(field)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Use the filter."""
        self._end_filter(event.value.strip())

    def action_leave_filter(self) -> None:
        """Leave the filter as it was."""
        self._end_filter(self._filter)

    def _end_filter(self, text: str) -> None:
        self._filter, self._note = text, ""
        self.query_one("#filter", Input).display = False
        self.screen.set_focus(self._runs)
        self.update_tables()

    def _selected(self) -> tuple[Path, Site] | None:
        """Return the selected run and its site."""
        item = self._runs.selected
        site = next((one.site for one in self._sites if item and one.name == item.record.site), None)
        return (Path(item.record.run_dir), site) if item and site else None

    def on_table_view_chosen(self) -> None:
        """Show the logs of the run."""
        if self._runs.has_focus:
            self.action_logs()

    def action_logs(self) -> None:
        """Show the log of the run's rank that failed first, else of rank 0."""
        if selected := self._selected():
            run_dir = selected[0]
            self.push_screen(TextScreen(f"logs of {run_dir.name}", lambda: read_tail(run_dir), at_end=True))

    def action_why(self) -> None:
        """Show why each attempt of the run ended, by its folder."""
        if selected := self._selected():
            run_dir = selected[0]
            lines = TextScreen(f"why {run_dir.name}", lambda: list(explain.explain_run(run_dir)), at_end=False)
            self.push_screen(lines)

    def action_cancel(self) -> None:
        """Cancel the run, after a confirmation."""
        if not (selected := self._selected()):
            return
        run_dir, site = selected

        def decide(is_sure: bool | None) -> None:
            if is_sure:
                self._say(f"{run_dir.name}: is being cancelled")
                threading.Thread(target=self._cancel, args=(run_dir, site), name="cancel", daemon=True).start()
                self.update_tables()

        self.push_screen(ConfirmScreen(format_cell(f"Cancel {run_dir.name} at {site.name}, and end its jobs?")), decide)

    def _cancel(self, run_dir: Path, site: Site) -> None:
        """Do what `pit launch cancel` does, in a thread: a site may take long to answer."""
        try:
            verdict = cancel_run.cancel_run(run_dir, site)
            self._say(f"{run_dir.name}: {'had ended before' if verdict else 'cancelled'}")
        except Exception as error:  # noqa: BLE001 - the screen stays
            self._say(site_error(site.name, error))


def read_tail(run_dir: Path) -> list[str]:
    """Return the last lines of the log of the rank that failed first, else of rank 0. Raises OSError, PitError."""
    attempt = run_folder.last_attempt(run_dir)
    failed = first_failure(attempt) if attempt else None
    path = rank_log.log_path(run_dir, failed.rank if failed else 0)
    if path is None:
        return ["nothing is printed yet"]
    chunks = rank_log.iter_chunks(path, max(0, path.stat().st_size - _TAIL_BYTES))
    lines = b"".join(chunks).decode("utf-8", "replace").splitlines()
    return [f"{path.relative_to(run_dir)}, the end", *lines]
