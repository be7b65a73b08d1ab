"""Image tasks: classification, detection, segmentation, and OCR."""
