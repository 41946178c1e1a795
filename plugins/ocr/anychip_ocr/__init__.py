"""Plugin of anychip for text in images: finding lines of text, and reading them, with PP-OCR's networks.

Must not be imported by anychip, which finds it by its entry points alone (pyproject.toml).
"""
