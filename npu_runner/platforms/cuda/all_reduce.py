"""All-reduce over the ranks of one host by our own kernel (all_reduce.cu), for messages of up to a few MiB.

NCCL sums what is larger, and everything where peers cannot map each other's memory. Knows no model.
"""

from __future__ import annotations

import ctypes
import logging
import math

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compiled_source import CompiledSource, LoadedKernel, NoKernel
from npu_runner.platforms.cuda.dependent_launch import is_dependent
from npu_runner.platforms.cuda.gpu import is_hopper
from npu_runner.platforms.cuda.peer_memory import NoPeerMemory, PeerMemory
from npu_runner.platforms.devices import AllReduce, Exchange

logger = logging.getLogger(__name__)

MOST_RANKS = 8
STAGING_BYTES = 32 << 20
"""Memory of a rank for what its peers store, whatever their number."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_EMPTY, _VECTOR_BYTES = 0xFFFFFFFF, 16
# The fastest of those tried with two ranks. All blocks of a call run at once, beside what precedes and follows it.
_THREADS, _BLOCKS, _BATCH = 512, 128, {2: 4, 3: 2, 4: 2}
_MOST_PIECES = 4
# One shot sends more bytes than two, and waits once less: about 1.5 us, in which NVLink carries these. That is
# computed: more than two GPUs have not been measured.
_BYTES_OF_A_WAIT = 600_000


class _Params(ctypes.Structure):
    _fields_ = (("staging", ctypes.c_void_p * MOST_RANKS), ("epochs", ctypes.c_void_p), ("x", ctypes.c_void_p),
                ("rank", ctypes.c_uint32), ("vectors", ctypes.c_uint32))


class _NormParams(ctypes.Structure):
    _fields_ = (("x", _Params), *((name, ctypes.c_void_p) for name in ("residual", "weight", "normed", "total")),
                ("row_vectors", ctypes.c_uint32), ("eps", ctypes.c_float))


class CustomAllReduce(AllReduce):
    """Made by all ranks together. Raises NoPeerMemory, on all of them.

    `most_one_shot`: the most bytes that are summed in one shot; None: by the number of ranks.
    """

    def __init__(self, rank: int, num_ranks: int, exchange: Exchange, *, most_one_shot: int | None = None):
        vectors = STAGING_BYTES // (2 * num_ranks * _BLOCKS * _VECTOR_BYTES)
        self._chunk = chunk = vectors // (2 * _THREADS) * 2 * _THREADS
        constants = {"RANKS": num_ranks, "MOST_RANKS": MOST_RANKS, "THREADS": _THREADS, "BLOCKS": _BLOCKS,
                     "CHUNK": chunk, "BATCH": _BATCH.get(num_ranks, 1), "MOST_PIECES": _MOST_PIECES}
        self._source = CompiledSource(["all_reduce.cu"], constants)
        memory = PeerMemory(rank, 2 * num_ranks * _BLOCKS * chunk * _VECTOR_BYTES, _EMPTY, exchange, self._load)
        self._num_ranks = num_ranks
        room = _BLOCKS * chunk * _VECTOR_BYTES
        if most_one_shot is None:
            most_one_shot = _most_one_shot(num_ranks)
        self._most_one_shot = min(room, most_one_shot)
        self.most_bytes = max(self._most_one_shot, num_ranks * room // 2)
        """Larger messages are left to NCCL."""
        self._epochs = torch.zeros(_BLOCKS, dtype=torch.int32, device="cuda")
        self._params = _Params((ctypes.c_void_p * MOST_RANKS)(*memory.addresses), self._epochs.data_ptr(), None, rank)

    def __call__(self, x: Tensor) -> bool:
        """In float32 and in rank order, rounded once."""
        if x.nbytes > self.most_bytes or not self._accepts(x):
            return False
        if x.nbytes:
            self._sum(x, x.nbytes // _VECTOR_BYTES)
        return True

    def _accepts(self, x: Tensor) -> bool:
        return (x.dtype in _DTYPES and x.is_contiguous() and x.nbytes % _VECTOR_BYTES == 0
                and x.storage_offset() * x.itemsize % _VECTOR_BYTES == 0)

    def _sum(self, x: Tensor, vectors: int) -> None:
        is_one_shot = vectors * _VECTOR_BYTES <= self._most_one_shot
        per_rank = vectors if is_one_shot else math.ceil(vectors / self._num_ranks)
        self._params.x, self._params.vectors = x.data_ptr(), vectors
        self._kernels[is_one_shot, x.dtype].launch(min(_BLOCKS, math.ceil(per_rank / _THREADS)), _THREADS,
                                                   [self._params], is_dependent=is_dependent())

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
                     ) -> tuple[Tensor, Tensor] | None:
        num_tokens, width = x_TD.shape
        row_vectors = width * x_TD.itemsize // _VECTOR_BYTES
        rounds = math.ceil(row_vectors / _THREADS)
        if (x_TD.nbytes > self._most_one_shot or width * x_TD.itemsize % _VECTOR_BYTES or rounds > _MOST_PIECES
                or math.ceil(num_tokens / _BLOCKS) * rounds * _THREADS > self._chunk
                or not all(each.dtype == x_TD.dtype and self._accepts(each) for each in (x_TD, residual_TD, weight_D))):
            return None
        normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        if num_tokens:
            self._params.x, self._params.vectors = x_TD.data_ptr(), num_tokens * row_vectors
            params = _NormParams(self._params, residual_TD.data_ptr(), weight_D.data_ptr(), normed_TD.data_ptr(),
                                 total_TD.data_ptr(), row_vectors, eps)
            self._norms[x_TD.dtype].launch(min(_BLOCKS, num_tokens), _THREADS, [params], is_dependent=is_dependent())
        return normed_TD, total_TD

    def _load(self) -> None:
        try:
            if not is_hopper():
                raise NoKernel("its kernels are compiled for Hopper")
            cubin = self._source.cubin()
            self._kernels = {(is_one_shot, dtype): LoadedKernel(cubin, f"{shots}_{name}", 0)
                             for is_one_shot, shots in ((True, "one_shot"), (False, "two_shots"))
                             for dtype, name in _DTYPES.items()}
            self._norms = {dtype: LoadedKernel(cubin, f"norm_{name}", 0) for dtype, name in _DTYPES.items()}
        except NoKernel as reason:
            raise RuntimeError(str(reason)) from reason


def _most_one_shot(num_ranks: int) -> int:
    """Two ranks send the same bytes either way."""
    if num_ranks == 2:
        return STAGING_BYTES
    return _BYTES_OF_A_WAIT * num_ranks // ((num_ranks - 1) * (num_ranks - 2))


def make_all_reduce(rank: int, num_ranks: int, exchange: Exchange) -> CustomAllReduce | None:
    """None, with the reason in the log, where NCCL sums everything."""
    if num_ranks > MOST_RANKS:
        reason = f"it has at most {MOST_RANKS} ranks"
    else:
        try:
            made = CustomAllReduce(rank, num_ranks, exchange)
        except NoPeerMemory as error:
            reason = str(error)
        else:
            if rank == 0:
                logger.info("all-reduce: custom up to %.1f MiB, then NCCL", made.most_bytes / 2**20)
            return made
    if rank == 0:
        logger.warning("all-reduce: NCCL, since the custom one does not run here: %s", reason)
    return None
