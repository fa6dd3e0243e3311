"""The groups of `--help`: which option is in which, for the options of each kind."""

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar, get_type_hints

from cyclopts import Group, Parameter

# In the order of the help.
_TITLES = (
    "Files, Conversation, Server, Workload, Prompts, Model, Memory and cache, Scheduling, Device and "
    "kernels, Parallelism, Sampling, Length and text, Structured output, Address, Security, Limits, "
    "Restarts, Answers, Logging, Output, Products"
)
GROUPS = {title: Group(title, sort_key=index) for index, title in enumerate(_TITLES.split(", "))}

ENGINE = {
    "Model": "model load_format dtype quantization max_model_len seed generation_config "
    "message_control_tokens",
    "Memory and cache": "memory_fraction num_blocks block_size kv_cache_dtype enable_prefix_caching",
    "Scheduling": "max_num_seqs max_num_batched_tokens max_step_ms share_prefixes deterministic",
    "Device and kernels": "device attention_impl prepare kernel_cache_dir",
    "Parallelism": "tensor_parallel_size expert_parallel all_reduce",
}
SERVER = {
    "Address": "host port uds root_path served_model_name",
    "Security": "api_key api_key_file insecure ssl_certfile ssl_keyfile allowed_hosts public_metrics "
    "cache_isolation",
    "Limits": "max_num_queued_reqs max_num_queued_tokens max_body_bytes max_body_values body_timeout_s "
    "min_body_bytes_per_s response_store_mib response_store_s "
    "queue_timeout_s write_timeout_s sse_keep_alive_s step_deadline_s shutdown_timeout",
    "Restarts": "restart max_restarts restart_window_s",
    "Parallelism": "replicas",
    "Answers": "tool_call_parser reasoning_parser",
    "Logging": "access_log log_format otlp_traces_endpoint",
}
STRUCTURED = {"Structured output": "json_schema json_object regex choice grammar"}
SAMPLING = {
    "Sampling": "n temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty "
    "logit_bias",
    "Length and text": "max_tokens min_tokens stop stop_token_ids include_stop_str_in_output ignore_eos "
    "skip_special_tokens detokenize logprobs prompt_logprobs",
}
THROUGHPUT = {"Workload": "num_prompts input_len output_len shared_prefix_len num_warmup"}
PREFIX = {
    "Workload": "context_len batch_sizes num_heads num_kv_heads head_dim block_size dtype device",
    "Output": "plot",
}
LOAD = {
    "Server": "base_url served_model_name endpoint api_key api_key_file timeout",
    "Workload": "num_prompts request_rate burstiness max_concurrency processes warmup",
    "Prompts": "prompt_kind prompts_file input_len output_len prefix_len num_prefixes vocab_size "
    "ignore_eos temperature seed",
    "Output": "goodput json_file plot",
}

_Options = TypeVar("_Options", bound=type)


def in_group(title: str) -> Parameter:
    """Put one option of a command into a group."""
    return Parameter(group=GROUPS[title])


def grouped(groups: Mapping[str, str]) -> Callable[[_Options], _Options]:
    """Put the fields of a dataclass of options into groups.

    Args:
        groups: names of fields by the group's title.
    """
    titles = {name: title for title, names in groups.items() for name in names.split()}

    def decorate(options: _Options) -> _Options:
        hints = get_type_hints(options, include_extras=True)
        grouped = {name: Annotated[hints[name], in_group(title)] for name, title in titles.items()}
        options.__annotations__ = {name: grouped.get(name, hint) for name, hint in hints.items()}
        return options

    return decorate
