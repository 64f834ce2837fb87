"""Record the options that a process and its workers read, in the file that RECORDED_OPTIONS names.

Python imports this module when it starts, if this directory is on PYTHONPATH.
"""

import os
from pathlib import Path

if "RECORDED_OPTIONS" in os.environ:
    from option_reads import record_reads

    seen = set()

    def write(name):
        if name not in seen:
            seen.add(name)
            with Path(os.environ["RECORDED_OPTIONS"]).open("a") as file:
                file.write(name + "\n")

    record_reads(write)
