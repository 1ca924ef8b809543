"""A model as a graph for other runtimes: ONNX, OpenVINO, and torch without vitrail."""

import sys

# OpenVINO reports to its makers that it was imported, and what it converted, over the network, unless it finds no
# means to. Whoever has imported it before has decided otherwise.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
