import pytest
import torch

from octavo.errors import ConfigError
from octavo.gemm.cpu import bfloat16, matrix_units
from octavo.gemm.cpu import compiled_rows as compiled
from octavo.gemm.cpu.mkl import MklLinear
from octavo.gemm.linear import PlainLinear
from octavo.gemm.make_linear import describe_layers
from octavo.layers import (
    ACTIVATIONS,
    Embedding,
    LMHead,
    activate_and_multiply,
    embedding,
    make_linear,
    vocabulary_shard,
)
from octavo.parallel import TensorParallel


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 3), (48, 64), (37, 29)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_the_definition_at_any_number_of_rows(
    rows: int, out_size: int, in_size: int, has_bias: bool
) -> None:
    weight, x = torch.randn(out_size, in_size), torch.randn(rows, in_size)
    bias = torch.randn(out_size) if has_bias else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    for layer in (make_linear(weight, bias), PlainLinear(weight, bias)):
        got = layer(x)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_packing_depends_on_dtype() -> None:
    weight = torch.randn(8, 8)
    packs = torch.backends.mkl.is_available()
    assert isinstance(make_linear(weight), MklLinear if packs else PlainLinear)
    assert isinstance(make_linear(weight.bfloat16()), PlainLinear)


def test_int8_is_close_to_float32() -> None:
    weight, bias, x = torch.randn(80, 96), torch.randn(80), torch.randn(17, 96)
    # Rows of very different size: each has a scale of its own.
    x *= torch.logspace(-3, 3, 17)[:, None]
    got = make_linear(weight, bias, quantization="int8")(x)
    expected = x @ weight.T + bias
    error = (got - expected).norm(dim=-1) / (x @ weight.T).norm(dim=-1)
    assert 0 < error.max() < 0.02


def test_an_int8_row_does_not_depend_on_its_neighbours() -> None:
    linear = make_linear(torch.randn(64, 64), torch.randn(64), quantization="int8")
    x = torch.randn(33, 64) * torch.logspace(-2, 2, 33)[:, None]
    together = linear(x)
    for row in range(33):
        assert together[row].equal(linear(x[row : row + 1])[0])


def test_int8_of_zero_rows_and_zero_channels_is_the_bias() -> None:
    weight, bias = torch.randn(4, 16), torch.arange(4.0)
    weight[2] = 0
    linear = make_linear(weight, bias, quantization="int8")
    assert linear(torch.zeros(3, 16)).equal(bias.expand(3, 4))
    assert linear(torch.randn(3, 16))[:, 2].eq(2.0).all()


def test_int8_keeps_no_float_copy_of_the_weight() -> None:
    linear = make_linear(torch.randn(64, 64), quantization="int8")
    tensors = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
    assert not any(t.dtype == torch.float32 and t.numel() >= 64 * 64 for t in tensors)


def test_what_cannot_be_rounded_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"float32 on a CPU, got torch\.bfloat16"):
        make_linear(torch.randn(4, 4).bfloat16(), quantization="int8")
    with pytest.raises(ConfigError, match=r"float32 or bfloat16 on a CPU, got torch\.float16"):
        make_linear(torch.randn(4, 4).half(), quantization="bf16")
    with pytest.raises(ConfigError, match="'int4'"):
        make_linear(torch.randn(4, 4), quantization="int4")


@pytest.fixture
def with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this CPU has units for bfloat16; PyTorch multiplies in it without, slowly."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


@pytest.fixture
def without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 32, 33, 130])
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 3), (4, 8), (37, 29), (80, 2000)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.usefixtures("without_units")
def test_a_bfloat16_weight_is_multiplied_exactly(
    rows: int, out_size: int, in_size: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many rows meet a part of the weight at a time.
    monkeypatch.setattr(bfloat16, "_CHUNK", 20000)
    torch.manual_seed(rows)
    weight, x = torch.randn(out_size, in_size).bfloat16(), torch.randn(rows, in_size)
    bias = torch.randn(out_size) if has_bias else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    got = make_linear(weight, bias, quantization="bf16")(x)
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-4)


def test_no_bit_of_a_few_rows_depends_on_the_others() -> None:
    linear = make_linear(torch.randn(37, 100), torch.randn(37), quantization="bf16")
    few = matrix_units.few_rows()
    x = torch.randn(few, 100)
    for rows in (2, 3, 5, 7, few):
        together = linear(x[:rows])
        for row in range(rows):
            assert together[row].equal(linear(x[row : row + 1])[0])


def test_rows_that_lie_apart_are_multiplied() -> None:
    linear, x = make_linear(torch.randn(8, 16), quantization="bf16"), torch.randn(3, 32)
    assert linear(x[:, ::2]).equal(linear(x[:, ::2].contiguous()))


