"""guidellm: a few synthetic requests, two at a time."""

import json
import subprocess
import sys
from pathlib import Path

url, folder = sys.argv[1:]
command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
command += ["--backend", f"kind=openai_http,target={url},model=octavo"]
command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"]
command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
command += ["--output", f"kind=json,path={folder}/report.json"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
(benchmark,) = json.loads(Path(folder, "report.json").read_text())["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
assert totals["successful"] >= 8, totals
assert totals["errored"] == 0, totals
print(f"{totals['successful']} streamed chats, two at a time")
