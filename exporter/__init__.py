"""From a checkpoint to checked ONNX graphs, over one set of weights a family."""
