"""Exchanges that write into given memory: ``spcompile::<op>_into``, for whoever owns the result's address.

A CUDA graph reads the addresses it was recorded with. An exchange between two of them therefore must not return new
memory: it writes into a buffer that the next one reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from spcompile.ops import wire

Programs = Callable[..., wire.Program]


def into(op: CustomOpDef, program: Programs) -> tuple[CustomOpDef, Programs]:
    """The variant ``<op>_into(*arguments of op, out0, out1, ...)`` that returns nothing, and its program.

    Each ``out`` has the shape and dtype of the result in its place, any strides without overlap, and is none of the
    arguments' memory. Raises ``ValueError`` for another shape or dtype.
    """
    schema = op._opoverload._schema
    names = [f"out{i}" for i in range(len(schema.returns))]
    arguments = str(schema).partition("(")[2].rpartition(") ->")[0]
    places = ", ".join(f"Tensor(a{i}!) {name}" for i, name in enumerate(names))
    num_given = len(schema.arguments)
    writes_itself = "out" in inspect.signature(program).parameters

    def program_into(rank: int, *arguments: Any) -> wire.Program:
        """As the op's program, with ``out0, out1, ...`` after its arguments."""
        given, out = arguments[: num_given - 1], arguments[num_given - 1 :]
        result = yield from program(rank, *given, **({"out": out} if writes_itself else {}))
        for place, value in zip(out, _several(result), strict=True):
            if value.data_ptr() != place.data_ptr():
                _check(place, value)
                place.copy_(value)

    def run(*arguments: Any) -> None:
        given, group, out = arguments[: num_given - 1], arguments[num_given - 1], arguments[num_given:]
        wire.over_group(program_into(wire.rank_in(group), *given, *out), group, given[-1])

    def fake(*arguments: Any) -> None:
        results = op._opoverload(*arguments[:num_given])
        for place, value in zip(arguments[num_given:], _several(results), strict=True):
            _check(place, value)

    made = torch.library.custom_op(
        f"{op._qualname}_into", run, mutates_args=names, schema=f"({arguments}, {places}) -> ()"
    )
    made.register_fake(fake)
    return made, program_into


def _several(result: Any) -> Sequence[Tensor]:
    return result if isinstance(result, (tuple, list)) else (result,)


def _check(place: Tensor, value: Tensor) -> None:
    if place.shape != value.shape or place.dtype != value.dtype:
        raise ValueError(f"out is {list(place.shape)} {place.dtype}, and the result {list(value.shape)} {value.dtype}")
