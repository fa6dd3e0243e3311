"""What is planned before anything is loaded: sizes, by the user or by the device, and what fits."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from tiny_model import TINY_LLAMA

from octavo import EngineConfig
from octavo.attention.implementations import choose_impl
from octavo.engine.memory import ExecutionPlan, plan_execution
from octavo.engine.runner_setup import plan_model, read_decoder
from octavo.errors import ConfigError, OutOfMemoryError
from octavo.forms.base import Storage
from octavo.forms.float8 import FLOAT8_ROWS
from octavo.gemm.cpu import matrix_units
from octavo.kv import BlockTables, KVCacheManager
from octavo.models import ModelConfig
from octavo.parallel import TensorParallel


def make_plan(**options: object) -> ExecutionPlan:
    config = EngineConfig.from_dict({"model": "tiny", "device": "cpu"} | options)
    return plan_execution(config, ModelConfig.from_hf(TINY_LLAMA))


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**36))


def test_a_cpu_runs_256_sequences_at_once() -> None:
    assert EngineConfig(model="tiny").max_num_seqs is None
    plan = make_plan()
    assert plan.max_num_seqs == 256
    assert plan.num_blocks <= 256 * TINY_LLAMA["max_position_embeddings"] // plan.block_size


def test_a_gpu_runs_512_sequences_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    plan = make_plan(device="cuda")
    assert plan.max_num_seqs == 512
    assert make_plan(device="cuda", max_num_seqs=256).working_bytes < plan.working_bytes


def test_a_gpu_without_room_for_a_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: object) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nSearch for it.")

    pretend_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(OutOfMemoryError, match=r"cuda is full: .* \(CUDA error: out of memory\)"):
        make_plan(device="cuda")


@pytest.mark.parametrize("number", [1, 3, 1000])
def test_as_many_as_the_user_says(number: int) -> None:
    plan = make_plan(max_num_seqs=number, max_model_len=64)
    assert plan.max_num_seqs == number
    assert plan.num_blocks == number * -(-64 // plan.block_size), "room for all of them, and no more"


@pytest.mark.parametrize("number", [0, -1, 2**31, 1.5, True, "8"])
def test_refuses_what_is_no_number_of_sequences(number: object) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be a positive integer"):
        EngineConfig.from_dict({"model": "tiny", "max_num_seqs": number})


MOST = 2**31 - 1
SIZES: dict[str, list[int | None]] = {
    "max_num_seqs": [None, 1, 10**5, MOST],
    "max_num_batched_tokens": [None, 1, MOST],
    "max_model_len": [None, 1],
    "block_size": [None, 1, MOST],
    "num_blocks": [None, 1, 10**8, MOST],
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_at_their_extremes_fit_or_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of 64 GiB, where 10^8 blocks take 80 GB of bookkeeping."""
    pretend_a_gpu(monkeypatch)
    monkeypatch.setattr("octavo.engine.memory.rank_device._available_system_bytes", lambda: 2**36)
    monkeypatch.setattr("octavo.engine.memory.rank_device._free_cgroup_bytes", lambda: 2**63)
    num_fitting = 0
    for values in itertools.product(*SIZES.values()):
        sizes = {name: value for name, value in zip(SIZES, values, strict=True) if value is not None}
        try:
            plan = make_plan(device=device, **sizes)
        except OutOfMemoryError:
            assert max(sizes.values()) > 1
            continue
        num_fitting += 1
        assert plan.total_bytes <= 2**36
        table_bytes = 4 * plan.max_num_seqs * plan.max_blocks
        assert plan.host_bytes >= table_bytes + 48 * plan.num_blocks
        assert plan.host_bytes <= 2**36
        assert device == "cpu" or plan.working_bytes >= 3 * table_bytes
    assert num_fitting > 20


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": MOST},
        {"max_num_seqs": MOST, "max_model_len": 1},
        {"max_num_seqs": 2 * 10**8, "max_num_batched_tokens": MOST, "max_model_len": 1, "num_blocks": 1},
        {"num_blocks": MOST},
        {"num_blocks": 10**8, "block_size": 1},
        {"block_size": MOST},
        {"block_size": MOST, "num_blocks": MOST},
        {"max_num_seqs": MOST, "num_blocks": 1, "block_size": MOST},
    ],
    ids=str,
)
def test_sizes_beyond_the_memory_name_what_to_lower(
    sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.memory.rank_device._available_system_bytes", lambda: 2**34)
    with pytest.raises(OutOfMemoryError, match=f"lower .*{next(iter(sizes))}"):
        make_plan(**sizes)


def test_weights_that_are_too_large_by_themselves_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.memory.rank_device._available_system_bytes", lambda: 2**16)
    with pytest.raises(OutOfMemoryError, match=r"weights take .*, but 64 KiB are free on cpu; keep them in"):
        make_plan()


def test_a_token_budget_beyond_all_tokens_there_can_be_costs_nothing() -> None:
    few = {"max_num_seqs": 4, "max_model_len": 64, "num_blocks": 16}
    plan = make_plan(max_num_batched_tokens=MOST, **few)
    assert plan.working_bytes == make_plan(max_num_batched_tokens=256, **few).working_bytes
    assert plan.working_bytes > make_plan(max_num_batched_tokens=16, **few).working_bytes


def test_tables_of_a_gpus_host_are_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    monkeypatch.setattr("octavo.engine.memory.rank_device._available_system_bytes", lambda: 2**20)
    with pytest.raises(OutOfMemoryError, match="free on the host; lower max_num_seqs"):
        make_plan(device="cuda", max_num_seqs=4096)


def test_all_free_memory_but_what_steps_need_is_the_caches() -> None:
    plan = make_plan(memory_fraction=1.0, max_num_seqs=10**5)
    assert plan.working_bytes > 0
    assert plan.total_bytes <= plan.free_bytes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_impl": "c", "dtype": "bfloat16"}, "bfloat16"),
        ({"attention_impl": "c", "dtype": "float16"}, "float16"),
        ({"attention_impl": "c", "kv_cache_dtype": "fp8"}, "float8"),
        ({"attention_impl": "triton"}, "NVIDIA GPUs, not for cpu"),
        (
            {"attention_impl": "triton", "dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            "NVIDIA GPUs, not for cpu",
        ),
    ],
    ids=str,
)
def test_an_attention_that_cannot_run_here_is_refused_before_anything_is_loaded(
    options: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests of interpreted kernels may have run in this process.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choose_impl.cache_clear()
    with pytest.raises(
        ConfigError, match=f'attention impl "{options["attention_impl"]}" cannot run.*{reason}'
    ):
        make_plan(**options)


def test_the_triton_attention_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    choose_impl.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        make_plan(device="cuda", attention_impl="triton")


@pytest.mark.parametrize("impl", ["auto", "reference", "torch", "c"])
def test_an_attention_that_can_run_here_is_not_refused(impl: str) -> None:
    assert make_plan(attention_impl=impl, dtype="float32").dtype == torch.float32


def quantization_of(model_dtype: str = "bfloat16", stored: Storage | None = None, **options: object) -> str:
    config = EngineConfig.from_dict({"model": "tiny", "device": "cpu"} | options)
    model = ModelConfig.from_hf(TINY_LLAMA | {"torch_dtype": model_dtype})
    matrices = {} if stored is None else {"model.layers.0.self_attn.q_proj.weight": stored}
    return plan_execution(config, model, stored=matrices).quantization


def test_a_cpu_with_matrix_units_multiplies_bfloat16_checkpoints_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(matrix_units, "is_amd", lambda: False)
    assert quantization_of() == "auto", "Intel's are slower in bfloat16 without AMX"
    monkeypatch.setattr(matrix_units, "is_amd", lambda: True)
    assert quantization_of() == "bf16"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert quantization_of() == "auto", "AMD's without AVX512-BF16 have no products in bfloat16"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert quantization_of() == "bf16"
    # Exact by option, and what has more digits stays as it is.
    assert quantization_of(quantization="none") == "none"
    assert quantization_of(quantization="int8") == "int8"
    assert quantization_of(dtype="float32") == "auto"
    assert quantization_of("float32") == quantization_of("float16") == "auto"
    # What is quantised stays so beside it, unless it has to be dequantised, which has more digits.
    assert quantization_of(stored=FLOAT8_ROWS) == "mixed"
    assert quantization_of(stored=Storage("odd blocks", 4)) == "auto"
    assert (
        quantization_of(quantization="fp8")
        == quantization_of(quantization="fp8", stored=FLOAT8_ROWS)
        == "mixed fp8"
    )
    assert quantization_of(quantization="fp8", dtype="float32") == "fp8"


def test_what_was_planned_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"torch_dtype": "bfloat16"}))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", num_blocks=8)
    source, plan = plan_model(config, TensorParallel())
    decoder = read_decoder(source, plan, None)
    assert decoder.embed_tokens._weight.dtype == torch.bfloat16
    assert decoder.dtype == plan.dtype == torch.float32


