"""`python -m remuda` is the `remuda` command."""

import sys

from remuda.cli import main

sys.exit(main())
