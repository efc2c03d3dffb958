"""What spcompile raises: at compile time, before any rank has computed anything, or when ranks first compare values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.exc import ShortenTraceback


class SPError(Exception):
    """Base of everything spcompile refuses. The text says where, what was found, why, and what would work."""


class SPConfigError(SPError, ValueError):
    """The degrees, the mesh or an option cannot be right, whatever the model."""


class UnsupportedGraphError(SPError, RuntimeError):
    """The model's graph cannot be computed exactly with the degrees asked for."""


class RankMismatchError(SPError, RuntimeError):
    """The ranks do not hold the same graph, so their collectives would not match."""


class VerificationError(SPError, RuntimeError):
    """With ``verify="first"``: what the ranks computed is not what the unsharded graph gives."""


class ClosedError(SPError, RuntimeError):
    """A model was called whose backend is closed."""


CLOSED = (
    "the backend of this compiled model was closed, and what it ran with is gone: make another with "
    "spcompile.backend() and compile the model again"
)


class RegatherWarning(UserWarning):
    """An op needs all tokens on every rank: an all-gather that costs speed, once per graph."""


class RecompileLimitWarning(UserWarning):
    """Dynamo is about to give up compiling; what follows runs unsharded on every rank."""


class RecordingLimitWarning(UserWarning):
    """CUDA graphs were recorded as often as they may be; what follows runs without them."""


@contextmanager
def through_dynamo() -> Iterator[None]:
    """Let an `SPError` leave torch.compile as it is; Dynamo wraps all others in ``BackendCompilerFailed``."""
    try:
        yield
    except SPError as error:
        if isinstance(error, ShortenTraceback):
            raise
        kind = type(error)
        members = {"__module__": kind.__module__, "__init__": Exception.__init__, "first_useful_frame": None}
        raise type(kind.__name__, (kind, ShortenTraceback), members)(str(error)) from error.__cause__