def test_matrices_in_bfloat16_take_half_the_memory() -> None:
    sizes = [
        {group.part: group.num_bytes for group in make_plan(quantization=name, num_blocks=8).weights}
        for name in ("none", "bf16")
    ]
    assert sizes[0].keys() == sizes[1].keys()
    for part, num_bytes in sizes[0].items():
        assert sizes[1][part] == (num_bytes if part == "norms and others" else num_bytes / 2)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_what_rounds_products_runs_in_float32_on_a_cpu(name: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization='{name}' runs on a CPU in float32, got cpu and"):
        make_plan(quantization=name, dtype="bfloat16")


def windows_alone(**options: object) -> ExecutionPlan:
    model = TINY_LLAMA | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
        "max_position_embeddings": 2**14,
    }
    config = EngineConfig.from_dict({"model": "tiny", "device": "cpu", "block_size": 1} | options)
    return plan_execution(config, ModelConfig.from_hf(model))


def test_ids_of_blocks_have_32_bits_where_windows_alone_take_memory() -> None:
    """Trap: ids of blocks without memory are many times the pages."""
    plan = windows_alone(max_num_seqs=6000)
    group = plan.layout.groups[0]
    last = group.block_id(plan.num_blocks - 1, group.blocks_per_page - 1, plan.num_blocks)
    assert not group.layers
    assert plan.num_blocks == plan.layout.max_pages < plan.most_blocks
    assert last < 2**31
    manager = KVCacheManager(plan.num_blocks, plan.block_size, layout=plan.layout)
    sequence = manager.new_sequence()
    assert manager.allocate(sequence, 5000)
    BlockTables(1, plan.table_columns).update(0, sequence.block_ids)
    with pytest.raises(ConfigError, match="num_blocks must be at most"):
        windows_alone(num_blocks=2**30)
