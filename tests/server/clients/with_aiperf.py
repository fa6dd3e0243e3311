"""aiperf: streamed chats with synthetic prompts, and the server's metrics beside them."""

import json
import subprocess
import sys
from pathlib import Path

url, folder = sys.argv[1:]
command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", "octavo", "--url", url]
command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", folder, "--ui", "none"]
command += ["--request-count", "8", "--concurrency", "2", "--workers-max", "2"]
command += ["--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8"]
command += ["--artifact-dir", f"{folder}/artifacts"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
(path,) = Path(folder, "artifacts").rglob("profile_export_aiperf.json")
found = json.loads(path.read_text())
assert found["request_count"]["avg"] == 8, found["request_count"]
print("8 streamed chats, two at a time; ITL", round(found["inter_token_latency"]["avg"], 1), "ms")
