"""Sample weights, which `--weights sample` and `anychip demo` serve, and their measured quality.

Owns: these files. Training lies outside the product, in benchmarks/sample_training.
"""
