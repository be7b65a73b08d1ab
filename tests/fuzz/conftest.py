"""How hard the fuzz targets are worked: as any test by default, far longer with the profile of `make fuzz`."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fuzz",
    max_examples=5_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
