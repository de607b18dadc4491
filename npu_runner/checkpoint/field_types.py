"""Types of the fields in config files of quantised weights and adapters. They are checked once, when a file is read.
Knows no meaning: a value of the right type may still be refused later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npu_runner.errors import ModelError
from npu_runner.request.limits import shown

_Checked = TypeVar("_Checked", bound="Fields")
GroupSize = Annotated[int, Field(ge=-1)]


class Fields(BaseModel):
    """Fields of a JSON object: 4.0 and "4" are no whole numbers, 1 is no truth value. Others are left alone."""

    model_config = ConfigDict(strict=True)


def checked(kind: type[_Checked], values: Mapping[str, Any], where: str) -> _Checked:
    """The fields of `kind` that `values` has. Raises ModelError that names `where` and the first field at fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in fault["loc"])
        raise ModelError(f"{where}: {name} {shown(fault['input'])}: {fault['msg']}; compare it with the original file"
                         ) from error


class FP8Fields(Fields):
    fmt: str | None = None
    weight_block_size: list[int] | None = None


class AWQFields(Fields):
    version: str | None = None
    bits: int = 4
    w_bit: int = 4
    zero_point: bool = True
    group_size: GroupSize = 128
    q_group_size: GroupSize = 128


class GPTQChanges(Fields):
    """Settings of the modules that match a pattern of `dynamic`."""

    bits: int = 4
    group_size: GroupSize = -1
    desc_act: bool | None = None


class GPTQFields(GPTQChanges):
    checkpoint_format: str | None = None
    is_marlin_format: bool | None = None
    dynamic: dict[str, GPTQChanges] | None = None


class NumbersFields(Fields):
    """The rounding of weights or inputs in compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: GroupSize | None = None
    symmetric: bool = True
    dynamic: bool | str | None = False
    actorder: bool | str | None = None
    block_structure: str | list[int] | None = None


class GroupFields(Fields):
    targets: list[str] | None = None
    weights: NumbersFields | None = None
    input_activations: NumbersFields | None = None
    format: str | None = None


class CompressedTensorsFields(Fields):
    format: str | None = None
    quantization_status: str | None = None
    ignore: list[str] | None = None
    config_groups: dict[str, GroupFields | list[str]] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class ModelSlimFields(Fields):
    group_size: int | None = None
