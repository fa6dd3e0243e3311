"""The kernel of few_linear: each warp streams its spans of a packed weight through its tensor cores.

    start    copies of the first spans and their pairs to shared memory
             wait for the kernel before; a single row of x is normed and kept in shared memory
    warp w   spans w, w + W, ...      copied some spans ahead
             planes of integers       bits become floats without arithmetic: q + ORIGIN
             sums += integers * x,    of a group, then scaled: scale * (sums - ORIGIN * total) + min * total
             total += x
    last     the warps' sums are added up

A tile of 32 words of a row, in the layout of a tensor core's operand, gives each thread eight neighbours: two
reads of 16 bytes. Their planes meet eight neighbours of x, another such read. So nothing moves between
threads.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.layers.triton.activation import activate


def _unpack_asm(origin: int) -> str:
    """PTX for two words: planes of 4 bits as 16-bit floats of q + the origin, whose bits are given."""
    lines = ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    for plane in range(8):
        half = "low" if plane < 4 else "high"
        if plane % 4:
            lines.append(f"shr.u32 moved, {half}, {plane % 4 * 4};")
        # 0xEA: (a and b) or c.
        lines.append(f"lop3.b32 ${plane}, {'moved' if plane % 4 else half}, 0x000F000F, {origin:#x}, 0xEA;")
    return "{ .reg .b32 low, high, moved;\n" + "\n".join(lines) + "\n}"


# 128 in bfloat16 and 1024 in float16: their last bits are worth 1.
_ASM_BFLOAT16 = gl.constexpr(_unpack_asm(0x43004300))
_ASM_FLOAT16 = gl.constexpr(_unpack_asm(0x64006400))
_EIGHT_OF_ONE = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


class Shape(NamedTuple):
    """Form of the weight, tiling and what is fused, all constants of the kernel.

    Attributes:
        bits: 4 or 8.
        group: columns of a group.
        size: K.
        rows: of x: 1, 8 or 16.
        columns: rows of the weight per program, a multiple of 16.
        warps: that share K.
        stages: spans of a warp in shared memory.
        norm: whether x is normed; with one row.
        bias: whether there is one.
        activation: name or None.
        adds: whether the result is added to the residual.
        overlap: whether the next kernel may start early.
    """

    bits: int
    group: int
    size: int
    rows: int
    columns: int
    warps: int
    stages: int
    norm: bool
    bias: bool
    activation: str | None
    adds: bool
    overlap: bool


@gluon.jit
def _planes(words, bits: gl.constexpr, dtype: gl.constexpr):
    """Return the planes of words as floats: q + ORIGIN of 4 bits, q of 8."""
    if bits == 8:
        return (
            (words << 24 >> 24).to(gl.float32).to(dtype),
            (words << 16 >> 24).to(gl.float32).to(dtype),
            (words << 8 >> 24).to(gl.float32).to(dtype),
            (words >> 24).to(gl.float32).to(dtype),
        )
    else:
        if dtype == gl.bfloat16:
            return gl.inline_asm_elementwise(
                _ASM_BFLOAT16, _EIGHT_OF_ONE, [words], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=2
            )
        else:
            return gl.inline_asm_elementwise(
                _ASM_FLOAT16, _EIGHT_OF_ONE, [words], dtype=(gl.float16,) * 8, is_pure=True, pack=2
            )


@gluon.jit
def _keep_row(x_ptr, norm_weight_ptr, eps, row, shape: gl.constexpr):
    """Write a row of x, normed if that is asked for, to shared memory: [turns, planes * warps * 32]."""
    SPAN: gl.constexpr = 1024 // shape.bits
    TURNS: gl.constexpr = row.shape[0]
    TURN: gl.constexpr = SPAN * shape.warps
    TILE: gl.constexpr = gl.BlockedLayout([8], [32], [shape.warps], [0])
    place = gl.arange(0, TURN, TILE)
    k = place // 32 % shape.warps * SPAN + place // (32 * shape.warps) * 32 + place % 32
    if shape.norm:
        squares = gl.zeros([TURN], gl.float32, TILE)
        for turn in gl.static_range(TURNS):
            at = k + turn * TURN
            x = gl.load(x_ptr + at, mask=at < shape.size, other=0.0).to(gl.float32)
            squares += x * x
        scale = gl.rsqrt(gl.sum(squares, 0) / shape.size + eps)
    for turn in gl.static_range(TURNS):
        at = k + turn * TURN
        x = gl.load(x_ptr + at, mask=at < shape.size, other=0.0)
        if shape.norm:
            norm_weight = gl.load(norm_weight_ptr + at, mask=at < shape.size, other=0.0).to(gl.float32)
            x = (x.to(gl.float32) * scale * norm_weight).to(x_ptr.dtype.element_ty)
        row.index(turn).store(x)


@gluon.jit(do_not_specialize=["num_rows"])
def few_linear_kernel(
    x_ptr, words_ptr, pairs_ptr, bias_ptr, norm_weight_ptr, out_ptr,
    num_rows, num_weight_rows, stride_x, stride_out, factor, eps,
    shape: gl.constexpr,
):  # fmt: skip
    """Grid: (ceil(columns of the result / columns of a program),).

    With an activation, the first half of a program's columns is gate, the other one up.
    """
    GROUP: gl.constexpr = shape.group
    WARPS: gl.constexpr = shape.warps
    COLUMNS: gl.constexpr = shape.columns
    STAGES: gl.constexpr = shape.stages
    # Tensor cores multiply 8 rows at least; a single one is repeated.
    ROWS: gl.constexpr = 8 if shape.rows == 1 else shape.rows
    SPAN: gl.constexpr = 1024 // shape.bits
    GROUPS: gl.constexpr = SPAN // GROUP
    NUM_SPANS: gl.constexpr = (shape.size + SPAN - 1) // SPAN
    TURNS: gl.constexpr = (NUM_SPANS + WARPS - 1) // WARPS
    HALVES: gl.constexpr = 1 if shape.activation is None else 2
    OWN: gl.constexpr = COLUMNS // HALVES
    # Groups of half a plane: the other half of x is zero.
    PASSES: gl.constexpr = 32 // GROUP if GROUP < 32 else 1
    PLANES: gl.constexpr = GROUP // 32 if GROUP > 32 else 1
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ORIGIN: gl.constexpr = 0 if shape.bits == 8 else 128 if dtype == gl.bfloat16 else 1024
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    COPY_PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    if shape.overlap:
        gdc_launch_dependents()
    num_columns = num_weight_rows // HALVES
    first = gl.program_id(0) * OWN

    # Rows of the weight and spans past the end repeat the last ones: they are not stored, or meet zeros.
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    index = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    weight_row = gl.minimum(first + index % OWN, num_columns - 1) + index // OWN * num_columns
    words_at = words_ptr + weight_row.to(gl.int64) * (NUM_SPANS * 32) + word
    # The groups of a span one after the other, each with all warps.
    place = gl.arange(0, GROUPS * WARPS, gl.SliceLayout(1, COPY_PAIRS))[:, None]
    warp_p, step_p = place % WARPS, place // WARPS
    index_p = gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY_PAIRS))[None, :]
    pairs_at = pairs_ptr + gl.minimum(first + index_p % OWN, num_columns - 1) + index_p // OWN * num_columns
    words = gl.allocate_shared_memory(
        gl.int32, [STAGES, WARPS, COLUMNS, 32], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    )
    pairs = gl.allocate_shared_memory(
        gl.int32, [STAGES, GROUPS * WARPS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for turn in gl.static_range(STAGES - 1):
        span = gl.minimum(turn * WARPS + warp, NUM_SPANS - 1)
        async_copy.async_copy_global_to_shared(words.index(turn), words_at + span * 32)
        group = gl.minimum(turn * WARPS + warp_p, NUM_SPANS - 1) * GROUPS + step_p
        async_copy.async_copy_global_to_shared(pairs.index(turn), pairs_at + group * num_weight_rows)
        async_copy.commit_group()
    if shape.overlap:
        gdc_wait()

    if shape.rows == 1:
        kept = gl.allocate_shared_memory(dtype, [TURNS, SPAN * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        _keep_row(x_ptr, norm_weight_ptr, eps, kept, shape)
        row_of_x = kept._reinterpret(
            dtype, [TURNS * (SPAN // 32), WARPS, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    # [warp, k, row]
    warp_b = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    row_b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    x_at = x_ptr + row_b.to(gl.int64) * stride_x
    ones = gl.full([WARPS, COLUMNS, 32], 1.0, dtype, A)
    out = gl.zeros([WARPS, COLUMNS, ROWS], gl.float32, SUMS)
    for turn in range(TURNS):
        async_copy.wait_group(STAGES - 2)
        ahead = turn + STAGES - 1
        span = gl.minimum(ahead * WARPS + warp, NUM_SPANS - 1)
        async_copy.async_copy_global_to_shared(
            words.index(ahead % STAGES), words_at + span * 32, mask=warp * 0 + ahead < TURNS
        )
        group = gl.minimum(ahead * WARPS + warp_p, NUM_SPANS - 1) * GROUPS + step_p
        async_copy.async_copy_global_to_shared(
            pairs.index(ahead % STAGES),
            pairs_at + group * num_weight_rows,
            mask=warp_p * 0 + ahead < TURNS,
        )
        async_copy.commit_group()
        planes = _planes(words.index(turn % STAGES).load(A), shape.bits, dtype)
        for step in gl.static_range(GROUPS):
            sums = gl.zeros([WARPS, COLUMNS, ROWS], gl.float32, SUMS)
            total = gl.zeros([WARPS, COLUMNS, ROWS], gl.float32, SUMS)
            for plane in gl.static_range(step // PASSES * PLANES, (step // PASSES + 1) * PLANES):
                if shape.rows == 1:
                    x = row_of_x.index(turn * (SPAN // 32) + plane).load(gl.SliceLayout(2, B))
                    x = gl.expand_dims(x, 2)
                    if PASSES == 2:
                        x = gl.where(k // GROUP == step % PASSES, x, 0.0)
                    x = x.broadcast_to([WARPS, 32, ROWS])
                else:
                    at = (turn * WARPS + warp_b) * SPAN + plane * 32 + k
                    inside = (at < shape.size) & (row_b < num_rows)
                    if PASSES == 2:
                        inside &= k // GROUP == step % PASSES
                    x = gl.load(x_at + at, mask=inside, other=0.0)
                sums = mma_v2(planes[plane], x, sums)
                total = mma_v2(ones, x, total)
            of_step = pairs.index(turn % STAGES).slice(step * WARPS, WARPS, 0)
            pair = gl.expand_dims(of_step.load(gl.SliceLayout(2, SUMS)), 2)
            scale = (pair & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            low = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            out += scale * sums + (low - ORIGIN * scale) * total
    async_copy.wait_group(0)

    result = gl.sum(out, 0) * factor
    RESULT: gl.constexpr = gl.SliceLayout(0, SUMS)
    index = gl.arange(0, COLUMNS, gl.SliceLayout(1, RESULT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, RESULT))[None, :]
    if shape.bias:
        bias_row = gl.minimum(first + index % OWN, num_columns - 1) + index // OWN * num_columns
        result += gl.load(bias_ptr + bias_row).to(gl.float32)[:, None]
    if shape.activation is not None:
        # Gate and up of a column are the same thread's.
        gate, up = gl.split(result.reshape([2, OWN, ROWS]).permute([1, 2, 0]))
        result = gl.convert_layout(activate(gate, shape.activation) * up, RESULT)
    column = first + gl.arange(0, OWN, gl.SliceLayout(1, RESULT))[:, None]
    stored = (column < num_columns) & (row < num_rows)
    out_at = out_ptr + row.to(gl.int64) * stride_out + column
    if shape.adds:
        result += gl.load(out_at, mask=stored, other=0.0).to(gl.float32)
    gl.store(out_at, result.to(dtype), mask=stored)
