"""Write a self-contained HTML page: without scripts, and with a policy by which a browser loads nothing for it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from pitools.core.output import format_cell

# Should a text ever escape the escaping, the browser still runs nothing and asks nobody.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#888}
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1200px;padding:0 1em}
h1{font-size:1.5em;margin:0}h2{font-size:1.15em;margin:2em 0 .5em;border-bottom:1px solid var(--line)}
table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}
th{font-weight:600;color:var(--soft)}tr+tr td{border-top:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
svg{max-width:100%;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:currentColor}
.key{display:inline-block;margin-right:1.2em}
.key span{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
p{margin:.4em 0}p.note{color:var(--soft)}
"""


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a page. title: text. body: HTML, of which each text has been escaped. style: more rules of CSS."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{text(title)}</title>'
        f"<style>{_STYLE}{style}</style></head><body>\n{''.join(body)}\n</body></html>\n"
    )


def text(value: Any) -> str:
    """Return a value as text of a page: printable, and without markup."""
    return html.escape(format_cell(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; columns of numbers are aligned to the right. Values are escaped."""
    cells = [[text(value) for value in row] for row in rows]
    numeric = [bool(cells) and all(_is_number(row[at]) for row in cells) for at in range(len(heads))]
    marks = [' class="n"' if is_number else "" for is_number in numeric]
    head = "".join(f"<th{mark}>{text(name) if name else ''}</th>" for name, mark in zip(heads, marks, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{mark}>{value}</td>' for value, mark in zip(row, marks, strict=True))}</tr>\n"
        for row in cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>\n"


def _is_number(value: str) -> bool:
    """Return whether a cell is a number, with or without a unit: `12`, `3.4 %`, `-`, `1.2 GiB`, `4m10s`."""
    return value == "-" or (value[:1].isdecimal() and len(value) < 12 and "-" not in value)
