"""Commands for prediction, measurement and ports: bench, doctor, ops, predict, profile, top,
tune, validate and verify.

anychip finds each through the entry points `anychip.commands`. Each has TEXT, EXAMPLE, add_arguments and run. Must
not be imported by anychip.
"""
