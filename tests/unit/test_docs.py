"""The documentation names what there is: links lead somewhere, and no setting, option or event is left out."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from shoal import cli, verb_parser
from shoal.train.settings import Settings
from shoal.verbs import launching
from shoal.version import __version__

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DOCS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
EVERYTHING = "\n".join(DOCS.values())

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name):
    for link in LINK.findall(DOCS[name]):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors_of(path.read_text()), f"{name} links to {link}"


@pytest.mark.parametrize("name", DOCS)
def test_code_that_is_named_exists(name):
    """`train/tree.py` and the like are paths under src/shoal, or from the root."""
    for path in re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)\b", DOCS[name]):
        assert (SOURCE / path).exists() or (ROOT / path).exists(), f"{name} names {path}"


def test_every_setting_is_described():
    rows = set(re.findall(r"^\| `(\w+)` \|", DOCS["docs/training.md"], re.MULTILINE))
    missing = {field.name for field in fields(Settings)} - rows
    assert not missing, f"docs/training.md has no row for {missing}"


def test_defaults_are_those_of_the_code():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", DOCS["docs/training.md"], re.MULTILINE))
    for field in fields(Settings):
        shown = rows[field.name].strip("` \"'")
        if shown not in ("–", "chosen"):
            assert shown in (str(field.default), f"{field.default:g}" if isinstance(field.default, float) else "")


def flags_in(file: Path) -> set[str]:
    """Every option of the command line: texts that begin with a dash, where options are declared."""
    flags = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"--?[a-zA-Z][a-z-]*", node.value)
        ):
            flags.add(node.value)
    return flags


@pytest.mark.parametrize("file", ["cli.py", "demo/__init__.py"])
def test_every_option_is_described(file):
    flags = flags_in(SOURCE / file)
    missing = {flag for flag in flags if not re.search(rf"`([^`]* )?{flag}(?![\w-])", EVERYTHING)}
    assert not missing, f"options of {file} that no page mentions: {missing}"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_is_described(verb):
    assert f"shoal {verb}" in EVERYTHING
    assert f"shoal {verb}" in cli.HELP


def kinds_of_events() -> set[str]:
    """First arguments of the calls that write events."""
    kinds = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("event", "_write", "_tell", "_make"):
                kinds |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return kinds


def test_every_kind_of_event_is_in_the_glossary():
    kinds = kinds_of_events()
    assert {"run_started", "settings", "checkpoint_saved", "progress"} <= kinds
    missing = {kind for kind in kinds if f"| `{kind}` |" not in DOCS["docs/glossary.md"]}
    assert not missing


@pytest.mark.parametrize("name", DOCS)
def test_no_path_of_one_machine(name):
    found = re.findall(r"(?<![\w.~])/(?:work|root|workspace|mnt|Users)/\S*|/tmp/\S+", DOCS[name])
    assert not found


def test_the_readme_names_both_commands():
    readme = DOCS["README.md"]
    assert re.search(r"^    make demo\b", readme, re.MULTILINE)
    assert re.search(r"^    make test\b", readme, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    for verb in re.findall(r"(?:^    |`)make (\w+)", readme + DOCS["CONTRIBUTING.md"], re.MULTILINE):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"there is no `make {verb}`"


def test_decisions_are_numbered_and_have_their_four_parts():
    pages = [name for name in DOCS if name.startswith("docs/decisions/")]
    assert [int(Path(name).name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    for name in pages:
        for part in ("**Context.**", "**Decision.**", "**What we gave up.**", "**How we would know it was wrong.**"):
            assert part in DOCS[name], f"{name} lacks {part}"


def test_examples_that_pages_name_exist():
    for path in set(re.findall(r"examples/\w+\.py", EVERYTHING)):
        assert (ROOT / path).exists(), path


def test_the_manifests_for_kuberay_are_some():
    """Kubernetes would say so late. What is named in them is what the text and the package say."""
    yaml = pytest.importorskip("yaml")
    texts = re.findall(r"^```yaml\n(.*?)^```", DOCS["docs/clusters.md"], re.MULTILINE | re.DOTALL)
    job, cluster = map(yaml.safe_load, texts)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    for spec in (job["spec"]["rayClusterSpec"], cluster["spec"]):
        head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
        assert spec["enableInTreeAutoscaling"] is True
        assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
        for group in (head, workers):
            pod = group["template"]["spec"]
            mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
            assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
            assert {mount["mountPath"] for mount in mounts} == {"/job"}
        assert f"ray=={spec['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()


def test_what_the_manifests_for_kuberay_run_is_kept_on_the_volume():
    """The options are those of the command line, and a pod that goes takes no checkpoint along."""
    yaml = pytest.importorskip("yaml")
    texts = re.findall(r"^```yaml\n(.*?)^```", DOCS["docs/clusters.md"], re.MULTILINE | re.DOTALL)
    job, cluster = map(yaml.safe_load, texts)
    command = job["spec"]["entrypoint"].split()
    assert command[:2] == ["shoal", "run"]
    ours, (script,) = verb_parser.split_at_script(command[2:])
    options = launching._run_parser().parse_args(ours)
    assert launching.parse_range(options.num_workers) == (2, 8)
    assert options.log_dir.startswith("/job/")
    assert script.startswith("/job/")
    (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    (home,) = [variable["value"] for variable in container["env"] if variable["name"] == "SHOAL_HOME"]
    assert home.startswith("/job/")


@pytest.mark.parametrize("name", ["docs/clusters.md", "docs/cluster-of-workstations.md"])
def test_the_wheel_that_pages_name_is_the_one_that_is_built(name):
    assert set(re.findall(r"shoal-[\d.]+-py3-none-any\.whl", DOCS[name])) == {f"shoal-{__version__}-py3-none-any.whl"}
