"""The service: HTTP, scheduling, workers. Imports models and backends; nothing imports app."""
