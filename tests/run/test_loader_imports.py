"""The ledger is for everyone who plans, so it must not cost an import of torch."""

import subprocess
import sys


def test_planning_imports_neither_torch_nor_pyarrow() -> None:
    script = "import sys, shoal.data.ledger, shoal.data.shares; print(*{'torch', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_loading_imports_neither_pyarrow_nor_datasets() -> None:
    script = "import sys, shoal.data.loader; print(*{'datasets', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
