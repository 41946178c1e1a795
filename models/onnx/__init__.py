"""ONNX files as PyTorch modules. Must not know tasks."""
