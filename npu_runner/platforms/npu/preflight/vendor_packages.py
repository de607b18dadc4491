"""Operator packages of vendors: torch_npu prefers a function of their libraries to that of CANN. Loads no library.

A package may give a function of CANN's name another meaning, as vllm-ascend's does to the rule of Gated DeltaNet.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from npu_runner.platforms.host import Check

_ELF_64, _DYNAMIC_SYMBOLS, _UNDEFINED = b"\x7fELF\x02", 11, 0  # the first bytes, a sh_type, a st_shndx
_NAMES = """
    Abs Add Addcmul Addmm AddRmsNorm AddRmsNormDynamicQuant AddRmsNormQuant Adds All Amax ApplyRotaryPosEmb Arange
    ArgMax AscendQuant Baddbmm BatchMatMul BitwiseAndTensor BitwiseOrTensor Cat Clamp ConstantPadNd Copy Cos Cumsum
    DequantSwigluQuant Div Divs DynamicQuant Embedding EqScalar EqTensor Exp Eye FillScalar FlashAttentionVarLenScore
    Flip Floor FloorDivides FusedInferAttentionScore Gather Gelu GeScalar GeTensor GroupedMatmul
    GroupedMatmulSwigluQuantWeightNz GroupedMatmulWeightNz GtScalar GtTensor IndexCopy IndexFill IndexSelect LayerNorm
    LeScalar LeTensor LogSumExp LtScalar LtTensor MaskedFillScalar Matmul Max MaxDim Mean Minimum MoeGatingTopKSoftmax
    MoeInitRouting MoeTokenUnpermute Mul Muls Neg NeScalar NeTensor One PowTensorScalar QuantMatmul QuantMatmulWeightNz
    Reciprocal RecurrentGatedDeltaRule ReduceSum Relu Repeat RepeatInterleaveIntWithDim RmsNorm
    RotaryPositionEmbedding Rsqrt Rsubs ScatterAdd ScatterNdUpdate ScatterPaKvCache Sigmoid Silu Sin Softmax Softplus
    Sort Sqrt Stack Std Sub Subs SWhere SwiGlu Tanh Topk Tril WeightQuantBatchMatmul Zero
"""


def is_called(function: str) -> bool:
    """Whether this or another version of it is called here. The tests compare with the launches of the emulation."""
    name = re.fullmatch(r"aclnn(?:Inplace)?(\w+?)(?:V\d+)?", function)
    return name is not None and name[1] in _NAMES.split()


def check_vendor_packages(environment: Mapping[str, str]) -> Check:
    """Whether a vendor's package has another kernel for something that is called here."""
    name = "operator packages"
    ours = {library.parents[2]: sorted(filter(is_called, exported_functions(library)))
            for library in vendor_libraries(environment)}
    found = "; ".join(f"{folder} has {', '.join(names) or 'no function that is called here'}"
                      for folder, names in ours.items())
    if not any(ours.values()):
        return Check(name, "ok", found or "none beside CANN's")
    return Check(name, "warning", f"{found}: torch_npu prefers them to CANN's", "npu-runner doctor --operators compares"
                 " them with the CPU; to go without, unset ASCEND_CUSTOM_OPP_PATH, or take the package out of "
                 "load_priority in $ASCEND_OPP_PATH/vendors/config.ini")


def vendor_libraries(environment: Mapping[str, str]) -> list[Path]:
    """Their libraries, in the order in which torch_npu searches them."""
    folders = [Path(folder) for folder in environment.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if folder]
    vendors = Path(environment.get("ASCEND_OPP_PATH", "/nowhere")) / "vendors"
    with contextlib.suppress(OSError):
        named = re.findall(r"^\s*load_priority\s*=(.*)", (vendors / "config.ini").read_text(errors="replace"), re.M)
        folders += [vendors / name.strip() for names in named for name in names.split(",") if name.strip()]
    libraries = dict.fromkeys(folder / "op_api/lib/libcust_opapi.so" for folder in folders)
    return [library for library in libraries if library.is_file()]


def exported_functions(library: Path) -> set[str]:
    """The names that a shared library defines for others; none where it is no ELF of 64 bits."""
    found: set[str] = set()
    with contextlib.suppress(OSError, struct.error, ValueError, IndexError):
        data = library.read_bytes()
        (table,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
        sections = [struct.unpack_from("<IIQQQQI", data, table + size * index)
                    for index in range(count) if data.startswith(_ELF_64)]
        for _, _, _, _, start, length, strings in (each for each in sections if each[1] == _DYNAMIC_SYMBOLS):
            for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", data[start:start + length]):
                begin = sections[strings][4] + name
                found |= {data[begin:data.index(0, begin)].decode()} if section != _UNDEFINED else set()
    return found
