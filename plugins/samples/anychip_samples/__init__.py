"""Sample weights, and their measured quality. Their training is in benchmarks/sample_training."""
