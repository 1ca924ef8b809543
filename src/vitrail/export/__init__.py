"""A model as a graph for other runtimes: ONNX, OpenVINO, and torch without vitrail."""

import os
import sys

# Both runtimes report to their makers over the network: OpenVINO that it was imported and what it converted, unless it
# finds no means to; ONNX Runtime, from compiled code and with an identity that it stores in the user's cache, unless
# this variable stands before it is imported. Whoever has imported or set them before has decided otherwise.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
