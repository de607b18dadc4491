"""Operator packages of vendors: torch_npu takes a function of their libraries before that of CANN. Loads no library.

A package may give a function of CANN's name another meaning (vllm-ascend's rule of Gated DeltaNet does), so answers may
differ on a host whose versions are right. Imports no torch.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from npu_runner.platforms.host import Check

_LIBRARY = "op_api/lib/libcust_opapi.so"
_ELF_64, _DYNAMIC_SYMBOLS, _UNDEFINED = b"\x7fELF\x02", 11, 0  # the first bytes, a sh_type, a st_shndx
_VERSION = re.compile(r"V\d+$")
_NAMES = """
    Abs Add AddRmsNorm AddRmsNormDynamicQuant AddRmsNormQuant Addcmul Addmm Adds ApplyRotaryPosEmb Arange ArgMax
    AscendQuant Baddbmm BatchMatMul BitwiseOrTensor Cat Clamp ConstantPadNd Cumsum DequantSwigluQuant Divs
    DynamicQuant Embedding Exp Eye FlashAttentionVarLenScore FloorDivides FusedInferAttentionScore Gather GeTensor
    Gelu GroupedMatmul GroupedMatmulSwigluQuantWeightNz GroupedMatmulWeightNz IndexSelect InplaceAdd InplaceAddcmul
    InplaceCopy InplaceExp InplaceFillScalar InplaceIndexFill InplaceMaskedFillScalar InplaceMul InplaceOne
    InplaceTril InplaceZero LayerNorm LtTensor Matmul MoeGatingTopKSoftmax MoeInitRouting MoeTokenUnpermute Mul Muls
    Neg PowTensorScalar QuantMatmul QuantMatmulWeightNz Reciprocal RecurrentGatedDeltaRule ReduceSum Repeat RmsNorm
    RotaryPositionEmbedding Rsqrt SWhere ScatterAdd ScatterNdUpdate ScatterPaKvCache Sigmoid Silu Softmax Softplus
    Sort Sub Subs SwiGlu Topk Tril WeightQuantBatchMatmul
"""
CALLED = frozenset(f"aclnn{name}" for name in _NAMES.split())
"""Functions that operators of ours and of torch call here, without their version, of which each wheel has its own. The
tests compare them with the launches that the emulated CANN counts."""


def check_vendor_packages(environment: Mapping[str, str]) -> Check:
    """Whether a vendor's package has another kernel for something that is called here."""
    name, folders = "operator packages", vendor_folders(environment)
    if not folders:
        return Check(name, "ok", "none beside CANN's")
    ours = {folder: sorted(each for each in exported_functions(folder / _LIBRARY) if _VERSION.sub("", each) in CALLED)
            for folder in folders}
    found = "; ".join(f"{folder} has {', '.join(names) or 'no function that is called here'}"
                      for folder, names in ours.items())
    if not any(ours.values()):
        return Check(name, "ok", found)
    return Check(name, "warning", f"{found}: torch_npu prefers them to CANN's", "npu-runner doctor --operators compares"
                 " them with the CPU; to go without, unset ASCEND_CUSTOM_OPP_PATH, or take the package out of "
                 "load_priority in $ASCEND_OPP_PATH/vendors/config.ini")


def vendor_folders(environment: Mapping[str, str]) -> list[Path]:
    """The packages that exist, in the order in which torch_npu searches them."""
    folders = [Path(folder) for folder in environment.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if folder]
    if environment.get("ASCEND_OPP_PATH"):
        vendors = Path(environment["ASCEND_OPP_PATH"]) / "vendors"
        settings = vendors / "config.ini"
        for line in settings.read_text(errors="replace").splitlines() if settings.is_file() else ():
            key, _, names = line.partition("=")
            if key.strip() == "load_priority":
                folders += [vendors / each.strip() for each in names.split(",") if each.strip()]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def installed_packages(environment: Mapping[str, str]) -> list[tuple[str, int]]:
    """The packages in the order of the search, with the time of their installation."""
    libraries = {folder: folder / _LIBRARY for folder in vendor_folders(environment)}
    return [(str(folder), (library if library.exists() else folder).stat().st_mtime_ns)
            for folder, library in libraries.items()]


def exported_functions(library: Path) -> set[str]:
    """The names that a shared library defines for others; none where the file is missing or no ELF of 64 bits."""
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
