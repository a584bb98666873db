"""Export trained models as ONNX files that answer as the trained models do."""
