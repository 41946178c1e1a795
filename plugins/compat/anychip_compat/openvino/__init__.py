"""Conversion of OpenVINO's files to ONNX's operators.

Must not need OpenVINO.
"""
