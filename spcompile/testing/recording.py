"""A stand-in for CUDA graphs on CPUs: it makes a call again on the memory it was recorded with.

What breaks under CUDA graphs breaks here too: a piece whose operand lies elsewhere in the next step reads what is
still at the old address, and a result in new memory is never filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from spcompile.cudagraphs import Engine


class Records(Protocol):
    """A `spcompile.Backend`."""

    engine: Engine


class OnCPU:
    """An engine for `spcompile.cudagraphs` whose recordings compute on CPUs.

    ``num_replays`` counts what was replayed.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, run: Callable[..., Any], args: Sequence[Tensor]) -> OnCPU._Recording:
        """As CUDA's: nothing is computed before the first replay."""
        return self._Recording(self, run, [x.detach() for x in args])  # at that address, whatever becomes of x

    class _Recording:
        def __init__(self, engine: OnCPU, run: Callable[..., Any], args: list[Tensor]) -> None:
            self.engine, self.run, self.args = engine, run, args

        def replay(self) -> None:
            self.engine.num_replays += 1
            self.run(*self.args)

        def release(self) -> None:
            self.args = []


def record_on_cpu(backend: Records) -> OnCPU:
    """Let ``backend``, made with ``cudagraphs="piecewise"``, record on CPUs. Returns the engine it then uses.

    Example::

        backend = spcompile.backend(sp=2, cudagraphs="piecewise")
        spcompile.testing.record_on_cpu(backend)
        compiled = torch.compile(model, backend=backend)
    """
    engine = OnCPU()
    backend.engine = engine
    return engine
