"""What is known of a Spark before it is asked for anything."""

import pytest

from shoal.engine.spark import _no_session, _why_failed, check_copies, is_dynamic, most_slots, probe
from shoal.spec.errors import UserError

DYNAMIC = {"spark.dynamicAllocation.enabled": "true"}


@pytest.mark.parametrize(
    ("master", "settings", "most"),
    [
        ("local[3]", {}, 5),
        ("local[*]", {"spark.task.cpus": "2"}, 5),
        ("local-cluster[2,1,1024]", {}, 2),
        ("local-cluster[2, 4, 1024]", {"spark.task.cpus": "2"}, 4),
        ("spark://a:7077", {}, None),
        ("spark://a:7077", {"spark.cores.max": "5", "spark.task.cpus": "2"}, 2),
        ("yarn", {}, 2),
        ("yarn", {"spark.executor.instances": "4", "spark.executor.cores": "4", "spark.task.cpus": "2"}, 8),
        ("yarn", DYNAMIC, None),
        ("yarn", {**DYNAMIC, "spark.dynamicAllocation.maxExecutors": "3", "spark.executor.cores": "2"}, 6),
        ("k8s://https://a:443", {"spark.executor.instances": "3"}, 3),
    ],
)
def test_how_many_tasks_can_ever_run_at_once(master: str, settings: dict[str, str], most: int | None) -> None:
    assert most_slots(master, settings, 5) == most


def test_dynamic_allocation_is_what_the_setting_says() -> None:
    assert not is_dynamic({})
    assert is_dynamic({"spark.dynamicAllocation.enabled": "True"})


def test_copies_of_long_tasks_are_refused() -> None:
    check_copies({"spark.speculation": "true"})  # a job of one task has no others to be slower than
    check_copies({"spark.speculation.task.duration.threshold": "60s"})
    with pytest.raises(UserError, match="longer than 60s"):
        check_copies({"spark.speculation": "true", "spark.speculation.task.duration.threshold": "60s"})


@pytest.mark.parametrize("master", ["spark://", "spark://host", "spark://host:", "spark://host:a,other:7077"])
def test_an_address_is_host_and_port(master: str) -> None:
    with pytest.raises(UserError, match="is not spark://HOST:PORT"):
        probe(master)


def test_a_port_that_cannot_be_is_nobodys() -> None:
    with pytest.raises(UserError, match="No Spark master answers"):
        probe("spark://127.0.0.1:99999")


def test_words_of_java_become_ours() -> None:
    said = "Error: Could not find or load main class\nJAVA_HOME is not set\n"
    assert _no_session("local[2]", "[JAVA_GATEWAY_EXITED]", said).message == "Java was not found."
    said = 'x\nException in thread "main" org.apache.spark.SparkException: When running with yarn, set\n at a'
    error = _no_session("yarn", "[JAVA_GATEWAY_EXITED] Java gateway process exited.", said)
    assert error.message == "No Spark session could be made with the master yarn."
    assert error.why == "When running with yarn, set"


def test_a_lost_executor_is_nobodys_mistake() -> None:
    assert _why_failed("Python worker exited unexpectedly (crashed)") is None
    assert _why_failed("ExecutorLostFailure (executor 1 exited caused by ...") is None
    error = _why_failed("An error\nModuleNotFoundError: No module named 'shoal'\n at org.apache")
    assert error is not None
    assert error.why == "ModuleNotFoundError: No module named 'shoal'"
    assert "PYSPARK_PYTHON" in error.hint
