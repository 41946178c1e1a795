"""YOLOv8 and YOLO11 networks built by anychip.

Must not know images or files.
"""
