"""Sources of GPU readings: NVML, DCGM exporters, the kernel log, a script."""
