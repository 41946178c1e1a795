"""The Open Inference Protocol over gRPC, beside HTTP in the same event loop. Must not be imported by anychip."""
