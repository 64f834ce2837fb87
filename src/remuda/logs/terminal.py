"""The progress of a run: a live view on a terminal, and occasional lines if output goes to a file or pipe.

    with Terminal(total_steps=200_000, title="ppo CartPole-v1") as terminal:
        terminal.begin("sampling the first 2,048 steps")
        while training:
            terminal.tick()                                                          # cheap, to be called often
            terminal.update({"rollout/ep_rew_mean": 21.5, "time/fps": 9000.0}, steps)
        terminal.note(where_time_went({"env": 4.1, "inference": 2.2, "update": 3.3, "wait": 0.4}))

If the terminal disappears (a closed window, `| head`), the view ends and training continues. The view uses no
thread: `update` draws at most four times a second, and `tick` draws if the last update was long ago.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

REFRESH_SECONDS = 0.25
LINE_SECONDS = 5.0
LINES_PER_RUN = 10  # minimum number of lines if output goes to a file or pipe, even in a run of a few seconds
TICK_SECONDS = 0.5  # time between two draws on a terminal while `update` is not called
LONG_SECONDS = 1.0  # an activity that takes longer is shown with its duration
# Seconds between lines in a file or pipe while no metrics arrive. The first such line comes after LINE_SECONDS.
SILENT_SECONDS = 60.0
RATE_SECONDS = 30.0  # the remaining time is computed from the steps done within this period
SAMPLE_SECONDS = 0.5
TRAINING = "sampling and learning"  # the activity that is shown after `update`, until `begin` names another activity

TIMES = {"env": "env", "inference": "inference", "update": "update", "wait": "waiting", "evaluation": "evaluation"}


def where_time_went(seconds: Mapping[str, float]) -> str:
    """Return a line with each activity's share of the time, in percentages that add up to 100.

    >>> where_time_went({"wait": 0.4, "env": 4.1, "inference": 2.2, "update": 3.3})
    'time: env 41 %, inference 22 %, update 33 %, waiting 4 %'
    """
    order = [*TIMES, *(name for name in seconds if name not in TIMES and name != "other"), "other"]
    spent = {name: seconds[name] for name in order if seconds.get(name, 0.0) > 0.0}
    total = sum(spent.values())
    if total <= 0.0:
        return "time: nothing measured"
    exact = {name: 100.0 * value / total for name, value in spent.items()}
    percent = {name: math.floor(share) for name, share in exact.items()}
    # Round up the largest remainders, so that the percentages add up to 100.
    for name in sorted(exact, key=lambda name: percent[name] - exact[name])[: 100 - sum(percent.values())]:
        percent[name] += 1
    return "time: " + ", ".join(f"{TIMES.get(name, name)} {share} %" for name, share in percent.items())


class Terminal:
    """The view of one run's progress towards `total_steps`."""

    def __init__(
        self,
        total_steps: int,
        title: str,
        plain: bool | None = None,
        start_steps: int = 0,
        file: TextIO | None = None,
    ) -> None:
        self.total_steps = max(1, total_steps)
        self.title = title
        now = time.monotonic()
        # (time, steps) of the calls of `update` within the last RATE_SECONDS, preceded by the last call before that
        # period. A call less than SAMPLE_SECONDS after the previous entry adds no entry. The initial entry is the
        # start of this process, so that the rate of a resumed run does not include earlier processes.
        self._rates: deque[tuple[float, int]] = deque([(now, start_steps)])
        self._updated = (now, start_steps)
        self._activity, self._since = "starting up", now
        self._steps = start_steps
        self._metrics: dict[str, float] = {}
        self._drawn_at = -math.inf
        self._drawn_steps: int | None = None
        self._output = _Output(sys.stdout if file is None else file)
        if plain is None:
            plain = not self._output.isatty() or os.environ.get("TERM", "dumb") == "dumb"
        self._tick_at = now + (LINE_SECONDS if plain else TICK_SECONDS)
        self._live = None if plain else self._start_live()

    def update(self, metrics: Mapping[str, float], steps: int) -> None:
        """Show `metrics` of the run after `steps` env steps; metrics that are not given keep their last value."""
        self._metrics.update(metrics)
        self._steps = steps
        now = time.monotonic()
        self._activity, self._since, self._updated = TRAINING, now, (now, steps)
        self._tick_at = now + (TICK_SECONDS if self._live is not None else LINE_SECONDS)
        if now - self._rates[-1][0] >= SAMPLE_SECONDS:
            self._rates.append(self._updated)
            while len(self._rates) > 2 and self._rates[1][0] <= now - RATE_SECONDS:
                self._rates.popleft()
        if self._live is not None:
            if now - self._drawn_at >= REFRESH_SECONDS:
                self._drawn_at = now
                self._live.refresh()
        elif now - self._drawn_at >= LINE_SECONDS or self._part(steps) > self._part(self._drawn_steps or 0):
            self._print_line(now)

    def begin(self, activity: str) -> None:
        """Set the current activity. It is shown with its duration if `update` is not called within LONG_SECONDS."""
        now = time.monotonic()
        self._activity, self._since = activity, now
        self._tick_at = now + (TICK_SECONDS if self._live is not None else LINE_SECONDS)
        if len(self._rates) == 1:  # before the first update: exclude the start-up time from the rate
            self._rates[0] = (now, self._steps)

    def tick(self) -> None:
        """Redraw the view if the last update was long ago. Most calls only read the clock, which takes 0.2 us."""
        now = time.monotonic()
        if now < self._tick_at:
            return
        if self._live is not None:
            self._tick_at = now + TICK_SECONDS
            self._live.refresh()
        else:
            self._tick_at = now + SILENT_SECONDS
            self._print_line(now)

    def note(self, line: str) -> None:
        """Print a line that stays on the terminal, above the progress bar."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            self._output.write(line + "\n")
            self._output.flush()

    def close(self) -> None:
        """Draw the last state and restore the terminal."""
        self._tick_at = math.inf
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._metrics and self._drawn_steps != self._steps:
            self._print_line(time.monotonic())
        self._metrics = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def parts(self) -> list[str]:
        """Return the texts to show with the progress, such as "9,000 steps/s", the most important text first."""
        parts = []
        if self._has("rollout/ep_rew_mean"):
            parts.append("return " + self._spread("rollout/ep_rew_mean", "rollout/ep_rew_std"))
        if self._has("rollout/ep_len_mean"):
            parts.append(f"length {self._metrics['rollout/ep_len_mean']:,.0f}")
        if self._has("time/fps"):
            parts.append(f"{self._metrics['time/fps']:,.0f} steps/s")
        if (left := self._seconds_left()) is not None:
            parts.append(f"{clock(left)} left")
        if (waited := time.monotonic() - self._since) >= LONG_SECONDS and self._tick_at < math.inf:
            parts.append(f"{self._activity}: {clock(waited)} so far")
        if self._has("eval/mean_reward"):
            spread = self._spread("eval/mean_reward", "eval/std_reward")
            parts.append(f"eval {spread} at {self._metrics['eval/steps']:,.0f}")
        if self._metrics.get("rollout/restarts", 0.0) > 0.0:
            parts.append(f"restarts {self._metrics['rollout/restarts']:,.0f}")
        return parts

    @property
    def percent(self) -> int:
        return min(100, 100 * self._steps // self.total_steps)

    @property
    def steps(self) -> int:
        return self._steps

    def _has(self, name: str) -> bool:
        return math.isfinite(self._metrics.get(name, math.nan))

    def _spread(self, mean: str, deviation: str) -> str:
        text = number(self._metrics[mean])
        return f"{text} ± {number(self._metrics[deviation])}" if self._has(deviation) else text

    def _seconds_left(self) -> float | None:
        """Return the estimated seconds until the last step, from the recent rate; None while no rate is known."""
        since, steps_then = self._rates[0]
        now, steps = self._updated
        if steps <= steps_then or now <= since:
            return None
        return max(0, self.total_steps - steps) * (now - since) / (steps - steps_then)

    def _part(self, steps: int) -> int:
        return LINES_PER_RUN * steps // self.total_steps

    def _print_line(self, now: float) -> None:
        self._drawn_at, self._drawn_steps = now, self._steps
        start = f"{self._steps:,} of {self.total_steps:,} steps ({self.percent} %)"
        self._output.write("  ".join([start, *self.parts()]) + "\n")
        self._output.flush()

    def _start_live(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        # auto_refresh is off, because rich's thread would take CPU time from envs and torch, and outlive a crash.
        console = Console(file=cast("TextIO", self._output), force_terminal=True)
        live = Live(
            _View(self),
            console=console,
            auto_refresh=False,
            # A `print` in the user's code appears above the progress bar.
            redirect_stdout=self._output.wraps(sys.stdout),
            # If the user redirects stderr (`2> FILE`), errors go to that file only.
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        live.start(refresh=True)
        return live


class _View:
    """What rich draws for a `Terminal`: the progress bar, and below it the texts of `parts`, wrapped to the width."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        terminal, width = self._terminal, options.max_width
        title = Text(terminal.title, style="bold", no_wrap=True, overflow="ellipsis")
        count = Text(f"{terminal.percent:3d} %  {terminal.steps:,} / {terminal.total_steps:,}", no_wrap=True)
        bar = ProgressBar(total=terminal.total_steps, completed=min(terminal.steps, terminal.total_steps))
        row = Table.grid(padding=(0, 2), expand=True)
        if len(title) + len(count) + 14 <= width:
            row.add_column()
            row.add_column(ratio=1)
            row.add_column()
            row.add_row(title, bar, count)
            yield row
        else:
            yield title
            row.add_column(ratio=1)
            row.add_column()
            row.add_row(bar, count if len(count) + 10 <= width else Text(f"{terminal.percent} %", no_wrap=True))
            yield row
        line = ""
        for part in terminal.parts():
            if line and len(line) + 3 + len(part) > width:
                yield Text(line, no_wrap=True, overflow="ellipsis")
                line = part
            else:
                line = f"{line}   {part}" if line else part
        yield Text(line, no_wrap=True, overflow="ellipsis")


