"""Fixed texts for accuracy benchmarks, so that results of different runs are comparable."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "texts"

# About the tides, 219 tokens of SmolLM2: teacher forcing reads it from its first token to its last.
TIDE = (_FOLDER / "tide.txt").read_text()
# Documents that conversations ask about.
DOCUMENTS = (
    TIDE,
    *((_FOLDER / f"{name}.txt").read_text() for name in ("work_list", "linear_layers", "spinning")),
)
