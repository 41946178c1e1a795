"""Commands for those who predict, measure and port: bench, doctor, ops, predict, profile, top,
tune, validate and verify.

Each is found through an entry point of the group `anychip.commands` and has TEXT, EXAMPLE, add_arguments and run. Must
not be imported by anychip.
"""
