from __future__ import annotations

import sys
from pathlib import Path

# For `run_world`: a saved run with a scripted model, which the tests of the runtime use, too.
sys.path.append(str(Path(__file__).parent.parent / "runtime"))
