"""Options of `vllm serve`, and Octavo's answers."""

from octavo.cli.elsewhere.rows import (
    ALWAYS,
    CORS,
    DRAFTS,
    EMBEDDINGS,
    HUB,
    IMAGES,
    LOGGING,
    LORA,
    MACHINES,
    NO_CODE,
    OFFLOAD,
    OVERRIDE,
    PIPELINE,
    PRIVATE,
    REQUEST,
    ROPE,
    TEMPLATE,
    TOKEN,
    TOKENIZER,
    Row,
)

VLLM = (
    Row("--model", "--model", "or the first argument, as with vLLM"),
    Row("--served-model-name", "--served-model-name", "one name"),
    Row("--dtype", "--dtype", "float32, bfloat16 or float16"),
    Row("--max-model-len", "--max-model-len"),
    Row("--load-format", "--load-format", "safetensors, gguf or dummy; found by itself"),
    Row("--quantization -q", "--quantization", "a checkpoint's own form is found by itself: leave it out"),
    Row("--kv-cache-dtype", "--kv-cache-dtype", "auto, bf16 or fp8 (e4m3)"),
    Row("--seed", "--seed"),
    Row("--block-size", "--block-size", "any number"),
    Row("--gpu-memory-utilization", "--memory-fraction", "a share of what is free after the weights"),
    Row("--kv-cache-memory-bytes --num-gpu-blocks-override", "--num-blocks", "blocks of --block-size tokens"),
    Row("--enable-prefix-caching", "--enable-prefix-caching", "on unless --no-enable-prefix-caching"),
    Row("--max-num-seqs", "--max-num-seqs"),
    Row("--max-num-batched-tokens", "--max-num-batched-tokens", "--max-step-ms bounds a step's time, too"),
    Row("--enable-chunked-prefill --async-scheduling", "", ALWAYS),
    Row(
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold",
        "--max-step-ms",
        "prompts are cut so that others' tokens come in time",
    ),
    Row("--scheduling-policy", "", "requests go by their field priority, then in turn"),
    Row("--stream-interval", "", REQUEST + ", stream_interval"),
    Row("--tensor-parallel-size -tp", "--tensor-parallel-size -tp"),
    Row("--enable-expert-parallel -ep", "--expert-parallel"),
    Row(
        "--data-parallel-size -dp --api-server-count -asc", "--replicas", "requests go where their prefix is"
    ),
    Row("--pipeline-parallel-size -pp", "", PIPELINE),
    Row(
        "--nnodes -n --node-rank -r --master-addr --master-port --headless --distributed-executor-backend "
        "--data-parallel-address -dpa --data-parallel-rank -dpn --data-parallel-size-local -dpl "
        "--data-parallel-start-rank -dpr --data-parallel-rpc-port -dpp --data-parallel-backend -dpb "
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe",
        "",
        MACHINES,
    ),
    Row(
        "--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --enable-dbo --enable-eplb "
        "--eplb-config --all2all-backend --expert-placement-strategy --num-redundant-experts",
        "",
        "Octavo cuts a model by heads and by experts only",
    ),
    Row("--disable-custom-all-reduce", "--all-reduce", "--all-reduce nccl"),
    Row("--swap-space --cpu-offload-gb --kv-offloading-size --kv-offloading-backend", "", OFFLOAD),
    Row(
        "--kv-transfer-config --kv-events-config --ec-transfer-config",
        "",
        "prefill and decode share an engine",
    ),
    Row("--attention-backend --attention-config -ac", "--attention-impl"),
    Row("--enforce-eager", "--no-prepare", "kernels and graphs are then made when a request needs them"),
    Row(
        "--compilation-config -cc --optimization-level -O --cudagraph-capture-sizes "
        "--max-cudagraph-capture-size --max-seq-len-to-capture",
        "",
        "Octavo captures what its scheduler needs before it is ready",
    ),
    Row("--disable-sliding-window --disable-cascade-attn", "", "shared prefixes: see --share-prefixes"),
    Row(
        "--max-logprobs --logprobs-mode", "", "up to 20 log-probabilities a token, of the model's own logits"
    ),
    Row(
        "--enable-lora --lora-modules --max-loras --max-lora-rank --lora-dtype --max-cpu-loras "
        "--fully-sharded-loras --default-mm-loras --enable-tower-connector-lora --specialize-active-lora "
        "--lora-extra-vocab-size --enable-lora-bias --enable-prompt-adapter --max-prompt-adapters "
        "--max-prompt-adapter-token",
        "",
        LORA,
    ),
    Row(
        "--speculative-config -sc --speculative-model --num-speculative-tokens --ngram-prompt-lookup-max "
        "--spec-method --spec-model --spec-tokens",
        "",
        DRAFTS,
    ),
    Row("--task --runner --convert --pooler-config --override-pooler-config", "", EMBEDDINGS),
    Row(
        "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --mm-processor-cache-type "
        "--mm-encoder-tp-mode --mm-encoder-only --mm-encoder-attn-backend --media-io-kwargs "
        "--interleave-mm-strings --skip-mm-profiling --video-pruning-rate --enable-mm-embeds "
        "--allowed-local-media-path --allowed-media-domains --enable-prompt-embeds "
        "--disable-chunked-mm-input --language-model-only",
        "",
        IMAGES,
    ),
    Row("--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init", "", TOKENIZER),
    Row(
        "--trust-remote-code --model-impl --worker-cls --worker-extension-cls --scheduler-cls --middleware "
        "--logits-processors --logits-processor-pattern --io-processor-plugin --tool-parser-plugin "
        "--reasoning-parser-plugin",
        "",
        NO_CODE,
    ),
    Row("--hf-overrides --hf-config-path --config-format --additional-config", "", OVERRIDE),
    Row("--rope-scaling --rope-theta", "", ROPE),
    Row("--override-generation-config", "", "sampling is set in each request"),
    Row("--revision --code-revision --download-dir --ignore-patterns", "", HUB),
    Row("--hf-token", "", TOKEN),
    Row("--host", "--host", "127.0.0.1 by default; another address needs a key, or --insecure"),
    Row("--port", "--port"),
    Row("--uds", "--uds"),
    Row("--root-path", "--root-path"),
    Row("--ssl-certfile --ssl-keyfile", "--ssl-certfile --ssl-keyfile"),
    Row(
        "--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh",
        "",
        "clients show keys, not certificates; TLS is 1.3",
    ),
    Row("--api-key", "--api-key-file", "or the variable OCTAVO_API_KEY: flags can be seen by others"),
    Row("--allowed-origins --allowed-methods --allowed-headers --allow-credentials", "", CORS),
    Row("--chat-template --chat-template-content-format --trust-request-chat-template", "", TEMPLATE),
    Row("--default-chat-template-kwargs", "", REQUEST + ", chat_template_kwargs"),
    Row("--enable-auto-tool-choice", "", "tools work without it; see --tool-call-parser"),
    Row("--tool-call-parser", "--tool-call-parser", "found by itself: leave it out"),
    Row("--reasoning-parser", "--reasoning-parser", "found by itself: leave it out"),
    Row("--structured-outputs-config --guided-decoding-backend", "", "llguidance is the only backend"),
    Row(
        "--tool-server --response-role --exclude-tools-when-tool-choice-none",
        "",
        "clients run tools, and roles are the template's",
    ),
    Row("--max-log-len --enable-log-requests --enable-log-outputs --enable-log-deltas", "", PRIVATE),
    Row("--disable-log-requests", "", ALWAYS + ": " + PRIVATE),
    Row(
        "--disable-uvicorn-access-log --disable-access-log-for-endpoints",
        "--access-log",
        "off unless given; probes are left out",
    ),
    Row(
        "--uvicorn-log-level --log-config-file --disable-log-stats --log-error-stack",
        "",
        LOGGING,
    ),
    Row(
        "--enable-prompt-tokens-details --enable-force-include-usage --enable-server-load-tracking",
        "",
        ALWAYS,
    ),
    Row("--otlp-traces-endpoint", "--otlp-traces-endpoint"),
    Row(
        "--collect-detailed-traces --show-hidden-metrics-for-version --kv-cache-metrics --profiler-config",
        "",
        "see /metrics and --otlp-traces-endpoint",
    ),
    Row("--enable-sleep-mode --weight-transfer-config", "", "a server keeps its model until it ends"),
    Row(
        "--enable-request-id-headers --disable-fastapi-docs --enable-tokenizer-info-endpoint",
        "",
        "Octavo's routes are fixed; see docs/server-api.md",
    ),
    Row("--shutdown-timeout", "--shutdown-timeout"),
    Row("--config", "", "write octavo.toml, with a table [serve]"),
)
