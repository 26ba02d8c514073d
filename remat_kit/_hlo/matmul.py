"""The matrix work of one instruction: dots, cuBLAS and cuDNN calls, with the unit of the chip that does it."""

from dataclasses import dataclass
from typing import Any

from remat_kit._hlo.module import Instruction, Shape


@dataclass(frozen=True, slots=True)
class Matmul:
    """One matrix product, convolution or fused attention.

    Attributes:
      flops: multiplications and additions that the result needs, 2·M·N·K for a product.
      peak: the operand type that decides the rate, a key of `Chip.flops_per_s`: "bf16", "f16", "tf32", "f32", "f64",
        "f8", "s8".
      passes: how often the matrix unit runs over it; more than 1 where an algorithm splits f32 into parts.
    """

    flops: int
    peak: str
    passes: int = 1


# XLA's PrecisionConfig.Algorithm -> operand type and passes (the X3, X6 and X9 of the name).
_ALGORITHMS = {
    1: ("f8", 1), 2: ("f8", 1), 3: ("f16", 1), 4: ("f16", 1), 5: ("bf16", 1), 6: ("bf16", 1), 7: ("bf16", 3),
    8: ("bf16", 6), 9: ("tf32", 1), 10: ("tf32", 3), 11: ("f32", 1), 12: ("f64", 1), 13: ("bf16", 9),
}  # fmt: skip
_ALGORITHM_NAMES = {
    "ALG_DOT_ANY_F8_ANY_F8_F32": 1, "ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM": 2, "ALG_DOT_F16_F16_F16": 3,
    "ALG_DOT_F16_F16_F32": 4, "ALG_DOT_BF16_BF16_BF16": 5, "ALG_DOT_BF16_BF16_F32": 6,
    "ALG_DOT_BF16_BF16_F32_X3": 7, "ALG_DOT_BF16_BF16_F32_X6": 8, "ALG_DOT_TF32_TF32_F32": 9,
    "ALG_DOT_TF32_TF32_F32_X3": 10, "ALG_DOT_F32_F32_F32": 11, "ALG_DOT_F64_F64_F64": 12,
    "ALG_DOT_BF16_BF16_F32_X9": 13,
}  # fmt: skip
_PRECISIONS = {"DEFAULT": 0, "HIGH": 1, "HIGHEST": 2}
_WIDTH = {"f64": 6, "f32": 5, "tf32": 4, "bf16": 3, "f16": 3, "f8": 2, "s8": 1}


def matmul_of(instruction: Instruction) -> Matmul | None:
    """The matrix work that `instruction` itself does, None when it does none. What a fusion calls is not looked at.

    Counted:
      dot, `__cublas$gemm`, `__cublas$lt$matmul...`: 2 · size of the result · contracted size.
      convolution, `__cudnn$conv...`: 2 · size of the forward result · size of the filter over its output features.
        All three of forward, input gradient and filter gradient cost that; taps that fall on the padding count.
      `__cudnn$fmha...`: two products forward and five backward (scores again, dV, dP, dQ, dK), over the pairs of
        positions that the mask leaves. cuDNN skips whole tiles that are masked, so a causal mask about halves the
        work; the kernel does up to one tile a row more than what is counted here.

    f32 operands: XLA:GPU gives them to the TF32 units unless the precision asks for more. cuBLAS does so for DEFAULT
    and HIGH, Triton for DEFAULT only; jax.numpy's default is DEFAULT. An explicit algorithm wins over the precision.
    Complex products are counted as four real ones.
    """
    opcode, target = instruction.opcode, instruction.custom_call_target
    if opcode == "dot":
        numbers = instruction.proto.dot_dimension_numbers
        precision = instruction.proto.precision_config
        return _product(
            instruction, instruction.shape.size, numbers.lhs_contracting_dimensions, precision.operand_precision,
            precision.algorithm, highest_tf32=0,
        )  # fmt: skip
    if opcode == "convolution":
        return _convolution(instruction, "")
    if opcode != "custom-call":
        return None
    if target.startswith("__cublas$"):
        config = _object(instruction.config().get("gemm_backend_config"))
        numbers = _object(config.get("dot_dimension_numbers"))
        precision = _object(config.get("precision_config"))
        asked = precision.get("operand_precision")
        wanted = [_PRECISIONS.get(str(each), 0) for each in asked] if isinstance(asked, list) else []
        algorithm = _ALGORITHM_NAMES.get(str(precision.get("algorithm")), 0)
        result = next((leaf for _, leaf in instruction.shape.leaves()), instruction.shape)
        contracting = _ints(numbers.get("lhs_contracting_dimensions"))
        return _product(instruction, result.size, contracting, wanted, algorithm, highest_tf32=1)
    if target.startswith("__cudnn$conv"):
        return _convolution(instruction, target)
    if target.startswith("__cudnn$fmha"):
        return _attention(instruction, backward="Backward" in target)
    return None


