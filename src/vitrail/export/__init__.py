"""A model as a graph for other runtimes: ONNX, OpenVINO, and torch without vitrail."""
