"""Sequence parallelism for diffusion transformers, as a torch.compile backend.

`backend` makes the object for ``torch.compile``; its ``report()`` says what was done. `spcompile.testing`
simulates any number of ranks in one process; `spcompile.ops` are the custom ops.
"""

from spcompile.backend import Backend, backend
from spcompile.errors import (
    ClosedError,
    RankMismatchError,
    RecompileLimitWarning,
    RecordingLimitWarning,
    RegatherWarning,
    SPConfigError,
    SPError,
    UnshardedWarning,
    UnsupportedGraphError,
    VerificationError,
)
from spcompile.kernels import register_kernel
from spcompile.ops.kernels import AttentionKernel, Kernel
from spcompile.recognise import AttentionCall, register_attention
from spcompile.report import AttentionEntry, PieceEntry, ReductionEntry, RegatherEntry, Report, SplitEntry

__all__ = [
    "AttentionCall",
    "AttentionEntry",
    "AttentionKernel",
    "Backend",
    "ClosedError",
    "Kernel",
    "PieceEntry",
    "RankMismatchError",
    "RecompileLimitWarning",
    "RecordingLimitWarning",
    "ReductionEntry",
    "RegatherEntry",
    "RegatherWarning",
    "Report",
    "SPConfigError",
    "SPError",
    "SplitEntry",
    "UnshardedWarning",
    "UnsupportedGraphError",
    "VerificationError",
    "backend",
    "register_attention",
    "register_kernel",
]