class _Output(io.TextIOBase):
    """Wraps the file that the view is written to. After a write fails, later output is dropped without error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # tells rich which characters it may draw
        return getattr(self._file, "encoding", None) or "utf-8"

    def wraps(self, file: TextIO | None) -> bool:
        return self._file is file

    def isatty(self) -> bool:
        try:
            return self._file.isatty()
        except ValueError:  # the file is closed
            return False

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._file.write(self._encodable(text))
            except (OSError, ValueError):
                self._on_gone()
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._file.flush()
            except (OSError, ValueError):
                self._on_gone()

    def _encodable(self, text: str) -> str:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return text.replace("±", "+-").encode(self.encoding, "replace").decode(self.encoding)
        return text

    def _on_gone(self) -> None:
        """Redirect the file to /dev/null, so that its buffered text and later prints can be flushed without error."""
        self._gone = True
        try:
            descriptor = self._file.fileno()
        except (OSError, ValueError):  # the output is not a real file, or is closed
            return
        devnull = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(devnull, descriptor)
        finally:
            os.close(devnull)


def number(value: float) -> str:
    """Format a number with four significant digits, or as a whole number if it is between 1,000 and 1e9.

    >>> [number(value) for value in (0.01234, -21.5, 312.42, 1234567.8, 3e9)]
    ['0.01234', '-21.5', '312.4', '1,234,568', '3e+09']
    """
    if 1000.0 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def clock(seconds: float) -> str:
    """Format a duration in seconds.

    >>> clock(5), clock(3725), clock(200_000)
    ('0:05', '1:02:05', '2 d 7:33:20')
    """
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{hours}:{minutes:02d}:{rest:02d}" if days or hours else f"{minutes}:{rest:02d}"
    return f"{days} d {text}" if days else text
