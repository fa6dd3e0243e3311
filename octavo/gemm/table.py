"""The only chooser of products of matrices: rows of data, and their lookup. Importing this imports no Triton.

    LAYERS, EXPERT_LAYERS    kind of weight, device, dtype -> layer, form     once, when a layer is made
    PRODUCTS                 form, generation, rows of x -> kernel            in each step
    EXPERTS                  form, generation, tokens, rows of an expert      in each step

The first row that holds is taken, so the fastest product stands first. Limits (`rows`, `where`) were measured
on an H200. `octavo inspect MODEL --products` prints which rows a model takes, and why.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import bfloat16, float16, float32

from octavo.forms.float8 import Float8Weight
from octavo.forms.float_experts import Float8Stack, FloatStack
from octavo.forms.mxfp4_experts import Mxfp4Stack
from octavo.forms.packed import PLANE, PackedWeight
from octavo.forms.packed_experts import PackedStack
from octavo.gemm.cpu import compiled_rows, matrix_units, mkl
from octavo.gemm.hopper.float8 import many_tiling
from octavo.gemm.hopper.floats import dense_gemm_tiling, dense_gemv_tiling, expert_gemv_tiling
from octavo.gemm.hopper.mxfp4 import mxfp4_gemv_tiling, mxfp4_rows_tiling
from octavo.gemm.hopper.packed import packed_expert_tiling, packed_gemm_tiling, packed_gemv_tiling
from octavo.gemm.portable import float8_tiling, skinny_tiling
from octavo.gemm.portable.experts import expert_tiling
from octavo.gemm.product import MANY, Layer, Product

_HALF = float16, bfloat16
_HOPPER = 9
# Rows of an LM head.
_VOCABULARY = 65536

_BLOCKS = Layer(make="cpu.block_linear:make_layer", device="cpu", dtypes=(float32,), compiles=True,
                why="8-bit activations, by the C kernel")  # fmt: skip
_PACKED: dict[str, Any] = {"make": "gpu_linear:make_layer", "form": "packed", "dtypes": _HALF}
_DEQUANTISED = Layer(make="dequantised:make_layer", device="", why="dequantised in each GEMM, by PyTorch")

# Kind of weights, or a quantization that rounds to one -> layers, the fastest first.
LAYERS: Mapping[str, tuple[Layer, ...]] = MappingProxyType({
    "floats": (
        Layer(make="cpu.mkl:MklLinear", device="cpu", dtypes=(float32,), why="packed once, by MKL",
              fits=lambda w: mkl.unsupported_reason(w) is None),
        Layer(make="gpu_linear:GpuLinear", form="floats", dtypes=(*_HALF, float32), why="by GPU kernels",
              fits=lambda w: skinny_tiling.unsupported_reason(w) is None),
        Layer(make="linear:PlainLinear", device="", why="by PyTorch"),
    ),
    "bf16": (Layer(make="cpu.bfloat16:Bfloat16Linear", form="bfloat16", device="cpu",
                   dtypes=(float32, bfloat16), why=matrix_units.describe),),
    "int8": (replace(_BLOCKS, make="cpu.int8:make_layer"),),
    "deterministic": (Layer(make="portable.invariant:InvariantLinear", why="one order of sums for rows"),),
    "blocks": (_BLOCKS, Layer(why="packed in groups, by GPU kernels", pack=PackedWeight.pack,
                              blank=PackedWeight.blank, **_PACKED)),
    "router": (Layer(form="router", why="by GPU kernels"), Layer(device="", make="torch:", why="in float32")),
    # Groups of columns that are no multiple of 32, or columns with scales of their own: no kernel does.
    "odd blocks": (),
    "float8": (
        Layer(make="gpu_linear:make_layer", form="float8", dtypes=_HALF, capability=(8, 9),
              fits=float8_tiling.has_tiles, blank=Float8Weight.blank,
              why="activations in float8, but those of single rows, by GPU kernels; dequantised in each GEMM "
              "where tiles are narrower than 32 columns or no power of two"),
        Layer(make="cpu.float8_rows:make_layer", form="float8 on a CPU", device="cpu", dtypes=(float32,),
              compiles=True, why="up to 16 rows by the C kernel, 256 if other matrices are float32; more are "
              "dequantised in each GEMM"),
        _DEQUANTISED,
    ),
    "mxfp4": (_BLOCKS, Layer(why="as integers of 8 bits, by GPU kernels", blank=PackedWeight.blank,
                             pack=lambda w: PackedWeight.pack(w.in_bytes()), **_PACKED), _DEQUANTISED),
})  # fmt: skip

_ONCE = "by GPU kernels that read each touched expert once"
# Kind of experts -> how a GPU stacks them in one tensor; elsewhere they are layers one by one.
EXPERT_LAYERS: Mapping[str, Layer] = MappingProxyType({
    "floats": Layer(why=_ONCE, form="floats", dtypes=(*_HALF, float32), blank=FloatStack),
    "float8": Layer(why=f"rows of more than four tokens in float8, {_ONCE}", form="float8", capability=(9, 0),
                    blank=Float8Stack),
    "mxfp4": Layer(why=_ONCE, form="mxfp4", blank=Mxfp4Stack),
    "blocks": Layer(why=_ONCE, form="packed", dtypes=_HALF, blank=PackedStack),
})  # fmt: skip

_gemv = partial(Product, "gemv", "hopper.floats.float_gemv:gemv_linear", rows=(1, 1), norms=1, streams=True,
                generation=_HOPPER, misfit=dense_gemv_tiling.misfit)  # fmt: skip
_skinny = partial(Product, "skinny", "portable.skinny:skinny_linear", norms=4)
_hopper = partial(Product, "hopper", "hopper.floats.dense_gemm:hopper_linear", generation=_HOPPER)
_hopper_floats = partial(_hopper, refuses=lambda x, w, is_gated: dense_gemm_tiling.misfit(x, w))
_hopper_float8 = partial(_hopper, misfit=dense_gemm_tiling.float8_misfit, rounds="rows")
_many = partial(Product, "many", "hopper.float8.persistent_gemm:many_linear", rounds="rows",
                generation=_HOPPER, misfit=many_tiling.misfit)  # fmt: skip
_float8 = partial(Product, "float8", "portable.float8_gemm:float8_linear", rounds="rows")
_torch = partial(Product, "torch", "portable.torch_gemm:float8_linear", rounds="tiles")
_in_c = partial(Product, "C kernel", "multiply_in_c", why="float32 rows; the weight is read once")

# Form of a weight -> products, the fastest first; together they have one for any number of rows.
PRODUCTS: Mapping[str, tuple[Product, ...]] = MappingProxyType({
    "floats": (
        _gemv(where=lambda w: w.shape[1] <= 16384 and w.shape[0] < _VOCABULARY,
              why="streams the weight while the kernel before it runs; K up to 16,384 (half an SM), and "
              "no LM head, where skinny is 1 to 2 % faster"),
        _hopper_floats(rows=(2, 64), why="TMA and wgmma, in programs enough for a few rows"),
        _hopper_floats(rows=(65, 128), where=lambda w: w.shape[1] < 4096 and w.shape.numel() <= 4096 * 1024,
                       why="TMA and wgmma; cuBLAS is faster with K >= 4,096 or over 4 Mi weights"),
        _hopper_floats(rows=(129, 256), where=lambda w: w.shape[0] <= 2048 and w.shape[1] < 4096
                       and w.shape.numel() <= 4096 * 1024,
                       why="TMA and wgmma; cuBLAS is faster with N > 2,048, K >= 4,096 or over 4 Mi weights"),
        _skinny(rows=(1, 1), why="sums in registers; it streams a weight once, on every GPU"),
        _skinny(rows=(2, 4), where=lambda w: w.shape[1] < 4096 and w.shape[0] < _VOCABULARY,
                why="sums in registers; cuBLAS is faster from K = 4,096 on, and at an LM head"),
        Product("plain", "portable.torch_gemm:linear", fuses=False, why="cuBLAS is faster, or as fast"),
    ),
    "float8": (
        _gemv(why="streams the weight while the kernel before it runs"),
        _skinny(rows=(1, 1), why="sums in registers; it streams a weight once, on every GPU"),
        _many(rows=(65, MANY), where=lambda w: w.height == 1, why="persistent, with float8 tensor cores"),
        _many(rows=(65, 256), where=lambda w: w.shape[0] <= 4096,
              why="persistent; with scales of tiles torch is as fast from 257 rows on, and with N > 4,096"),
        _hopper_float8(rows=(2, 64), where=lambda w: w.shape[0] < 16384 or (w.shape[1] >= 4096
                       and w.width == w.shape[1]), why="TMA and wgmma, in programs enough for a few rows"),
        _hopper_float8(rows=(33, 64), where=lambda w: w.width == w.shape[1],
                       why="TMA and wgmma; with N >= 16,384 short rows, float8 is faster up to 32 rows of x"),
        _float8(rows=(0, 64), why="Triton with float8 tensor cores, in tiles for a few rows"),
        _torch(where=float8_tiling.torch_fits_rows, why="torch's, scales of rows"),
        _torch(where=float8_tiling.torch_fits_tiles, generation=_HOPPER, why="torch's, scales of tiles"),
        _float8(why="Triton with float8 tensor cores; torch has no product for such scales or sizes"),
    ),
    "packed": (
        Product("gemv", "hopper.packed.packed_gemv:packed_gemv_linear", rows=(1, 1), norms=1, streams=True,
                generation=_HOPPER, misfit=packed_gemv_tiling.misfit, why="4 bits: integers on tensor cores"),
        Product("few", "portable.packed.rows_gemm:few_linear", rows=(0, 16), norms=1,
                streams=True, why="streams words through tensor cores: two tiles of 8 rows"),
        Product("hopper", "hopper.packed.packed_gemm:hopper_medium_linear", rows=(17, 256),
                refuses=lambda x, w, is_gated: packed_gemm_tiling.misfit(x, w, is_gated=is_gated),
                generation=_HOPPER, why="4 bits, unpacked in registers between TMA and wgmma"),
        Product("medium", "portable.packed.medium:medium_linear", rows=(17, 256), why="unpacks in registers"),
        Product("dequantised", "portable.torch_gemm:dequantised_linear",
                why="from 257 rows on it is faster to dequantise the whole weight, then call cuBLAS"),
    ),
    "router": (
        Product("route", "portable.experts.route_token:norm_and_route", rows=(1, 4), norms=4,
                where=lambda w: w.shape[0] <= 256 and w.shape[1] <= 8192,
                why="one kernel norms tokens, multiplies and chooses experts: up to 256, hidden up to 8,192"),
        Product("logits", "portable.experts.router_logits:router_logits", why="another kernel chooses"),
    ),
    "bfloat16": (
        *(_in_c(rows=(0, rows), where=lambda layer, units=units: layer.units == units,
                misfit=lambda layer: compiled_rows.unsupported_reason(len(layer.weight)))
          for units, rows in matrix_units.FEW_ROWS.items()),
        Product("oneDNN", "multiply_in_bfloat16", where=lambda layer: layer.units, why="bfloat16 rows"),
        Product("widened", "multiply_widened", why="parts become float32, then MKL"),
    ),
    "float8 on a CPU": (
        _in_c(rows=(0, 16), where=lambda layer: layer.rounds and layer.runs_in_c),
        _in_c(rows=(0, 256), where=lambda layer: not layer.rounds and layer.runs_in_c),
        Product("oneDNN", "multiply_in_bfloat16", why="parts become bfloat16, then oneDNN",
                where=lambda layer: layer.rounds and layer.runs_in_c),
        Product("dequantised", "multiply_dequantised", why="parts become float32, then MKL"),
    ),
})  # fmt: skip

_STREAMS = "streams the experts of a token through persistent programs"
_stream = partial(Product, "gemv", generation=_HOPPER, streams=True)
_few = partial(Product, "few", mixes=True, why="each pair of a token and an expert by itself, unsorted")
_grouped = partial(Product, "grouped", mixes=True, why="pairs sorted by expert: each is read once")
_float_stream = partial(_stream, launch="hopper.floats.float_gemv", why=_STREAMS,
                        refuses=lambda x, w, k, summed: expert_gemv_tiling.misfit(x, w, summed))  # fmt: skip
_FLOAT_FEW = _few(launch="portable.experts.pair_gemv", rows=(0, 4), tiling=expert_tiling.float_pair_tiling)
_FLOAT_GROUPED = _grouped(launch="portable.experts.grouped_gemm", tiling=expert_tiling.float_grouped_tiling)

# Form of experts -> products, the fastest first; `rows` are tokens. deterministic=True takes "grouped" alone.
EXPERTS: Mapping[str, tuple[Product, ...]] = MappingProxyType({
    "floats": (_float_stream(rows=(1, 1)), _FLOAT_FEW, _FLOAT_GROUPED),
    "float8": (
        _float_stream(rows=(1, 4)),
        _FLOAT_FEW,
        Product("rounded", "portable.experts.grouped_gemm", tiling=expert_tiling.rounded_tiling,
                why="pairs sorted by expert: each is read once; rows become float8, too"),
        _FLOAT_GROUPED,
    ),
    "mxfp4": (
        _stream(launch="hopper.mxfp4.mxfp4_gemv", rows=(1, 1), why=_STREAMS,
                refuses=lambda x, w, k, summed: mxfp4_gemv_tiling.misfit(x, w, k)),
        _few(launch="portable.experts.grouped_gemm", rows=(0, 4), tiling=expert_tiling.mxfp4_pair_tiling),
        Product("persistent", "hopper.mxfp4.mxfp4_persistent", generation=_HOPPER, above=48,
                refuses=lambda x, w, k, summed: mxfp4_rows_tiling.misfit(x, w),
                tiling=mxfp4_rows_tiling.mxfp4_many_tiling_for,
                why="TMA and wgmma in persistent programs: faster above 48 rows of an expert (H100)"),
        _grouped(launch="portable.experts.grouped_gemm", tiling=expert_tiling.mxfp4_grouped_tiling),
    ),
    "packed": (
        _stream(launch="hopper.packed.packed_gemv", rows=(1, 1),
                refuses=lambda x, w, k, summed: packed_expert_tiling.misfit(x, w, summed),
                why=f"{_STREAMS}; integers on tensor cores, 4 bits in groups of 128"),
        _few(launch="portable.experts.grouped_gemm", rows=(0, 2), where=lambda w: w.group >= PLANE,
             tiling=expert_tiling.packed_pair_tiling),
        _grouped(launch="portable.experts.grouped_gemm", tiling=expert_tiling.packed_grouped_tiling),
    ),
})  # fmt: skip
