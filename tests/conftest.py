"""What every test may use."""

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Runs of tests are kept apart from the user's own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("SHOAL_HOME", str(folder))
    return folder


@pytest.fixture
def run_dir(tmp_path):
    return str(tmp_path / "run")
