"""The custom ops of spcompile, namespace ``spcompile::``.

| op | what it does | collectives |
|---|---|---|
| `shard` | this rank's chunk of a replicated tensor | none |
| `unshard` | the whole tensor from all chunks | 1 all-gather |
| `ulysses_in` | tokens sharded -> heads sharded, Q, K and V together | 1 all-to-all |
| `ulysses_out` | heads sharded -> tokens sharded | 1 all-to-all |

Each op's program (what one rank packs, sends and unpacks) is in `PROGRAMS`; `reference` has the oracles.
"""

from __future__ import annotations

from collections.abc import Callable

from spcompile.ops import chunks, reference, sharding, ulysses, wire
from spcompile.ops.sharding import shard, unshard
from spcompile.ops.ulysses import ulysses_in, ulysses_out
from torch._ops import OpOverload

PROGRAMS: dict[OpOverload, Callable[..., wire.Program]] = {
    shard._opoverload: sharding.shard_program,
    unshard._opoverload: sharding.unshard_program,
    ulysses_in._opoverload: ulysses.in_program,
    ulysses_out._opoverload: ulysses.out_program,
}
"""Op -> its program ``(rank, *op arguments without the group)``."""

__all__ = ["PROGRAMS", "chunks", "reference", "shard", "ulysses_in", "ulysses_out", "unshard", "wire"]
