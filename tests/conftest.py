"""What every test may use."""

import re
import secrets
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shoal.testing.rigs.machine import LACKS, RigMissing
from shoal.testing.rigs.stores import ObjectStore, object_store

# The program that runs tests has a file, which processes that are spawned look for. One of pytest-xdist has none, and
# would look like `python -c`.
if not hasattr(sys.modules["__main__"], "__file__"):
    sys.modules["__main__"].__file__ = str(Path(pytest.__file__).with_name("__main__.py"))

# How long an example takes says how busy the machine is.
settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shoal")


@pytest.fixture(scope="session", autouse=True)
def _home_of_fixtures(tmp_path_factory):
    """What fixtures of a module or session run is not the user's either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(tmp_path_factory.mktemp("home-of-fixtures")))
        yield


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Runs of tests are kept apart from the user's own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("SHOAL_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def object_server():
    """An object store for all tests that need one; they have buckets of their own."""
    pytest.importorskip("s3fs")
    try:
        with object_store() as store:
            yield store
    except RigMissing as error:
        pytest.skip(f"{error.message} {error.why}")


@pytest.fixture
def bucket(object_server: ObjectStore, monkeypatch):
    """The URL of an empty bucket, and the environment in which it can be used."""
    import s3fs

    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{secrets.token_hex(4)}"
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(name)
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def run_dir(tmp_path):
    return str(tmp_path / "run")


def pytest_terminal_summary(terminalreporter):
    """Say in the end how many tests this machine could not run, and for want of what."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    lacking = [found[1] for reason in reasons if (found := re.search(rf"{LACKS} ([^'\")]+)", reason))]
    if lacking:
        counts = Counter(name.strip() for names in lacking for name in names.split(","))
        told = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        terminalreporter.write_line(f"{len(lacking)} tests skipped because {LACKS}: {told}", yellow=True)
