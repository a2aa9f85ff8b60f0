"""Profiles of Hypothesis, and databases that live as long as a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "search",
    max_examples=2000,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of either kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/properties.db"
    else:
        yield request.getfixturevalue("postgres_database")


@pytest.fixture
def machine_settings(url: str) -> settings:
    """How much is tried: the same every time, unless a profile was asked for."""
    if settings.get_current_profile_name() == "search":
        return settings()
    return settings(
        max_examples=150 if url.startswith("sqlite") else 50,
        stateful_step_count=30,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def fewer(machine_settings: settings) -> settings:
    """For machines beside those: a part of their work."""
    if settings.get_current_profile_name() == "search":
        return machine_settings
    return settings(machine_settings, max_examples=machine_settings.max_examples // 6)
