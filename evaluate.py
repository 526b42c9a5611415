"""The earlier name of eval.py.

Hugging Face's package ``evaluate``, which lm-evaluation-harness imports, has this name too. An import finds this file
first where Python starts in this folder, and gets the package.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

if __name__ == "__main__":
    print(f"evaluate.py is now eval.py: python eval.py {' '.join(sys.argv[1:])}".rstrip(), file=sys.stderr)
    sys.exit(2)

_here = Path(__file__).parent
_spec = PathFinder.find_spec("evaluate", [path for path in sys.path if Path(path).resolve() != _here])
if _spec is None or _spec.loader is None:
    raise ModuleNotFoundError("No module named 'evaluate'; evaluate.py of this folder is now eval.py", name="evaluate")
sys.modules["evaluate"] = _module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
