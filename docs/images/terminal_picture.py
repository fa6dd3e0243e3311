"""Draw what a terminal showed: text of a real run on standard input, a picture on standard output.

    octavo launch codex -- exec "Repair what is wrong here, and run python3 check.py." 2>&1 \
        | python docs/images/terminal_picture.py 'octavo launch codex -- exec "..."' > docs/images/agent.svg

The server was `tests/server/clients/scripted_server.py`, whose model says what a script dictates.
"""

import sys
from html import escape

WIDTH, LINE, TOP, LEFT = 860, 17, 30, 16
# How lines of Codex begin, and the class of what is drawn in another color.
CLASSES = (
    ("$ ", "typed"),
    ("+", "added"),
    ("-", "removed"),
    ("codex", "who"),
    ("exec", "who"),
    ("apply patch", "who"),
)
# Codex's banner before its first words, and the heads of its diffs.
LEFT_OUT = ("diff --git", "index ", "--- ", "+++ ", "@@")
STYLE = """\
rect { fill: #f6f8fa; stroke: #d0d7de }
text { font: 13px ui-monospace, monospace; fill: #24292f; white-space: pre }
.typed { font-weight: bold } .added { fill: #1a7f37 } .removed { fill: #cf222e } .who { fill: #0969da }
@media (prefers-color-scheme: dark) {
 rect { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 }
 .added { fill: #3fb950 } .removed { fill: #f85149 } .who { fill: #4493f8 }
}"""


def main() -> None:
    _, _, said = sys.stdin.read().partition("\ncodex\n")
    shown = f"codex\n{said.partition(chr(10) + 'tokens used')[0]}".splitlines()
    lines = [f"$ {sys.argv[1]}", "", *(line for line in shown if not line.startswith(LEFT_OUT))]
    height = TOP + LINE * len(lines)
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">')
    print("<title>Codex reads a file, repairs it and runs a check, against octavo serve</title>")
    print(f'<style>\n{STYLE}\n</style>\n<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8"/>')
    for number, line in enumerate(lines):
        kind = next((name for start, name in CLASSES if line.startswith(start)), "")
        print(f'<text x="{LEFT}" y="{TOP + LINE * number}" class="{kind}">{escape(line)}</text>')
    print("</svg>")


if __name__ == "__main__":
    main()
