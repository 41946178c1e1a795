"""Huawei Ascend's own runtimes: torchair, offline models (.om) through pyACL, npu-smi.

anychip finds them through the entry points `anychip.backends` and `anychip.finished`. Must not be imported by anychip.
"""
