"""OpenVINO's files as ONNX's operators.

Must not need OpenVINO.
"""
