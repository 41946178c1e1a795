"""Questions for a card that is lent for half an hour, on a machine without a network (docs/gpu-kit.md).

Each question is a module with `ask(asked)`, which returns figures for JSON. Must not change settings of the
card, and must not know other questions.
"""
