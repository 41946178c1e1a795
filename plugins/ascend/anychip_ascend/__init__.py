"""Huawei Ascend's own runtimes: torchair, .om files through pyACL, npu-smi. Must not be imported by anychip."""
