"""What can be said without torch loads without torch."""

import subprocess
import sys

CHECK = """
import importlib, pkgutil, sys
import longspan.errors, longspan.spec
for module in pkgutil.walk_packages(longspan.spec.__path__, "longspan.spec."):
    importlib.import_module(module.name)
print([name for name in ("torch", "transformers", "pyarrow") if name in sys.modules])
"""


def test_spec_loads_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