def _product(
    instruction: Instruction, result: int, contracting: Any, precision: Any, algorithm: int, highest_tf32: int
) -> Matmul | None:
    if len(instruction.operands) < 2:
        return None
    left, right = instruction.operands[0].shape, instruction.operands[1].shape
    depth = 1
    for dimension in dict.fromkeys(contracting):
        depth *= left.dims[dimension] if 0 <= dimension < len(left.dims) else 1
    flops = 2 * result * depth * (4 if left.dtype in ("c64", "c128") else 1)
    peak, passes = _peak(left, right, max(precision, default=0) <= highest_tf32)
    if algorithm in _ALGORITHMS:
        peak, passes = _ALGORITHMS[algorithm]
    return Matmul(flops, peak, passes)


def _peak(left: Shape, right: Shape, tf32: bool) -> tuple[str, int]:
    """The wider operand's type, as a key of `Chip.flops_per_s`."""
    kinds = []
    for dtype in (left.dtype, right.dtype):
        if dtype in ("f64", "c128"):
            kinds.append("f64")
        elif dtype in ("f32", "c64"):
            kinds.append("tf32" if tf32 else "f32")
        elif dtype in ("bf16", "f16"):
            kinds.append(dtype)
        elif dtype.startswith(("f8", "f4")):
            kinds.append("f8")
        else:
            kinds.append("s8" if dtype in ("s8", "u8", "s4", "u4") else "f32")
    return max(kinds, key=lambda kind: _WIDTH[kind]), 1


def _convolution(instruction: Instruction, target: str) -> Matmul | None:
    if len(instruction.operands) < 2:
        return None
    result = next((leaf for _, leaf in instruction.shape.leaves()), instruction.shape)
    first, second = instruction.operands[0].shape, instruction.operands[1].shape
    forward_result, filters = result, second
    if "BackwardInput" in target:
        forward_result = first
    elif "BackwardFilter" in target:
        forward_result, filters = second, result
    features = instruction.proto.convolution_dimension_numbers.kernel_output_feature_dimension
    if not 0 <= features < len(filters.dims) or not filters.size:
        return None
    flops = 2 * forward_result.size * (filters.size // filters.dims[features])
    peak, passes = _peak(first, second, max(instruction.proto.precision_config.operand_precision, default=0) <= 1)
    return Matmul(flops, peak, passes)


def _attention(instruction: Instruction, backward: bool) -> Matmul | None:
    config = _object(instruction.config().get("cudnn_fmha_backend_config"))
    scores = _ints(_object(config.get("intermediate_tensor_shape")).get("dimensions"))
    if len(scores) != 4 or min(scores) <= 0 or len(instruction.operands) < 3:
        return None
    batch, heads, queries, keys = scores
    query, key, value = (operand.shape for operand in instruction.operands[:3])
    width = query.size // (batch * heads * queries)
    value_width = width * value.size // max(1, key.size)
    causal = "CAUSAL" in str(config.get("mask_type"))
    window = next(iter(_ints([config.get("sliding_window_length", 0)])), 0)
    pairs = batch * heads * _pairs(queries, keys, causal, window)
    products = 3 * width + 2 * value_width if backward else width + value_width
    return Matmul(2 * pairs * products, _peak(query, key, True)[0])


def _pairs(queries: int, keys: int, causal: bool, window: int) -> int:
    """How many (query, key) pairs the mask leaves: query i sees keys up to i, and only the last `window` of them."""
    if not causal:
        return queries * keys
    reach = min(keys, window) if window > 0 else keys
    short = min(queries, reach)
    return short * (short + 1) // 2 + (queries - short) * reach


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ints(values: Any) -> list[int]:
    """Integers that JSON holds as text; [] when one of them is none, or more than XLA's 64 bits."""
    try:
        numbers = [int(value) for value in values or ()]
    except (TypeError, ValueError, OverflowError):
        return []
    return numbers if all(abs(number) < 2**63 for number in numbers) else []
