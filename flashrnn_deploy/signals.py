"""The signals that end a program from outside, of those that this system has."""

from __future__ import annotations

import signal

ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Job control and a closed terminal; nohup ignores the second."""
