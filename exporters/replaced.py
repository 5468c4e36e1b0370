"""Replace a function for a while, for every holder of a reference to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced_code(function: Any, stand_in: Any) -> Iterator[None]:
    """Run ``stand_in`` wherever ``function`` is called, whoever holds a reference to it.

    Replacing the name in its module would miss ``from package import function`` in the user's file. ``stand_in`` must
    take the same parameters and import what it needs: it runs with the globals and defaults of ``function``.
    """
    code = function.__code__
    function.__code__ = stand_in.__code__
    try:
        yield
    finally:
        function.__code__ = code
