"""Sources of what GPUs report: NVIDIA's library, DCGM exporters, the kernel's log, a script."""
