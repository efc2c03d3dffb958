"""The custom ops of spcompile, namespace ``spcompile::``.

| op | what it does | collectives |
|---|---|---|
| `shard` | this rank's chunk of a replicated tensor | none |
| `unshard` | the whole tensor from all chunks | 1 all-gather |
| `ulysses_in` | tokens sharded -> heads sharded, Q, K and V together | 1 all-to-all |
| `ulysses_out` | heads sharded -> tokens sharded | 1 all-to-all |
| `switch` | sharded along one dim -> sharded along another | 1 all-to-all |
| `kv_gather_start`, `kv_gather` | the keys and values of all ranks, both together | 1 all-gather |
| `attention` | a named kernel, causal blocks, the ring | ring - 1 sends |
| `all_reduce` | a sum, or the largest or smallest entry, over all ranks | 1 all-reduce or all-gather |
| `cumsum` | the running sum along a cut dim | 1 all-gather of a row |
| `halo` | a chunk and the neighbours' nearest rows | 1 send to each neighbour |
| `pick` | tokens by index, on every rank | 1 all-reduce |
| `local_rows` | places of tokens in this rank's chunk | none |
| `fill_padding` | a chunk with a value in place of its padding | none |
| `local_mask` | this rank's heads and rows of a mask | none |
| `<op>_into` | an exchange that writes into given memory | as the op |
| `attention_call` | one form for recognised calls, in captured graphs only | none |

Each op's program (what one rank packs, sends and unpacks) is in `PROGRAMS`; `reference` has the oracles. Ops that
exchange have a variant ``<op>_into`` that writes into given memory (`INTO`), and every op declares what a CUDA graph
can hold of it (`DECLARED`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

from spcompile.ops import (
    blockwise,
    chunks,
    gathering,
    kernels,
    masks,
    mixing,
    reference,
    sharding,
    switching,
    ulysses,
    wire,
)
from spcompile.ops import mesh as meshes
from spcompile.ops.blockwise import attention
from spcompile.ops.calls import attention_call
from spcompile.ops.capturing import DECLARED
from spcompile.ops.gathering import kv_gather, kv_gather_start
from spcompile.ops.into import into
from spcompile.ops.masks import local_mask
from spcompile.ops.mixing import all_reduce, cumsum, fill_padding, halo, local_rows, pick
from spcompile.ops.sharding import shard, unshard
from spcompile.ops.switching import switch
from spcompile.ops.ulysses import ulysses_in, ulysses_out

PROGRAMS: dict[OpOverload, Callable[..., wire.Program]] = {
    shard._opoverload: sharding.shard_program,
    unshard._opoverload: sharding.unshard_program,
    ulysses_in._opoverload: ulysses.in_program,
    ulysses_out._opoverload: ulysses.out_program,
    switch._opoverload: switching.program,
    kv_gather_start._opoverload: gathering.start_program,
    kv_gather._opoverload: gathering.program,
    attention._opoverload: blockwise.program,
    local_mask._opoverload: masks.program,
    all_reduce._opoverload: mixing.all_reduce_program,
    cumsum._opoverload: mixing.cumsum_program,
    halo._opoverload: mixing.halo_program,
    pick._opoverload: mixing.pick_program,
    local_rows._opoverload: mixing.local_rows_program,
    fill_padding._opoverload: mixing.fill_padding_program,
}
"""Op -> its program ``(rank, *op arguments without the group)``; the mesh is the last of them."""

_VARIANTS = {
    op._opoverload: into(op, PROGRAMS[op._opoverload])
    for op in (unshard, ulysses_in, ulysses_out, switch, kv_gather, attention, all_reduce, cumsum, halo, pick)
}
INTO: dict[OpOverload, OpOverload] = {op: variant._opoverload for op, (variant, _) in _VARIANTS.items()}
"""Op -> its variant ``(*op arguments, out0, ...)`` that writes its results there and returns nothing."""

PROGRAMS_INTO: dict[OpOverload, Callable[..., wire.Program]] = {
    variant._opoverload: program for variant, program in _VARIANTS.values()
}
"""Variant -> its program ``(rank, *op arguments without the group, out0, ...)``."""

__all__ = [
    "DECLARED",
    "INTO",
    "PROGRAMS",
    "PROGRAMS_INTO",
    "all_reduce",
    "attention",
    "attention_call",
    "chunks",
    "cumsum",
    "fill_padding",
    "halo",
    "kernels",
    "kv_gather",
    "kv_gather_start",
    "local_mask",
    "local_rows",
    "meshes",
    "pick",
    "reference",
    "shard",
    "switch",
    "ulysses_in",
    "ulysses_out",
    "unshard",
    "wire",
]
