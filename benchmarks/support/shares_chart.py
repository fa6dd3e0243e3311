"""A chart of shares of a bound as SVG: readable small, and on light and dark pages alike."""

from collections.abc import Sequence
from html import escape

STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.peer { fill: #8c959f } .octavo { fill: #0969da } .bound { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
 text { fill: #e6edf3 } .peer { fill: #6e7681 } .octavo { fill: #4493f8 } .bound { stroke: #8d96a0 }
}"""
ROW, BAR, LEFT, WIDTH = 46, 12, 12, 640


def draw(rows: Sequence[tuple[str, str, float, float]]) -> str:
    """Draw two bars a row, as shares of the bound.

    Args:
        rows: what was measured, the peer's name, Octavo's share and the peer's, of 1.
    """
    height = 34 + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 70} {height}" role="img">',
        "<title>Tokens per second as a share of what the hardware allows: Octavo and its peers</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<line class="bound" x1="{LEFT + WIDTH}" x2="{LEFT + WIDTH}" y1="22" y2="{height}"/>',
        f'<text x="{LEFT + WIDTH}" y="14" text-anchor="middle">bound</text>',
    ]
    for index, (what, peer, octavo, other) in enumerate(rows):
        top = 26 + index * ROW
        parts.append(f'<text x="{LEFT}" y="{top + 10}">{escape(what)}</text>')
        parts.append(bar("octavo", top + 15, octavo, f"Octavo: {octavo:.0%}"))
        parts.append(bar("peer", top + 15 + BAR + 1, other, f"{peer}: {other:.0%}"))
    return "\n".join([*parts, "</svg>\n"])


def bar(kind: str, top: int, share: float, label: str) -> str:
    width = WIDTH * share
    return (
        f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        f'<text x="{LEFT + width + 6:.1f}" y="{top + 10}">{escape(label)}</text>'
    )
