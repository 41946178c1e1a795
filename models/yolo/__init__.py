"""YOLOv8, YOLO11 and YOLO26 networks built by anychip. Must not know images or files."""
