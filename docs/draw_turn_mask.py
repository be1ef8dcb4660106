"""Draw docs/turn_mask.png: two turns as tokens of SmolLM2 (a role as one), with their response mask.

.venv/bin/python docs/draw_turn_mask.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

ROWS = (
    (
        "prompt",
        "",
        "<|im_start|>|user|\\n|What| is| |4|7|8| times| |7|1|8|?|<|im_end|>|\\n|<|im_start|>|assistant|\\n",
    ),
    (
        "turn 1",
        "1",
        '<|tool|_|call|>|{"|name|":| "|calculate|",| "|arguments|":| {"|expression|":| "|4|7|8| *| |7|1|8|"|'
        "}}|</|tool|_|call|>|<|im_end|>",
    ),
    ("answer", "0", "\\n|<|im_start|>|tool|\\n|3|4|3|2|0|4|<|im_end|>|\\n|<|im_start|>|assistant|\\n"),
    ("turn 2", "1", "The| answer| is| |3|4|3|2|0|4|.|<|im_end|>"),
)
FILLS = {"": "white", "1": "#bcdcf5", "0": "#e4e4e4"}
NOTES = {
    "": "the prompt",
    "1": "sampled: response_mask 1, trained",
    "0": "inserted: response_mask 0, read only",
}
WIDTH, LETTER, GAP, LINE = 100.0, 1.0, 0.5, 4.2
OUT = Path(__file__).with_name("turn_mask.png")


def tokens(text: str) -> list[str]:
    """Return the tokens, which bars separate but for those of control tokens."""
    kept = text.replace("<|im_start|>", "<\0im_start\0>").replace("<|im_end|>", "<\0im_end\0>")
    return [token.replace("\0", "|").replace(" ", "␣") for token in kept.split("|")]


def main() -> None:
    figure = Figure(figsize=(8.6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    y = 0.0
    for name, mask, text in ROWS:
        ax.text(0, y, name, fontsize=9, va="center", weight="bold")
        x = 8.0
        for token in tokens(text):
            width = len(token) * LETTER + 0.7
            if x + width > WIDTH:
                x, y = 8.0, y - LINE
            ax.add_patch(_rectangle(x, y - 1.0, width, 2.0, FILLS[mask]))
            ax.text(x + width / 2, y, token, fontsize=6.6, family="monospace", ha="center", va="center")
            ax.text(x + width / 2, y - 1.75, mask, fontsize=5.5, ha="center", va="center", color="#555555")
            x += width + GAP
        y -= LINE + 0.4
    x = 8.0
    for mask, note in NOTES.items():
        ax.add_patch(_rectangle(x, y - 0.7, 2.0, 1.6, FILLS[mask]))
        ax.text(x + 2.6, y + 0.1, note, fontsize=8, va="center")
        x += 34.0 if mask else 16.0
    ax.set_xlim(0, WIDTH + 1)
    ax.set_ylim(y - 1.5, 2)
    ax.axis("off")
    figure.savefig(OUT, dpi=120)
    print(OUT, OUT.stat().st_size)


def _rectangle(x: float, y: float, width: float, height: float, fill: str) -> Rectangle:
    return Rectangle((x, y), width, height, facecolor=fill, edgecolor="#888888", linewidth=0.5)


if __name__ == "__main__":
    main()
