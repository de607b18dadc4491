"""NVIDIA GPUs: where speed is measured until an Ascend host is at hand."""

FP8_PROMPT_ROOM = 2
"""See AttentionFacts.fp8_prompt_room."""

Capability = tuple[int, int]
"""A GPU's compute capability: (8, 0) is Ampere, (7, 5) Turing."""


def too_old(what: str, since: Capability, capability: Capability) -> str | None:
    """Why a GPU of this compute capability cannot do `what`; None: it can."""
    wanted, found = (".".join(map(str, numbers)) for numbers in (since, capability))
    return f"{what} needs a GPU of compute capability {wanted}, this one has {found}" if capability < since else None
