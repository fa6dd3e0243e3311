"""`octavo serve` whose model says what a script dictates, for clients whose requests cannot be changed.

    python tests/server/clients/scripted_server.py --script FILE --port PORT [further flags of octavo serve]

A script is JSON: by a marker that stands in the prompt, the turns of one conversation, each of them
{"thought": ..., "text": ..., "calls": [{"name": ..., "arguments": {...}}, ...]}. Which turn comes next
follows from the number of assistant's turns after the marker. Only the choice of tokens is dictated, by a
grammar that allows one token at a time: prompts, prefix cache, parsers and streams are the engine's and the
server's own.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / folder) for folder in ("tests/support", "tests/server/http")]

from scripted_model import ASSISTANT, TURN_END, write_scripted_model  # noqa: E402

import octavo.engine.engine as engine_module  # noqa: E402
from octavo.cli import main  # noqa: E402
from octavo.engine.engine import Engine  # noqa: E402
from octavo.outputs import RequestOutput  # noqa: E402
from octavo.sampling_params import SamplingParams, StructuredOutput  # noqa: E402

UNKNOWN = "No script has this."


def dictated(scripts: Mapping[str, list[dict[str, Any]]], prompt: str) -> str:
    """Return what the model says after a prompt."""
    found = [(marker, turns) for marker, turns in scripts.items() if marker in prompt]
    if not found:
        return UNKNOWN
    ((marker, turns),) = found
    number = prompt[prompt.rindex(marker) :].count(ASSISTANT) - 1
    return written(turns[min(number, len(turns) - 1)])


def written(turn: Mapping[str, Any]) -> str:
    """Write a turn as Qwen3 does, whose template writes history in the same way."""
    thought = f"<think>\n{turn['thought']}\n</think>\n\n" if "thought" in turn else ""
    calls = [json.dumps(call, ensure_ascii=False) for call in turn.get("calls", ())]
    parts = [turn.get("text", ""), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return thought + "\n".join(part for part in parts if part)


def scripted_engine(scripts: Mapping[str, list[dict[str, Any]]]) -> type[Engine]:
    """Return the engine's class with its answers dictated."""

    class ScriptedEngine(Engine):
        def add_request(self, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
            assert self.tokenizer is not None
            token_ids = self.prompts.read(prompt)
            text = dictated(scripts, self.tokenizer.decode(token_ids.listed, skip_special_tokens=False))
            answer = [*self.tokenizer.encode(text, add_special_tokens=False), TURN_END]
            grammar = "start: " + " ".join(f"<[{token_id}]>" for token_id in answer)
            params = replace(params, structured=StructuredOutput(grammar=grammar))
            return super().add_request(token_ids, params, **{**options, "grammar": None})

    return ScriptedEngine


if __name__ == "__main__":
    arguments = sys.argv[1:]
    at = arguments.index("--script")
    scripts = json.loads(Path(arguments[at + 1]).read_text())
    del arguments[at : at + 2]
    engine_module.Engine = scripted_engine(scripts)  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        model = write_scripted_model(Path(folder))
        main(["serve", str(model), "--load-format", "dummy", "--served-model-name", "octavo", *arguments])
