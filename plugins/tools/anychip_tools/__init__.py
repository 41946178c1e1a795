"""Commands for prediction, measurement and ports, found through the entry points `anychip.commands`: modules with TEXT,
EXAMPLE, add_arguments and run. Must not be imported by anychip.
"""
