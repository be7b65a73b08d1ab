"""The model server: a repository of tensor models behind the Open Inference Protocol, compatible with Triton."""