@pytest.mark.parametrize("rows", [1, 17, 64, 130])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.usefixtures("with_units")
def test_many_rows_are_rounded_for_units(rows: int, has_bias: bool) -> None:
    weight, x = torch.randn(80, 96), torch.randn(rows, 96)
    bias = torch.randn(80) if has_bias else None
    got = make_linear(weight, bias, quantization="bf16")(x)
    operand = x if rows <= matrix_units.few_rows() else x.bfloat16()
    product = operand.double() @ weight.bfloat16().double().T
    assert got.dtype == torch.float32
    # Sums are float32; those of many rows are rounded once more.
    error = (got - (0 if bias is None else bias) - product).abs()
    assert (error < 2**-8 * product.abs() + 1e-5).all()
    assert 0 < (product - x.double() @ weight.double().T).norm() / product.norm() < 2**-8


@pytest.mark.usefixtures("without_units")
def test_a_bfloat16_weight_is_multiplied_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_failure", lambda: "no compiler")
    monkeypatch.setattr(matrix_units, "compile_failure", lambda: "no compiler")
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(2, 16)
    torch.testing.assert_close(make_linear(weight, quantization="bf16")(x), x @ weight.float().T)
    assert "C kernel" not in describe_layers("bf16", torch.device("cpu"), torch.float32)


def test_bfloat16_keeps_one_copy_of_the_weight() -> None:
    weight = torch.randn(64, 64).bfloat16()
    linear = make_linear(weight, quantization="bf16")
    tensors = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
    assert [tensor.data_ptr() for tensor in tensors] == [weight.data_ptr()]


@pytest.mark.parametrize(
    ("amx", "avx512", "named"), [(True, True, "AMX"), (False, True, "AVX512-BF16"), (False, False, None)]
)
def test_units_for_bfloat16_are_named(
    amx: bool, avx512: bool, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert matrix_units.matrix_units() == named
    said = describe_layers("bf16", torch.device("cpu"), torch.float32)
    assert (f"by oneDNN in bfloat16 ({named})" if named else "made float32 in each GEMM") in said


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations(name: str) -> None:
    gate_up = torch.randn(3, 10)
    before = gate_up.clone()
    gate, up = before.double().chunk(2, -1)
    functions = {
        "silu": lambda x: x * x.sigmoid(),
        "gelu": lambda x: x * 0.5 * (1 + (x / 2**0.5).erf()),
        "gelu_tanh": lambda x: 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
    }
    torch.testing.assert_close(activate_and_multiply(gate_up, name).double(), functions[name](gate) * up)
    assert gate_up.equal(before)


def test_embedding_multiplier_is_rounded_to_the_weights_dtype() -> None:
    weight = torch.ones(3, 2, dtype=torch.bfloat16)
    hidden = Embedding(weight, 0, 3072**0.5, TensorParallel())(torch.tensor([1]))
    assert hidden.tolist() == [[55.5, 55.5]]
    assert weight.eq(1).all()


def test_an_embedding_in_bfloat16_is_looked_up_in_the_dtype_of_the_stream() -> None:
    weight = torch.randn(3, 2).bfloat16()
    table = Embedding(weight, 0, 0.1, TensorParallel(), torch.float32)
    assert table(torch.tensor([2])).equal(weight[2:].float() * 0.1)
    assert table.dtype == torch.float32


def test_lm_head_caps_logits_in_float32() -> None:
    weight = torch.randn(6, 4)
    head = LMHead(make_linear(weight), 6, 2.0, TensorParallel())
    hidden = 10 * torch.randn(3, 4)
    torch.testing.assert_close(head(hidden), 2.0 * torch.tanh(hidden @ weight.T / 2.0))
    half = LMHead(make_linear(weight.bfloat16()), 6, 0.0, TensorParallel())
    assert half(hidden.bfloat16()).dtype == torch.float32


def test_lm_head_leaves_the_dtype_to_gpu_samplers_unless_it_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "has_triton", lambda tensor: True)
    linear, hidden = make_linear(torch.randn(6, 4).bfloat16()), torch.randn(3, 4).bfloat16()
    plain = LMHead(linear, 6, 0.0, TensorParallel())(hidden)
    assert plain.dtype == torch.bfloat16
    torch.testing.assert_close(plain, linear(hidden))
    assert LMHead(linear, 6, 2.0, TensorParallel())(hidden).dtype == torch.float32


class Lone:
    """A group that sums and gathers nothing: each rank is looked at alone."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError


def test_embedding_shares_of_all_ranks_sum_to_the_embedding() -> None:
    weight, ids = torch.randn(7, 4), torch.tensor([0, 6, 3, 2, 5, 3], dtype=torch.int32)
    total = torch.zeros(6, 4)
    for rank in range(3):
        parallel = TensorParallel(rank, 3, Lone())
        rows, share = vocabulary_shard(7, parallel)
        assert share == 3
        total += Embedding(weight[rows], rows.start, 1.0, parallel)(ids)
    assert total.equal(weight[ids])


def test_vocabulary_shards_cover_every_id_once() -> None:
    for vocab_size in (1, 5, 6, 7, 64):
        for size in (1, 2, 4):
            shards = [
                vocabulary_shard(vocab_size, TensorParallel(r, size, Lone() if size > 1 else None))
                for r in range(size)
            ]
            ids = [index for rows, _ in shards for index in range(rows.start, rows.stop)]
            assert ids == list(range(vocab_size))
            assert all(rows.stop - rows.start <= share for rows, share in shards)
