"""What each op declares about CUDA graphs: whether it exchanges, and what else in it no graph can hold.

An exchange can be captured where its process group's can (`spcompile.ops.wire.is_capturable`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from spcompile.ops import blockwise, gathering, kernels, masks, mixing, sharding, switching, ulysses


@dataclass(frozen=True)
class Declaration:
    """``exchanges(args)``: does the call wait for other ranks? ``hindrance(args)``: what no graph can hold, or None."""

    exchanges: Callable[[Sequence[Any]], bool] = lambda args: False
    hindrance: Callable[[Sequence[Any]], str | None] = lambda args: None


def _always(args: Sequence[Any]) -> bool:
    return True


def _kernel(args: Sequence[Any]) -> str | None:
    kernel = kernels.KERNELS[args[8]]
    return None if kernel.capturable else f"kernel {kernel.name} declares that it cannot be captured"


def _table(args: Sequence[Any]) -> str | None:
    return "it copies a table of tokens from the host"


LOCAL, EXCHANGE = Declaration(), Declaration(exchanges=_always)

DECLARED: dict[OpOverload, Declaration] = {
    sharding.shard._opoverload: LOCAL,
    sharding.unshard._opoverload: EXCHANGE,
    ulysses.ulysses_in._opoverload: EXCHANGE,
    ulysses.ulysses_out._opoverload: EXCHANGE,
    switching.switch._opoverload: EXCHANGE,
    gathering.kv_gather_start._opoverload: EXCHANGE,
    gathering.kv_gather._opoverload: EXCHANGE,
    blockwise.attention._opoverload: Declaration(exchanges=lambda args: args[9][0] > 1, hindrance=_kernel),
    masks.local_mask._opoverload: LOCAL,
    mixing.all_reduce._opoverload: EXCHANGE,
    mixing.cumsum._opoverload: EXCHANGE,
    mixing.halo._opoverload: EXCHANGE,
    mixing.pick._opoverload: Declaration(_always, _table),
    mixing.local_rows._opoverload: Declaration(hindrance=_table),
    mixing.fill_padding._opoverload: LOCAL,
}
"""Every op that has a program."""
