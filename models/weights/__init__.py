"""Weight files, read without running their content. Must not know architectures."""
