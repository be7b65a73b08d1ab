"""What holds for every test: none fails because the machine is slow."""

from hypothesis import HealthCheck, settings

settings.register_profile("forebay", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forebay")
