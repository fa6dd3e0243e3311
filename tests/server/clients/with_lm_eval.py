"""lm-eval, local-completions: log-likelihoods of prompts by token ids, and texts up to a stop string."""

import json
import subprocess
import sys
from pathlib import Path

url, folder = sys.argv[1:]
here = Path(__file__).parent / "lm_eval_task"
for name in ("octavo_choices.yaml", "octavo_words.yaml"):
    text = (here / name).read_text().replace("questions.jsonl", str(here / "questions.jsonl"))
    Path(folder, name).write_text(text)
arguments = {
    "model": "octavo",
    "base_url": f"{url}/v1/completions",
    "tokenizer": folder,
    "tokenizer_backend": "huggingface",
    "num_concurrent": 4,
    "max_length": 512,
}
command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", folder]
command += ["--tasks", "octavo_choices", "octavo_words", "--output_path", f"{folder}/results"]
command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr[-3000:]
(path,) = Path(folder, "results").rglob("results*.json")
results = json.loads(path.read_text())["results"]
assert 0 <= results["octavo_choices"]["acc,none"] <= 1
assert "exact_match,none" in results["octavo_words"]
print("multiple choice by echo and logprobs, generate_until; accuracy", results["octavo_choices"]["acc,none"])
