"""vLLM's server with OpenAI's API, in the environment that its users have without a CUDA compiler.

python -m peers.vllm_server --model FOLDER --port PORT ...     (flags of `vllm serve`)
"""

import os
import runpy

from peers.vllm_serving import ENVIRONMENT

if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
