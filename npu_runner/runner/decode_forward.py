"""The forward of a decode step, from slots to logits: what decode graphs record.

B sequences in the step, D hidden size, S slots, padding's included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from npu_runner.models.contract import LanguageModel
from npu_runner.platforms.gated_delta import GatedDeltaBackend, RingedGatedDelta
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs
from npu_runner.runner.states import StatePool


class DecodeStep(nn.Module):
    """Slots to logits of the tokens in them. A module, so that graph caches find the parameters by name. `states` keep
    the final hidden states of the tokens where a head reads them; `gated_delta` writes these. `num_appended`: numbers
    that the model appends to each final hidden state (`ModelConfig.hidden_state_layers`)."""

    def __init__(self, model: LanguageModel, states: StatePool | None, gated_delta: GatedDeltaBackend | None,
                 num_appended: int = 0):
        super().__init__()
        self.num_appended = num_appended
        self.model = model
        self.states = states
        self.gated_delta = gated_delta

    def forward(self, inputs: StepInputs, plan: Any = None, state_plan: Any = None) -> Tensor:
        """Logits (B, vocabulary), with what the model appends behind them. `plan` is what the attention backend
        prepared for an eager step, `state_plan` the Gated DeltaNet backend for one with drafts."""
        metadata = AttentionMetadata.from_inputs(inputs, plan, is_prefill=False, state_plan=state_plan)
        input_ids_B = inputs.tokens.index_select(0, inputs.token_slots)
        hidden_BD = self.model(self.model.embed(input_ids_B), inputs.positions, metadata)
        if self.states is not None and self.states.hidden_SD is not None and self.gated_delta is not None:
            self.gated_delta.write(self.states.hidden_SD, inputs.state_slots.long(), hidden_BD)
        if not self.num_appended:
            return self.model.compute_logits(hidden_BD)
        # One tensor, as graphs return it.
        appended_BX = hidden_BD[:, -self.num_appended :]
        return torch.cat([self.model.compute_logits(hidden_BD[:, : -self.num_appended].contiguous()), appended_BX],
                         dim=1)


class TogetherStep(nn.Module):
    """Another step, as the graph of inputs with `sequences`."""

    def __init__(self, step: DecodeStep):
        super().__init__()
        self.step = step

    def forward(self, inputs: StepInputs, plan: Any = None) -> Any:
        return self.step(inputs, plan)


class DraftedDecodeStep(DecodeStep):
    """A step of a model with states, whose plan for these is part of it: a row is a token, and several may follow one
    another in a sequence."""

    def forward(self, inputs: StepInputs, plan: Any = None, state_plan: Any = None) -> Tensor:
        assert self.gated_delta is not None, "made with it"
        rings = self.states.rings if self.states is not None else None
        if rings is None:
            state_plan = self.gated_delta.plan_drafts(inputs.runs, None)
        else:
            assert isinstance(self.gated_delta, RingedGatedDelta), "no other has rings"
            state_plan = self.gated_delta.plan_drafts_in_ring(inputs, rings)
        return super().forward(inputs, plan, state_plan)
