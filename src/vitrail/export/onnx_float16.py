"""An ONNX graph whose matrix products and convolutions are float16, as GPUs compute them fastest.

What lies between such products alone is float16 too: biases, activations, scales, moved values. All else stays
float32: the residual stream, LayerNorm, softmax, sums, the normalization of pixels, and the outputs. ONNX Runtime's own
converter is not used: it also rounds between two float32 operators, and silently clips what float16 cannot hold.

On a CPU, ONNX Runtime computes float16 in float32 and mostly omits the rounding, so what overflows on a GPU does not
overflow there. To measure the loss on a CPU, the same values are rounded in a float32 graph.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv"})
_FOLLOWERS = frozenset(
    {
        "Add", "Sub", "Mul", "Div", "Neg", "Gelu", "Erf", "Tanh", "Sigmoid", "Relu",
        "Concat", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that are float16 where all their computed inputs are."""


def convert(source: Path, path: Path, *, rounding_only: bool = False) -> None:
    """Write the float32 model `source` with float16 products; with `rounding_only` as float32 that is rounded alike."""
    model = onnx.load(source)
    _GraphConversion(model.graph, rounding_only=rounding_only).run()
    external = source.with_suffix(".onnx.data").exists()
    onnx.save(model, path, save_as_external_data=external, location=path.with_suffix(".onnx.data").name)


class _GraphConversion:
    """One pass over a graph's nodes, in the order of their computation."""

    def __init__(self, graph: GraphProto, *, rounding_only: bool) -> None:
        self.graph, self.rounding_only = graph, rounding_only
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.outputs = {value.name for value in graph.output}
        types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
        types |= {name: tensor.data_type for name, tensor in self.weights.items()}
        self.floats = {name for name, kind in types.items() if kind == TensorProto.FLOAT} | self.outputs
        self.rounded: set[str] = set()  # values of float16, or rounded to it
        self.widened: set[str] = set()  # such values again, in float32
        self.nodes: list[NodeProto] = []

    def run(self) -> None:
        for node in list(self.graph.node):
            is_float16 = self._is_float16(node)
            for index, name in enumerate(node.input):
                if name in self.floats and is_float16 != (name in self.rounded):
                    node.input[index] = self._round_value(name) if is_float16 else self._widen_value(name)
            self.nodes.append(node)
            if is_float16:
                for index, name in enumerate(node.output):
                    node.output[index] = self._add_output(name)
        self._write_graph()

    def _is_float16(self, node: NodeProto) -> bool:
        if node.op_type in _PRODUCTS:
            return True
        computed = [name for name in node.input if name in self.floats and name not in self.weights]
        is_residual = node.op_type == "Add" and len(computed) > 1
        is_follower = node.op_type in _FOLLOWERS and self.floats.issuperset(node.output)
        return is_follower and not is_residual and self.rounded.issuperset(computed)

    def _round_value(self, name: str) -> str:
        """The name of a float32 value or weight in float16, which is added where it is missing."""
        rounded = f"{name}_float16"
        if rounded in self.rounded:
            return rounded
        self.rounded.add(rounded)
        if name in self.weights:
            with np.errstate(over="ignore"):  # an infinity is found when the loss is measured
                values = numpy_helper.to_array(self.weights[name]).astype(np.float16)
            values = values.astype(np.float32) if self.rounding_only else values
            self.weights[rounded] = numpy_helper.from_array(values, rounded)
        else:
            self._append_rounding(name, rounded)
        return rounded

    def _widen_value(self, name: str) -> str:
        """The name of a float16 value in float32."""
        if self.rounding_only:
            return name
        widened = f"{name}_float32"
        if widened not in self.widened:
            self.widened.add(widened)
            self._append_cast(name, widened, TensorProto.FLOAT)
        return widened

    def _add_output(self, name: str) -> str:
        """The name that a float16 node gives to its output `name`; a graph's outputs stay float32."""
        if self.rounding_only:
            self.rounded.add(name)
            self._append_rounding(f"{name}_exact", name)
            return f"{name}_exact"
        if name not in self.outputs:
            self.rounded.add(name)
            return name
        self.rounded.add(f"{name}_float16")
        self._append_cast(f"{name}_float16", name, TensorProto.FLOAT)
        return f"{name}_float16"

    def _append_rounding(self, name: str, rounded: str) -> None:
        if self.rounding_only:
            self._append_cast(name, f"{rounded}_cast", TensorProto.FLOAT16)
            self._append_cast(f"{rounded}_cast", rounded, TensorProto.FLOAT)
        else:
            self._append_cast(name, rounded, TensorProto.FLOAT16)

    def _append_cast(self, name: str, converted: str, kind: int) -> None:
        self.nodes.append(helper.make_node("Cast", [name], [converted], f"cast_{converted}", to=kind))

    def _write_graph(self) -> None:
        used = {name for node in self.nodes for name in node.input}
        weights = [tensor for name, tensor in self.weights.items() if name in used]
        del self.graph.node[:], self.graph.initializer[:], self.graph.value_info[:]  # runtimes infer the last again
        self.graph.node.extend(self.nodes)
        self.graph.initializer.extend(weights)
