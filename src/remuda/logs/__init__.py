"""Meters, metric writers and the terminal view. Importing this package loads neither torch nor Gymnasium."""

from remuda.logs.meters import Window
from remuda.logs.terminal import Terminal, where_time_went
from remuda.logs.writers import MetricsFile, TensorBoard, WandB, Writer, read_metrics

__all__ = [
    "MetricsFile",
    "Terminal",
    "TensorBoard",
    "WandB",
    "Window",
    "Writer",
    "read_metrics",
    "where_time_went",
]
