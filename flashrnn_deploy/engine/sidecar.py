"""The file beside every engine, ``OUT.engine.json``: what the engine was built from, with and for.

TensorRT refuses an engine of another version or GPU with an internal message, or takes a damaged one for good. So a
sidecar is checked before TensorRT sees the engine. The C++ sample writes and checks the same format.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrnn_deploy import __version__
from flashrnn_deploy.engine.api import product
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import PLUGIN_ATTRIBUTES
from flashrnn_deploy.shell import command

FORMAT = 1
SUFFIXES = (".engine", ".plan", ".trt")
"""What files of engines are named."""
_OPTIONAL = ("lengths", "targets", "command")
_TYPES: dict[str, Any] = {
    "format": int, "engine": dict, "tensorrt": str, "rtx": bool, "compute_capability": (str, type(None)),
    "plugin": (dict, type(None)), "library": (dict, type(None)), "model": dict, "shapes": dict, "states": list,
    "axes": dict, "dtypes": dict, "lengths": list, "targets": list,
    "command": list,
}  # fmt: skip


@dataclass(frozen=True)
class Running:
    """Where an engine is to run.

    Args:
        tensorrt: version, major.minor.patch.
        rtx: whether it is TensorRT-RTX.
        compute_capability: of the device, such as "9.0".
    """

    tensorrt: str
    rtx: bool
    compute_capability: str


def path_of(engine: Path) -> Path:
    """Where the sidecar of an engine lies."""
    return engine.with_name(engine.name + ".json")


def file_facts(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """Name, hash and size of a file."""
    data = path.read_bytes() if data is None else data
    return {"file": path.name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def describe(engine: bytes, model: Path, library: Path | None, **facts: Any) -> dict[str, Any]:
    """A sidecar.

    Args:
        engine: the serialized engine.
        model: the file that it was built from.
        library: the FlashRNN plugin library, None where the model holds no FlashRNN op.
        facts: ``tensorrt``, ``rtx``, ``compute_capability``, ``shapes``, ``states``, ``axes``, ``dtypes``, ``command``
            (the words after flashrnn-deploy that build the engine again, without -o) and more.
    """
    plugin = {"version": PLUGIN_ATTRIBUTES["plugin_version"], "namespace": PLUGIN_ATTRIBUTES["plugin_namespace"]}
    return {
        "format": FORMAT,
        "flashrnn_deploy": __version__,
        "engine": {"sha256": hashlib.sha256(engine).hexdigest(), "bytes": len(engine)},
        "plugin": plugin if library else None,
        "library": file_facts(library.resolve()) if library else None,
        "model": file_facts(model),
        **facts,
    }


def read(engine: Path) -> dict[str, Any]:
    """The sidecar of an engine.

    Raises:
        FlashRNNError: there is none, it cannot be read, or a field is missing or of another kind.
    """
    path = path_of(engine)
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise FlashRNNError(
            f"{engine} has no sidecar {path.name}, which says what it was built for: build it with `flashrnn-deploy "
            "build-engine`, or pass --trust-engine to run an engine that you trust"
        ) from error
    except OSError as error:
        raise FlashRNNError(f"cannot read the sidecar {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FlashRNNError(f"the sidecar {path} is not JSON: {error}; {_rebuild(engine, {})}") from error
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise FlashRNNError(f"{path} is not the sidecar of an engine: it has no format; {_rebuild(engine, {})}")
    if data["format"] != FORMAT:
        raise FlashRNNError(
            f"the sidecar {path} has format {data['format']}, and this version of flashrnn-deploy reads format "
            f"{FORMAT}; {_rebuild(engine, data)}"
        )
    for key, kind in _TYPES.items():
        if key in _OPTIONAL and key not in data:
            continue
        if key not in data or not isinstance(data[key], kind) or not _is_whole(key, data[key]):
            raise FlashRNNError(f"the sidecar {path} is damaged at '{key}'; {_rebuild(engine, data)}")
    return data


def _is_whole(key: str, value: Any) -> bool:
    """What running reads of a field has its form."""
    if key == "states":
        return all(_are(pair, str) and len(pair) == 2 for pair in value)
    if key in ("lengths", "targets", "command"):
        return _are(value, str)
    if key == "axes":
        return all(isinstance(a, dict) and _are(list(a.values()), int, type(None)) for a in value.values())
    return True


def _are(values: Any, *kinds: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kinds) for value in values)


def check_files(engine: Path, data: bytes, sidecar: dict[str, Any], libraries: Sequence[Path]) -> None:
    """Refuse an engine that is damaged, or whose plugin library is another; this needs neither TensorRT nor a GPU.

    Args:
        engine: its path, for messages and for the command that builds it again.
        data: its bytes.
        sidecar: what ``read`` gave.
        libraries: the plugin libraries that are given.

    Raises:
        FlashRNNError: what does not match, in one sentence, with the command.
    """
    check_bytes(engine, data, sidecar)
    _check_library(engine, sidecar, libraries)


def check_place(engine: Path, sidecar: dict[str, Any], here: Running) -> None:
    """Refuse an engine that was not built for this TensorRT and GPU; nothing of TensorRT is called.

    Raises:
        FlashRNNError: what does not match, in one sentence, with the command.
    """
    built, running = (product(sidecar["rtx"]), sidecar["tensorrt"]), (product(here.rtx), here.tensorrt)
    capability = sidecar["compute_capability"]
    targets = [capability] if capability else sidecar.get("targets", [])
    if built != running or here.compute_capability not in targets:
        raise FlashRNNError(
            f"{engine} was built with {' '.join(built)} for compute capability {' or '.join(targets) or '(none)'}; "
            f"this is {' '.join(running)} on compute capability {here.compute_capability}; {_rebuild(engine, sidecar)}"
        )


def check_bytes(engine: Path, data: bytes, sidecar: dict[str, Any]) -> None:
    """Refuse an engine whose bytes are not those that the sidecar was written for.

    Raises:
        FlashRNNError: size or hash differ.
    """
    want = sidecar["engine"]
    if want.get("bytes") != len(data):
        raise FlashRNNError(
            f"{engine} has {len(data)} bytes, and its sidecar says {want.get('bytes')}: it is damaged, or of another "
            f"build; {_rebuild(engine, sidecar)}"
        )
    if want.get("sha256") != hashlib.sha256(data).hexdigest():
        raise FlashRNNError(
            f"{engine} does not have the SHA-256 that its sidecar says: it is damaged, or of another build; "
            f"{_rebuild(engine, sidecar)}"
        )


def _check_library(engine: Path, sidecar: dict[str, Any], libraries: Sequence[Path]) -> None:
    plugin, wanted = sidecar["plugin"], sidecar["library"]
    if plugin is None or wanted is None:
        return
    version, space = PLUGIN_ATTRIBUTES["plugin_version"], PLUGIN_ATTRIBUTES["plugin_namespace"]
    if (plugin.get("version"), plugin.get("namespace")) != (version, space):
        raise FlashRNNError(
            f"{engine} was built with version {plugin.get('version')} of the plugins in the namespace "
            f"'{plugin.get('namespace')}'; this flashrnn-deploy has version {version}, namespace '{space}'; "
            f"{_rebuild(engine, sidecar)}"
        )
    if not libraries:
        raise FlashRNNError(
            f"{engine} holds the FlashRNN plugins, version {version}, namespace '{space}': pass the library "
            f"{wanted.get('file')} that it was built with, --plugins LIB"
        )
    for library in libraries:
        if not library.is_file():
            raise FlashRNNError(f"there is no plugin library {library}; {engine} wants {wanted.get('file')}")
    if all(file_facts(library)["sha256"] != wanted.get("sha256") for library in libraries):
        given = ", ".join(map(str, libraries))
        raise FlashRNNError(
            f"{engine} was built with the library {wanted.get('file')} of SHA-256 {str(wanted.get('sha256'))[:12]}..., "
            f"and {given} is another build: pass that one; or {_rebuild(engine, sidecar)}"
        )


def check_replaceable(engine: Path) -> None:
    """Refuse to write an engine whose sidecar would replace a file that is none.

    Raises:
        FlashRNNError: there is one; it is named.
    """
    path = path_of(engine)
    if not path.exists():
        return
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        data = None
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("format"), int)
        or not isinstance(data.get("engine"), dict)
    ):
        raise FlashRNNError(
            f"-o {engine} would replace {path}, which is not the sidecar of an engine: choose another name, or move it"
        )


def _rebuild(engine: Path, sidecar: dict[str, Any]) -> str:
    stored: Any = sidecar.get("command")
    words = stored if _are(stored, str) else _likely_command(sidecar)
    return f"rebuild it with: {command(*words, '-o', engine)}"


def _likely_command(sidecar: dict[str, Any]) -> list[str]:
    """That of an engine whose sidecar holds none, as far as it says."""

    def name(key: str, unknown: str) -> str:
        entry = sidecar.get(key)
        return str(entry.get("file", unknown)) if isinstance(entry, dict) else unknown

    words = ["build-engine", name("model", "MODEL.onnx")]
    if "library" not in sidecar or sidecar["library"] is not None:
        words += ["--plugins", name("library", "LIB")]
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # shapes that are damaged are left out
        for tensor, profile in sidecar.get("shapes", {}).items():
            sizes = ("x".join(map(str, profile[key])) for key in ("min", "opt", "max"))
            words += ["--shapes", f"{tensor}={':'.join(sizes)}"]
    return words + ["--rtx"] * (sidecar.get("rtx") is True)
