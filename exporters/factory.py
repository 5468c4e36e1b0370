"""FILE.py:FACTORY: the module to export, with example arguments."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.nn import MultiHeadRNN


@dataclass(frozen=True)
class Example:
    """A module, example arguments for its forward, and the axes that may vary (None: the default rule)."""

    module: nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: Any = None


def load_factory(source: str, weights: Path | None = None) -> Example:
    """Import ``FILE.py`` and call ``FACTORY`` without arguments.

    Args:
        source: "FILE.py:FACTORY". The factory returns a module, ``(module, args)`` or
            ``(module, args, dynamic_shapes)``, the last in the form that ``torch.export.export`` takes.
        weights: a file with a state dict to load into the module (``torch.load`` with ``weights_only=True``).

    Raises:
        FlashRNNError: the file or factory is missing or raises, it returns something else, or the weights do not fit.
    """
    path, _, name = source.rpartition(":")
    if not path or not name.isidentifier():
        raise FlashRNNError(f"'{source}' is not FILE.py:FACTORY")
    python_module = _import_file(Path(path))
    factory = getattr(python_module, name, None)
    if not callable(factory):
        names = [
            n
            for n, v in vars(python_module).items()
            if callable(v) and getattr(v, "__module__", None) == python_module.__name__ and not n.startswith("_")
        ]
        raise FlashRNNError(f"{path} has no factory '{name}'; it defines {', '.join(names) or 'no function'}")
    try:
        result = factory()
    except Exception as error:
        raise FlashRNNError(f"{source} raised {_describe(error, Path(path))}") from error
    example = _as_example(result, source)
    if weights is not None:
        _load_weights(example.module, weights)
    return replace(example, module=unwrapped(example.module))


def makes_other_weights(source: str) -> bool:
    """Whether two calls of a factory give two modules, as one does that makes random weights without a seed.

    Raises:
        FlashRNNError: as ``load_factory``.
    """
    one, other = (dict(load_factory(source).module.named_parameters()) for _ in range(2))
    return one.keys() != other.keys() or not all(torch.equal(value, other[name]) for name, value in one.items())


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's and DataParallel's wrappers, which compute the same and hide its names."""
    while True:
        compiled = getattr(module, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            module = compiled
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        else:
            return module


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FlashRNNError(f"no such file: {path}")
    # A name of its own: the file may be called as a package is that it imports later.
    spec = importlib.util.spec_from_file_location(f"_factory_{path.stem}", path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise FlashRNNError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as if the file had been run: its neighbours can be imported
    sys.modules[spec.name] = module  # dataclasses look the module of their class up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise FlashRNNError(f"importing {path} raised {_describe(error, path)}") from error
    finally:
        sys.path.remove(folder)
    return module


def _describe(error: Exception, path: Path) -> str:
    """The exception in one line, with the last line of the user's file that it passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    where = f" ({path.name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _as_example(result: Any, source: str) -> Example:
    items = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(items) <= 3 or not isinstance(items[0], nn.Module):
        what = f"({', '.join(type(i).__name__ for i in items)})" if isinstance(result, tuple) else type(result).__name__
        raise FlashRNNError(
            f"{source} returned {what}; it must return a module, (module, args) or (module, args, dynamic_shapes)"
        )
    module, args, shapes = (*items, None, None)[:3]
    if args is None:
        if not isinstance(module, (MultiHeadRNN, nn.RNNBase)):
            raise FlashRNNError(
                f"{source} returned a {type(module).__name__} alone; return (module, args) with example args"
            )
        args = (torch.zeros(3, 7, module.input_size) if module.batch_first else torch.zeros(7, 3, module.input_size),)
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, (tuple, list)):
        raise FlashRNNError(f"{source}: args must be a tuple of forward's arguments, not {type(args).__name__}")
    return Example(module.eval(), tuple(args), shapes)


def _why_unread(error: Exception) -> str:
    """Why ``torch.load`` refused a file, in plain words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if found := re.search(r"Unsupported global: GLOBAL ([\w.]+)", str(error)):
        return f"it holds other objects than tensors ({found[1]}); save the module's state_dict() alone"
    if "TorchScript" in str(error):
        return "it is TorchScript; save the module's state_dict()"
    return "it is no PyTorch checkpoint, or one that is damaged; torch.save(module.state_dict(), FILE) writes one"


def _load_weights(module: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise FlashRNNError(f"no such file: {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not a checkpoint, with advice for its own
        raise FlashRNNError(f"{path} is not a file of weights: {_why_unread(error)}") from error
    for key in ("state_dict", "model_state", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict):
        raise FlashRNNError(f"{path} holds a {type(state).__name__}, not a state dict")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise FlashRNNError(f"{path} does not fit the module: {' '.join(str(error).split())}") from error
