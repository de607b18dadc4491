"""Ascend NPUs through torch_npu, HCCL and torchair: what the project exists for."""
