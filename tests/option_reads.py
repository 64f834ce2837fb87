"""Record which options a process reads, to compare them with the options that are declared to be used."""

import os
import sys
from collections.abc import Callable
from typing import Any


def record_reads(on_read: Callable[[str], None]) -> Callable[[], None]:
    """Call `on_read` with the name of each option that is read, until the returned function is called.

    Reads by the package `config` itself do not count, because it checks, copies and writes every option. The
    properties of options classes do count, because other packages call them.
    """
    from remuda.config.fields import Checked

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith("_") or name not in type(self).__dataclass_fields__:
            return value
        code = sys._getframe(1).f_code
        folder, module = os.path.split(code.co_filename)
        is_copy = module in ("dataclasses.py", "<string>") or code.co_name == "__post_init__"
        is_check = os.path.basename(folder) == "config" and not module.endswith("_options.py")
        if not (is_copy or is_check):
            on_read(type(self)._group + name)
        return value

    Checked.__getattribute__ = read  # type: ignore[method-assign]

    def stop() -> None:
        del Checked.__getattribute__

    return stop
