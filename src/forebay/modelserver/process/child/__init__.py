"""The child: loads one model and runs its batches."""
