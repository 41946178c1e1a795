"""Commands for those who measure and port: bench, ops, profile, top, tune, validate and verify.

Each is found through an entry point of the group `anychip.commands` and has TEXT, EXAMPLE, add_arguments and run. Must
not be imported by anychip.
"""
