"""Huawei Ascend's own runtimes: torchair, offline models (.om) through pyACL, DVPP, npu-smi.

Found through the entry points of the groups `anychip.backends` and `anychip.finished`. Must not be imported by anychip.
"""
