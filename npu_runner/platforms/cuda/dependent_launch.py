"""Programmatic dependent launch: whether a kernel's programs may start while those of the kernel before still run.

They then wait at `after_earlier_kernels` or `wait_for_earlier_kernels`, and the gap of a launch is hidden behind the
kernel before. IS_WANTED is the one switch; it is off where no GPU has it (before sm_90), in Triton's interpreter, and
in what inductor compiles.

What makes it right: a kernel that is launched so calls one of the two in each of its programs, before it reads or
writes anything but weights. The wait ends when the kernel before is complete and its writes are seen; that one had
waited for its own predecessor, so all earlier kernels of the stream are complete, too, and memory they read may be
written again. A kernel launched as usual (cuBLAS, torch, a copy) waits for all before it, and one launched so behind it
waits for its end, as it says nothing earlier. Weights are written by copies long before, never by a kernel of a step.
A graph that is captured keeps these edges.
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


def launch_settings() -> dict[str, Any]:
    """What a kernel that calls `after_earlier_kernels` is launched with, beside its own."""
    if not IS_WANTED or torch.compiler.is_compiling() or not _has_it():
        return {"IS_DEPENDENT": False}
    return {"IS_DEPENDENT": True, "launch_pdl": True}


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
    """Waits for the one before, and keeps the next from starting before this one has ended: where one kernel's programs
    fill the GPU more than once, its later ones would find their places taken by programs that wait."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
