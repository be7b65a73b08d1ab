"""What each operation of the admin API does; who may, and what becomes of mistakes, is its door's business."""
