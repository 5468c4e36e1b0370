"""The TensorRT headers that a plugin is compiled against: of which release they are, and which plugin that means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flashrnn_deploy.errors import FlashRNNError

CURE = "libnvinfer-headers-dev of the release, or the include/ folder of its branch in NVIDIA's TensorRT repository"
_PARTS = ("MAJOR", "MINOR")


@dataclass(frozen=True)
class Headers:
    """``folder`` holds NvInferRuntime.h of TensorRT ``version`` (major.minor); of TensorRT for RTX where ``rtx``."""

    folder: Path
    version: str
    rtx: bool

    @property
    def is_version_8(self) -> bool:
        """Whether the plugin is an IPluginV2DynamicExt in a library of its own."""
        return self.version.startswith("8.") and not self.rtx


def read_headers(folder: Path, wanted: str | None = None) -> Headers:
    """Look at the headers in ``folder``.

    Args:
        folder: what --tensorrt-include names.
        wanted: "8" for 8.5 and 8.6, "10" for 10 and newer, None for whichever it is.

    Raises:
        FlashRNNError: there are no headers, or of a release without a plugin, or not of the ``wanted`` one.
    """
    text = ""
    if (folder / "NvInferRuntime.h").is_file() and (folder / "NvInferVersion.h").is_file():
        text = (folder / "NvInferVersion.h").read_text(encoding="utf-8", errors="replace")
    found = [re.search(rf"#define (?:NV_TENSORRT|TRT)_{part}(_RTX|_[A-Z]+)?\s+(\d+)", text) for part in _PARTS]
    if not all(found):
        raise FlashRNNError(f"--tensorrt-include {folder}: there are no TensorRT headers in it; it takes {CURE}")
    major, minor = (int(match[2]) for match in found if match)
    headers = Headers(folder, f"{major}.{minor}", rtx=any(match[1] == "_RTX" for match in found if match))
    old = not headers.rtx and (major < 10 and (major, minor) not in ((8, 5), (8, 6)))
    if old:
        raise FlashRNNError(
            f"--tensorrt-include {folder}: these are headers of TensorRT {headers.version}; the plugin is for 8.5, 8.6 "
            "and 10 or newer"
        )
    if wanted is not None and headers.is_version_8 != (wanted == "8"):
        raise FlashRNNError(
            f"--tensorrt {wanted}: the headers in {folder} are of TensorRT {headers.version}; give --tensorrt-include "
            f"those of TensorRT {'8.5 or 8.6' if wanted == '8' else '10 or newer'}"
        )
    return headers
