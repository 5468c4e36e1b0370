"""What TensorRT's parser and builder are given: no function bodies, and on TensorRT 8 the types it does not take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from flashrnn_deploy.engine import network
from flashrnn_deploy.engine.build import _use_cache
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import DOMAIN, RNNSpec
from flashrnn_deploy.shapes import flashrnn_nodes, tensors_of

LSTM = RNNSpec("lstm", 2, 8)


def test_function_bodies_are_left_out(tmp_path: Path) -> None:
    """Parsers up to TensorRT 10.6 would expand them; functions of others stay."""
    model = models.network(LSTM)
    other = onnx.FunctionProto()
    other.CopyFrom(model.functions[0])
    other.domain = "elsewhere"
    model.functions.append(other)
    path = models.save(model, tmp_path / "m.onnx")
    assert [f.domain for f in network._for_parser(path, weak=False).functions] == ["elsewhere"]
    assert {f.domain for f in onnx.load(path).functions} == {DOMAIN, "elsewhere"}


def test_tensorrt_8_gets_int32_lengths(tmp_path: Path) -> None:
    """It narrows int64 with a warning; lengths that only a Cast reads are declared int32 instead."""
    path = models.save(models.network(LSTM, lens=True), tmp_path / "m.onnx")
    for weak, dtype in ((False, TensorProto.INT64), (True, TensorProto.INT32)):
        model = network._for_parser(path, weak)
        (lens,) = (v for v in model.graph.input if v.name == "lens")
        assert lens.type.tensor_type.elem_type == dtype
        onnx.checker.check_model(model)


def test_tensorrt_8_gets_no_shape_with_a_range(tmp_path: Path) -> None:
    """Its parser ignores start and end: the state of a default batch would get the wrong rank."""
    nodes = [
        helper.make_node("Shape", ["x"], ["a"], start=1, end=-1),
        helper.make_node("Shape", ["x"], ["b"], start=-2),
        helper.make_node("Shape", ["x"], ["c"]),
    ]
    sizes = [helper.make_tensor_value_info(n, TensorProto.INT64, [None]) for n in "abc"]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * 4)
    graph = helper.make_graph(nodes, "g", [x], sizes)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    got = network._for_parser(models.save(model, tmp_path / "m.onnx"), weak=True)
    onnx.checker.check_model(got)
    assert [n.op_type for n in got.graph.node] == ["Shape", "Slice", "Shape", "Slice", "Shape"]
    results = ReferenceEvaluator(got).run(None, {"x": np.zeros((2, 3, 4, 5), np.float32)})
    assert [r.tolist() for r in results] == [[3, 4], [4, 5], [2, 3, 4, 5]]


def test_tensorrt_8_is_held_to_the_dtype() -> None:
    """Its networks are weakly typed: each FlashRNN node keeps its dtype, and states are float32. 8.5.3 refuses a
    precision of the layer itself, which has int32 and float32 inputs."""
    spec = RNNSpec("lstm", 2, 8, dtype="float16")
    model = models.network(spec)
    calls: list[Any] = []
    layer = SimpleNamespace(type="plugin", name="rnn", set_output_type=lambda i, t: calls.append((i, t)))
    other = SimpleNamespace(type="matmul", name="head")
    net = SimpleNamespace(num_layers=2, get_layer=lambda i: (layer, other)[i])
    config = SimpleNamespace(set_flag=calls.append)
    flags = SimpleNamespace(FP16="fp16", OBEY_PRECISION_CONSTRAINTS="obey")
    common = {"BuilderFlag": flags, "float16": "half", "float32": "float", "__name__": "tensorrt"}
    kinds = SimpleNamespace(PLUGIN_V2="plugin")
    nodes = flashrnn_nodes(model, tensors_of(model))
    network.constrain(SimpleNamespace(__version__="8.6.1", LayerType=kinds, **common), net, config, nodes)
    assert calls == ["fp16", "obey", (0, "half"), (1, "float")]
    assert not hasattr(layer, "precision")
    calls.clear()
    single = models.network(LSTM)
    network.constrain(
        SimpleNamespace(__version__="8.5.3", LayerType=kinds, **common),
        net,
        config,
        flashrnn_nodes(single, tensors_of(single)),
    )
    assert not calls
    network.constrain(SimpleNamespace(__version__="10.0.1", LayerType=kinds, **common), net, config, nodes)
    assert not calls


class Config:
    """Of IBuilderConfig what a timing cache needs; a cache of another TensorRT starts with another letter."""

    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(data=data, serialize=lambda: b"T" + data) if data[:1] in (b"", b"T") else None

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        return cache.data != b"Tanother GPU"


def test_timing_cache(tmp_path: Path) -> None:
    path, log = tmp_path / "times", SimpleNamespace(take=lambda: "why")
    assert _use_cache(Config(), None, log) is None
    path.write_bytes(_use_cache(Config(), path, log).serialize())
    assert _use_cache(Config(), path, log).data == b"T"
    for junk in (b"junk", b"Tanother GPU"):
        path.write_bytes(junk)
        with pytest.raises(
            FlashRNNError, match=r"times is not a timing cache of this TensorRT and GPU: delete it.*why"
        ):
            _use_cache(Config(), path, log)
