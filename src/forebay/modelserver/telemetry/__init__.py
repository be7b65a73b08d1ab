"""What the model server tells of itself: traces, logs, metrics, and the settings by which clients change them."""
