"""Settings of these tests. Wall-clock deadlines belong to benches: a busy machine must not fail a law."""

from hypothesis import HealthCheck, settings

settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_clock")
