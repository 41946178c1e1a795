"""Text in images, as a plugin of anychip: finding lines of text, and reading them, with PP-OCR's networks.

Must not be imported by anychip: it is found by its entry points alone (pyproject.toml).
"""
