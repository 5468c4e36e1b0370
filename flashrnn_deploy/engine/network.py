"""From an ONNX file to TensorRT's network: with our plugins in it, and every type as the file says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy.engine import api
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import DOMAIN, RNNSpec
from flashrnn_deploy.shapes import node_label
from flashrnn_deploy.streaming import length_inputs

Nodes = Sequence[tuple[onnx.NodeProto, RNNSpec]]


def parse(trt: Any, log: Any, builder: Any, path: Path, nodes: Nodes) -> Any:
    """The network of an ONNX file.

    Args:
        trt: the module.
        log: of ``api.make_log``.
        builder: TensorRT's builder.
        path: the file; weights beside it are read by TensorRT.
        nodes: the file's FlashRNN nodes.

    Raises:
        FlashRNNError: a plugin is not loaded, or the parser refuses a node, which is named.
    """
    api.check_plugins(trt, [spec.op_type for _, spec in nodes], [node_label(node) for node, _ in nodes])
    model = _for_parser(path, weak=_weakly_typed(trt))
    if _weakly_typed(trt) and any(spec.dtype == "bfloat16" for _, spec in nodes):
        raise FlashRNNError(f"TensorRT {api.version(trt)} has no bfloat16: export the model with --dtype float16")
    network = builder.create_network(_flags(trt))
    parser = trt.OnnxParser(network, log)
    with api.interrupts(log):
        read = parser.parse(model.SerializeToString(), str(path))
    if not read:
        errors = [_parser_error(parser.get_error(i), model) for i in range(parser.num_errors)]
        said = api.clipped("; ".join(dict.fromkeys(errors))) or log.take()
        raise FlashRNNError(f"{api.product(api.is_rtx(trt))} {api.version(trt)} cannot read {path}: {said}")
    return network


def _weakly_typed(trt: Any) -> bool:
    return api.major(trt) < 10 and not api.is_rtx(trt)


def _flags(trt: Any) -> int:
    known = trt.NetworkDefinitionCreationFlag
    if _weakly_typed(trt):
        return 1 << int(known.EXPLICIT_BATCH)
    return 1 << int(known.STRONGLY_TYPED) if hasattr(known, "STRONGLY_TYPED") else 0


def _for_parser(path: Path, weak: bool) -> onnx.ModelProto:
    """The file without our function bodies, its external data left where it is.

    Parsers up to TensorRT 10.6 expand a function rather than look for a plugin; that the plugins are there has been
    checked. TensorRT 8 has no int64 and narrows it with a warning: lengths that are cast to int32 first thing are
    declared int32 instead. Its parser also takes Shape(start, end) for Shape, without a word.
    """
    model = onnx.ModelProto()
    model.ParseFromString(path.read_bytes())
    kept = [function for function in model.functions if function.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend(kept)
    if weak:
        lengths = length_inputs(model)
        for value in model.graph.input:
            readers = [node for node in model.graph.node if value.name in node.input]
            if value.name in lengths and all(node.op_type == "Cast" for node in readers):
                value.type.tensor_type.elem_type = TensorProto.INT32
        _split_shapes(model.graph)
    return model


def _split_shapes(graph: onnx.GraphProto) -> None:
    """Shape(start, end) as Shape and Slice."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        bounds = {a.name: a.i for a in node.attribute if node.op_type == "Shape" and not node.domain}
        if bounds:
            output = node.output[0]
            for name, default in (("start", 0), ("end", 2**31 - 1)):
                value = numpy_helper.from_array(np.array([bounds.get(name, default)], np.int64), f"{output}/{name}")
                graph.initializer.append(value)
            graph.node.append(helper.make_node("Shape", node.input, [f"{output}/shape"]))
            operands = [f"{output}/shape", f"{output}/start", f"{output}/end"]
            graph.node.append(helper.make_node("Slice", operands, [output], node.name))
        else:
            graph.node.append(node)


def _parser_error(error: Any, model: onnx.ModelProto) -> str:
    index = error.node()
    where = f"{node_label(model.graph.node[index])}: " if 0 <= index < len(model.graph.node) else ""
    return f"{where}{api.one_line(error.desc())}"


def constrain(trt: Any, network: Any, config: Any, nodes: Nodes) -> None:
    """Hold TensorRT 8, whose networks are weakly typed, to the dtype of each FlashRNN node.

    By the types of its outputs, to which the plugin ties those of its inputs. With a precision of the layer TensorRT
    8.5.3 finds "No supported formats": that would concern the float32 states and the int32 lengths as well.
    """
    specs = {node.name: spec for node, spec in nodes}
    if not _weakly_typed(trt) or all(spec.dtype != "float16" for spec in specs.values()):
        return
    config.set_flag(trt.BuilderFlag.FP16)
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.PLUGIN_V2 and layer.name in specs:
            layer.set_output_type(0, trt.float16 if specs[layer.name].dtype == "float16" else trt.float32)
            layer.set_output_type(1, trt.float32)


def tensors(network: Any) -> tuple[list[Any], list[Any]]:
    """The network's inputs and outputs."""
    return (
        [network.get_input(i) for i in range(network.num_inputs)],
        [network.get_output(i) for i in range(network.num_outputs)],
    )
