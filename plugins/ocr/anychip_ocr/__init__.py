"""Text in images: finding lines, and reading them, with PP-OCR's networks. Must not be imported by anychip."""
