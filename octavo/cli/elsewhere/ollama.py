"""Ollama's variables, the parameters and instructions of its Modelfile, and commands of others."""

from octavo.cli.elsewhere.rows import LORA, SAMPLER, TEMPLATE, Row

VARIABLES = (
    Row("OLLAMA_HOST", "--host --port", "8000 instead of 11434"),
    Row("OLLAMA_CONTEXT_LENGTH", "--max-model-len", "the model's whole context by default"),
    Row("OLLAMA_NUM_PARALLEL", "--max-num-seqs", "hundreds by default; they share the cache"),
    Row("OLLAMA_MAX_QUEUE", "--max-num-queued-reqs"),
    Row("OLLAMA_KV_CACHE_TYPE", "--kv-cache-dtype"),
    Row("OLLAMA_FLASH_ATTENTION", "--attention-impl", "the fastest is taken by itself"),
    Row("OLLAMA_GPU_OVERHEAD", "--memory-fraction"),
    Row("OLLAMA_LOAD_TIMEOUT OLLAMA_KEEP_ALIVE", "", "the model stays loaded until the server ends"),
    Row("OLLAMA_MAX_LOADED_MODELS", "", "a server has one model; start one for each"),
    Row("OLLAMA_SCHED_SPREAD", "--tensor-parallel-size"),
    Row(
        "OLLAMA_ORIGINS",
        "--allowed-hosts",
        "of the Host header; pages of other origins cannot call the server",
    ),
    Row(
        "OLLAMA_MODELS OLLAMA_NOPRUNE",
        "",
        "models lie where you put them, or in huggingface-hub's cache (HF_HOME)",
    ),
    Row("OLLAMA_DEBUG OLLAMA_DEBUG_LOG_REQUESTS", "--access-log", "never a prompt"),
    Row("OLLAMA_NOHISTORY", "--no-history", "of octavo chat"),
    Row("OLLAMA_LLM_LIBRARY", "--device"),
)

MODELFILE = (
    Row("FROM", "--model"),
    Row("SYSTEM", "--system", "of octavo chat; of a server, the first message"),
    Row("TEMPLATE", "", TEMPLATE),
    Row("ADAPTER", "", LORA),
    Row("MESSAGE", "", "messages of each request; in octavo chat, /load FILE"),
    Row("LICENSE REQUIRES", "", "there is no Modelfile"),
    Row("num_ctx", "--max-model-len"),
    Row("num_predict", "--max-tokens"),
    Row("temperature", "--temperature"),
    Row("top_k", "--top-k"),
    Row("top_p", "--top-p"),
    Row("min_p", "--min-p"),
    Row("seed", "--seed"),
    Row("stop", "--stop"),
    Row("repeat_penalty", "--repetition-penalty"),
    Row("repeat_last_n", "", SAMPLER),
    Row("num_gpu num_thread", "--device", "all layers are on the device; OMP_NUM_THREADS sets threads"),
    Row("draft_num_predict", "", "speculative decoding is not supported"),
)

# Commands of ollama, vllm and llama.cpp, by what to type instead.
COMMANDS = (
    Row(
        "pull",
        "octavo inspect HUB_ID",
        "a hub id is downloaded when it is first used (octavo[hf]); Ollama's library is not",
    ),
    Row("run", "octavo chat --model MODEL", "or octavo generate for one prompt"),
    Row("list ls", "", "there is no list of models: a model is a folder, a .gguf file or a hub id"),
    Row("ps", "", "a server has one model; GET /v1/models names it, and / shows what it does"),
    Row("show", "octavo inspect MODEL"),
    Row("rm cp", "", "delete or copy the model's folder or file; hub ids lie in huggingface-hub's cache"),
    Row("stop", "", "end the server with Ctrl-C or SIGTERM; it finishes its requests first"),
    Row("create", "", "there is no Modelfile: options are flags, OCTAVO_... variables or octavo.toml"),
    Row("push signin signout login logout", "", "Octavo has no registry of models"),
    Row("start server api openai", "octavo serve MODEL"),
    Row("complete completion cli", "octavo generate PROMPT"),
    Row("benchmark llama-bench", "octavo bench"),
    Row("download", "octavo inspect HUB_ID", "a hub id is downloaded when it is first used (octavo[hf])"),
    Row("convert quantize", "", "--quantization rounds a model while it is loaded"),
    Row("launch", "octavo serve MODEL", "with --replicas for several engines"),
)
