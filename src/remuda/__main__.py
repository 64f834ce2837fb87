"""Run the `remuda` command as `python -m remuda`."""

import sys

from remuda.cli import main

sys.exit(main())
