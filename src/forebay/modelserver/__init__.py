"""The model server: a repository of tensor models behind the Open Inference Protocol, as Triton's users know it."""
