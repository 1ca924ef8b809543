"""A model as a graph for other runtimes: ONNX, OpenVINO, and torch without vitrail."""

import os
import sys

# Both runtimes send telemetry over the network. OpenVINO reports imports and conversions if it finds its telemetry
# package. ONNX Runtime reports from compiled code, with an id that it stores in the user's cache, unless this variable
# is set before the import. Whoever has imported or set them before has decided otherwise.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
