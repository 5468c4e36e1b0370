"""TensorRT's Python module, or TensorRT-RTX's: found, loaded, listened to, and given plugin libraries.

Both have one API. They are called ``trt`` here, and typed Any: neither ships types.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from flashrnn_deploy import shared_library
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import printable
from flashrnn_deploy.info import library_info
from flashrnn_deploy.op import PLUGIN_ATTRIBUTES
from flashrnn_deploy.signals import ENDS

RTX_PACKAGES = "tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings"
BUILD_LIBRARY = "flashrnn-deploy build-plugins MODEL.onnx --gpu GPU --tensorrt-include DIR -o DIR"
_RTX_LIBRARIES = ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1")


def load(rtx: bool = False) -> Any:
    """Import ``tensorrt``, or TensorRT-RTX's bindings.

    Raises:
        ModuleNotFoundError: TensorRT is not installed (the command line names the extra).
        FlashRNNError: TensorRT-RTX is not installed, or either does not load.
    """
    try:
        if not rtx:
            return importlib.import_module("tensorrt")
        _let_parser_find_library()
        return importlib.import_module("tensorrt_rtx_bindings")
    except ModuleNotFoundError as error:
        if not rtx or not str(error.name).startswith("tensorrt_rtx"):
            raise
        raise FlashRNNError(f"--rtx needs TensorRT-RTX, which is not installed: pip install {RTX_PACKAGES}") from error
    except (ImportError, OSError) as error:
        raise FlashRNNError(f"{product(rtx)} is installed but does not load: {one_line(error)}") from error


@functools.cache
def _let_parser_find_library() -> tempfile.TemporaryDirectory[str] | None:
    """Load TensorRT-RTX's libraries from a folder of links that also holds the name its parser looks for.

    The parser of the wheels opens ``libtensorrt_rtx.so``, a name that they do not hold, and ends the process where
    there is none. It looks beside itself, in the folder that it was loaded from; links need no compiler, no second
    process, no change of the environment and nothing written where packages are installed. The folder is there until
    the process ends.
    """
    found = importlib.util.find_spec("tensorrt_rtx_libs")
    if found is None or not found.submodule_search_locations:
        return None  # libraries of a system package, which has both names
    source = Path(found.submodule_search_locations[0])
    folder = tempfile.TemporaryDirectory(prefix="flashrnn-rtx-")
    for library in _RTX_LIBRARIES:
        link = Path(folder.name) / library
        link.symlink_to(source / library)
        (Path(folder.name) / library.removesuffix(".1")).symlink_to(source / library)
        ctypes.CDLL(str(link))
    return folder


def product(rtx: bool) -> str:
    """What messages call the engine."""
    return "TensorRT-RTX" if rtx else "TensorRT"


def version(trt: Any) -> str:
    """major.minor.patch of the loaded module."""
    return ".".join(str(trt.__version__).split(".")[:3])


def name(trt: Any) -> str:
    """What messages call the loaded module."""
    return f"{product(is_rtx(trt))} {version(trt)}"


def major(trt: Any) -> int:
    return int(str(trt.__version__).split(".")[0])


def is_rtx(trt: Any) -> bool:
    return "rtx" in trt.__name__


def make_log(trt: Any) -> Any:
    """A logger whose ``errors`` and ``warnings`` keep what TensorRT says; ``listen`` is called with each line of both.

    An exception out of it would be lost, or end the process inside C++: it is kept in ``interrupt`` (``interrupts``).
    """

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.interrupt: BaseException | None = None
            self.listen: Any = None

        def log(self, severity: Any, text: str) -> None:
            try:
                kind = trt.ILogger.Severity
                line = one_line(text)
                if severity in (kind.INTERNAL_ERROR, kind.ERROR):
                    self.errors.append(line)
                elif severity == kind.WARNING:
                    self.warnings.append(line)
                if self.listen is not None and severity != kind.VERBOSE:
                    self.listen(line)
            except BaseException as error:
                self.interrupt = error

        def take(self) -> str:
            """The errors since the last call, in one line."""
            said, self.errors = self.errors, []
            return clipped("; ".join(dict.fromkeys(said))) or "it does not say why"

    return Log()


def one_line(text: object) -> str:
    """Any message in one line of printable characters."""
    return printable(" ".join(str(text).split()))


def clipped(text: str, length: int = 500) -> str:
    return text if len(text) <= length else text[:length] + " ..."


def load_plugins(trt: Any, log: Any, libraries: Sequence[Path]) -> None:
    """Register the plugins of each library. Safe to call again.

    Raises:
        FlashRNNError: a file is missing, does not load, was built without this TensorRT, or its plugins are registered
            by another library.
    """
    for library in dict.fromkeys(path.resolve() for path in libraries):
        if not library.is_file():
            raise FlashRNNError(f"there is no plugin library {library}; build it with: {BUILD_LIBRARY}")
        try:
            handle = shared_library.load(library)
        except OSError as error:
            raise FlashRNNError(f"cannot load the plugin library {library}: {one_line(error)}") from error
        if _registers(trt, library, handle) and _handle(trt, str(library), library.stat().st_mtime_ns) is None:
            raise FlashRNNError(
                f"{product(is_rtx(trt))} {version(trt)} cannot register the plugins of {library}, perhaps because "
                f"another library in this process holds them: {log.take()}"
            )


def _registers(trt: Any, library: Path, handle: ctypes.CDLL) -> bool:
    """Whether TensorRT has to register the library's plugins; those for TensorRT 8 do it themselves when opened.

    Raises:
        FlashRNNError: the library was built for another TensorRT, or without any.
    """
    old = major(trt) < 10 and not is_rtx(trt)
    if not old and hasattr(handle, "getCreators"):
        return True
    built = library_info(library).get("tensorrt", "") if is_ours(handle) else ""
    if old and (built.startswith("8.") or not is_ours(handle)):
        return hasattr(handle, "getPluginCreators") and hasattr(trt.get_plugin_registry(), "load_library")
    cure = f"{BUILD_LIBRARY}{' --tensorrt 8' if old else ''}"
    if built:
        raise FlashRNNError(
            f"the plugin library {library} was built for TensorRT {built}, and this is {name(trt)}; build another: "
            f"{cure}"
        )
    raise FlashRNNError(
        f"the plugin library {library} was built without TensorRT support; build one that has it: {cure}"
    )


def is_ours(handle: ctypes.CDLL) -> bool:
    """Whether a library holds the FlashRNN plugins."""
    return hasattr(handle, "flashrnn_info")


@functools.cache
def _handle(trt: Any, library: str, modified: int) -> Any:
    """What the registry gives for a library, once per process: it refuses the plugins that it has."""
    del modified  # a library that was built again is another one
    return trt.get_plugin_registry().load_library(library)


def creators(trt: Any) -> set[tuple[str, str, str]]:
    """Name, version and namespace of each registered plugin."""
    registry = trt.get_plugin_registry()
    found = registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list
    return {(c.name, c.plugin_version, c.plugin_namespace) for c in found}


def check_plugins(trt: Any, op_types: Sequence[str], labels: Sequence[str]) -> None:
    """Every FlashRNN op of a model has its plugin.

    Args:
        trt: the module.
        op_types: the op of each node.
        labels: how messages name each node.

    Raises:
        FlashRNNError: one has not; the message names plugin, version, namespace and the flag.
    """
    wanted, space = PLUGIN_ATTRIBUTES["plugin_version"], PLUGIN_ATTRIBUTES["plugin_namespace"]
    there = creators(trt)
    for op_type, label in zip(op_types, labels, strict=True):
        if (op_type, wanted, space) not in there:
            others = sorted(v for name, v, _ in there if name == op_type)
            found = f"only version {', '.join(others)} is there" if others else "no loaded library has it"
            raise FlashRNNError(
                f"the {label} needs the plugin {op_type}, version {wanted}, namespace '{space}', and {found}: pass the "
                f"library with --plugins LIB, built with: {BUILD_LIBRARY}"
            )


@contextlib.contextmanager
def interrupts(log: Any) -> Iterator[None]:
    """Keep what Ctrl-C, ``ENDS`` and the callbacks of ``log`` raise while TensorRT works, and raise it at the end.

    Python raises in the first Python code that runs after a signal. Inside TensorRT that is the entry of a callback,
    before any ``try`` of ours, and the bindings print and forget what a callback raises.
    """

    def keep(number: int, frame: FrameType | None) -> None:
        try:
            before[number](number, frame)
        except BaseException as error:
            log.interrupt = error

    main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler, or runs one
    before: dict[int, Any] = {n: h for n in (signal.SIGINT, *ENDS) if main and callable(h := signal.getsignal(n))}
    for number in before:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if log.interrupt is not None:
            error, log.interrupt = log.interrupt, None
            raise error
