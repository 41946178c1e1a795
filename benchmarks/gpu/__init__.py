"""What to ask a card that is there for half an hour, on a machine without a network (docs/gpu-kit.md).

Each question is a module with `ask(asked)`, which returns figures as JSON takes them. Must not change settings of the
card, and must not know other questions.
"""
