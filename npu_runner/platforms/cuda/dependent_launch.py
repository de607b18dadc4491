"""Programmatic dependent launch: whether a kernel's programs may start while those of the kernel before still run.

They then wait at `after_earlier_kernels` or `wait_for_earlier_kernels`, and the gap of a launch is hidden behind the
kernel before. IS_WANTED is the one switch; it is off where no GPU has it (before sm_90), in Triton's interpreter, and
in what inductor compiles.

Why it is correct: each program of such a kernel calls one of the two before it reads or writes anything but weights.
The wait ends when the kernel before is complete and its writes are visible. That kernel had waited for its own
predecessor. So all earlier kernels of the stream are complete, and memory that they read may be written again. A kernel
launched as usual (cuBLAS, torch, a copy) waits for all before it, and a dependent kernel behind it waits for its end.
Weights are written by copies long before, never by a kernel of a step. A graph that is captured keeps these edges. What
only asks for lines to come into the L2 cache may come before the wait: whatever is written later is seen there. A
kernel that has waited before it calls `let_next_kernel_start` knows that all before it are complete when the next one
starts: that one may read at once what these wrote, but nothing that this one writes.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

IS_WANTED = True
_LEAST_CAPABILITY = (9, 0)


def is_dependent() -> bool:
    """Whether kernels are launched as dependent ones here and now."""
    return IS_WANTED and not torch.compiler.is_compiling() and _has_it()


def launch_settings() -> dict[str, Any]:
    """The launch arguments of a Triton kernel that calls `after_earlier_kernels`, beside its own."""
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_dependent() else {"IS_DEPENDENT": False}


@functools.cache
def _has_it() -> bool:
    is_interpreted = triton.knobs.runtime.interpret
    return not is_interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


@triton.jit
def after_earlier_kernels(IS_DEPENDENT: tl.constexpr):
    """Lets the next kernel start, and waits for the one before."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_earlier_kernels(IS_DEPENDENT):
    """Waits for the kernel before, and does not let the next one start early. If this kernel's programs fill the GPU
    more than once, waiting programs of the next would take the place of its later ones."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(IS_DEPENDENT):
    """For a kernel that has waited."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Prefetches one line of the L2 cache per pointer, without waiting."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32,
                              is_pure=False, pack=1)
