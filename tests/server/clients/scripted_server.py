"""`octavo serve` whose model says what a script dictates, for clients whose requests cannot be changed.

    python tests/server/clients/scripted_server.py --script FILE --port PORT [flags of serve]

A script is JSON: by a marker that stands in the prompt, the turns of one conversation, each of them
{"thought": ..., "text": ..., "calls": [{"name": ..., "arguments": {...}}, ...]}. Which turn comes next
follows from the assistant's turns after the marker. Only the choice of tokens is dictated, by a
grammar that allows one token at a time: prompts, prefix cache, parsers and streams are the engine's and the
server's own. With --turns a file gets a line of JSON for each answered turn of a script: how many tokens its
prompt and its answer have, and how many came from the prefix cache.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests/support"))

from scripted_model import FORMS, Form, write_scripted_model  # noqa: E402

import octavo.engine.engine as engine_module  # noqa: E402
from octavo.cli import main  # noqa: E402
from octavo.engine.engine import Engine  # noqa: E402
from octavo.outputs import RequestOutput  # noqa: E402
from octavo.sampling_params import SamplingParams, StructuredOutput  # noqa: E402

UNKNOWN = {"text": "No script has this."}


def dictated(scripts: Mapping[str, list[dict[str, Any]]], form: Form, prompt: str) -> tuple[str, int]:
    """Return what the model says after a prompt, and the number of this turn; -1: no script has it."""
    found = [(marker, turns) for marker, turns in scripts.items() if marker in prompt]
    if not found:
        return form.write(UNKNOWN), -1
    ((marker, turns),) = found
    if form.has_one_call:
        # Without calls a turn stays one.
        single = [[{**turn, "calls": [call]} for call in turn.get("calls", ())] or [turn] for turn in turns]
        turns = [turn for several in single for turn in several]
    number = form.number(prompt[prompt.rindex(marker) :])
    return form.write(turns[min(number, len(turns) - 1)]), number


def scripted_engine(
    scripts: Mapping[str, list[dict[str, Any]]], form: Form, note: Callable[[dict[str, int]], object]
) -> type[Engine]:
    """Return the engine's class with its answers dictated; `note` gets what a turn of a script took."""

    class ScriptedEngine(Engine):
        turns: ClassVar[list[tuple[int, RequestOutput]]] = []

        def add_request(self, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
            assert self.tokenizer is not None
            token_ids = self.prompts.read(prompt)
            text, number = dictated(
                scripts, form, self.tokenizer.decode(token_ids.listed, skip_special_tokens=False)
            )
            answer = self.tokenizer.encode(text, add_special_tokens=False)
            grammar = "start: " + " ".join(f"<[{token_id}]>" for token_id in answer)
            params = replace(params, structured=StructuredOutput(grammar=grammar))
            output = super().add_request(token_ids, params, **{**options, "grammar": None})
            self.turns.append((number, output))
            return output

        def step(self) -> None:
            super().step()
            for number, output in [turn for turn in self.turns if turn[1].finished]:
                self.turns.remove((number, output))
                num_prompt, num_answer = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
                counts = {"prompt": num_prompt, "answer": num_answer, "cached": output.num_cached_tokens}
                note({"turn": number, **counts})

    return ScriptedEngine


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--turns", type=Path, default=Path(os.devnull))
    parser.add_argument("--form", choices=FORMS, default="qwen")
    own, rest = parser.parse_known_args()
    form = FORMS[own.form]
    scripts = json.loads(own.script.read_text())
    with tempfile.TemporaryDirectory() as folder, own.turns.open("w", buffering=1) as turns:
        note = lambda counts: turns.write(json.dumps(counts) + "\n")  # noqa: E731
        engine_module.Engine = scripted_engine(scripts, form, note)  # type: ignore[misc]
        model = write_scripted_model(Path(folder), form)
        main(["serve", str(model), "--load-format", "dummy", "--served-model-name", "octavo", *rest])
