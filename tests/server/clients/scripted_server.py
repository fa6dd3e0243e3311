"""`octavo serve` whose model says what a script dictates, for clients whose requests cannot be changed.

    python tests/server/clients/scripted_server.py --script FILE [--form harmony] --port PORT [flags of serve]

A script is JSON: by a marker that stands in the prompt, the turns of one conversation, each of them
{"thought": ..., "text": ..., "calls": [{"name": ..., "arguments": {...}}, ...]}. Which turn comes next
follows from the assistant's turns after the marker. Only the choice of tokens is dictated, by a
grammar that allows one token at a time: prompts, prefix cache, parsers and streams are the engine's and the
server's own.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests/support"))

from scripted_model import FORMS, Form, write_scripted_model  # noqa: E402

import octavo.engine.engine as engine_module  # noqa: E402
from octavo.cli import main  # noqa: E402
from octavo.engine.engine import Engine  # noqa: E402
from octavo.outputs import RequestOutput  # noqa: E402
from octavo.sampling_params import SamplingParams, StructuredOutput  # noqa: E402

UNKNOWN = {"text": "No script has this."}


def dictated(scripts: Mapping[str, list[dict[str, Any]]], form: Form, prompt: str) -> str:
    """Return what the model says after a prompt."""
    found = [(marker, turns) for marker, turns in scripts.items() if marker in prompt]
    if not found:
        return form.write(UNKNOWN)
    ((marker, turns),) = found
    if form.has_one_call:
        # Without calls a turn stays one.
        turns = [{**turn, "calls": [call]} for turn in turns[:-1] for call in turn["calls"]] + turns[-1:]
    number = form.number(prompt[prompt.rindex(marker) :])
    return form.write(turns[min(number, len(turns) - 1)])


def scripted_engine(scripts: Mapping[str, list[dict[str, Any]]], form: Form) -> type[Engine]:
    """Return the engine's class with its answers dictated."""

    class ScriptedEngine(Engine):
        def add_request(self, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
            assert self.tokenizer is not None
            token_ids = self.prompts.read(prompt)
            text = dictated(scripts, form, self.tokenizer.decode(token_ids.listed, skip_special_tokens=False))
            answer = self.tokenizer.encode(text, add_special_tokens=False)
            grammar = "start: " + " ".join(f"<[{token_id}]>" for token_id in answer)
            params = replace(params, structured=StructuredOutput(grammar=grammar))
            return super().add_request(token_ids, params, **{**options, "grammar": None})

    return ScriptedEngine


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--form", choices=FORMS, default="qwen")
    own, rest = parser.parse_known_args()
    form = FORMS[own.form]
    engine_module.Engine = scripted_engine(json.loads(own.script.read_text()), form)  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        model = write_scripted_model(Path(folder), form)
        main(["serve", str(model), "--load-format", "dummy", "--served-model-name", "octavo", *rest])
