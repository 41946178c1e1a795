"""YOLOv8 and YOLO11 networks of our own.

Must not know images or files.
"""
