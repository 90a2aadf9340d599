"""A server that ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

__all__ = ["on_starting"]

_PR_SET_PDEATHSIG = 1


def on_starting(server: Any) -> None:
    """gunicorn's hook. Ends with the `quota` that started it, however that ends: the embedded database goes with it."""
    parent = os.environ.get("QUOTA_PARENT")
    if parent is None or sys.platform != "linux":
        return
    # No thread that watches: the workers are forked from this process.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:
        server.log.warning("process %s has gone already", parent)
        os.kill(os.getpid(), signal.SIGTERM)
