"""Draw the picture of the README: an agent at several checkpoints of one run, beside the run's learning curve.

    make picture                                                 # trains LunarLander-v3 and draws the picture
    .venv/bin/python bench/picture.py runs/picture --checkpoints 50,200,1000 --out docs/images/lunarlander.gif

`--checkpoints` are thousands of steps; the checkpoint nearest to each is used. Every checkpoint plays an episode with
the same seed. The script fails if the file would exceed 300 kB, because a README is loaded over slow connections too.
"""

import argparse
import io
from contextlib import closing
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

import remuda
from remuda.logs.writers import STEP, read_metrics
from remuda.runs.plots import COLORS, NAMES, RETURN

MAX_BYTES = 300_000
SIZE = (420, 280)  # pixels of the env's frames, and of the curve beside them
FRAMES_PER_SECOND = 12
PLAYED_FASTER = 2  # env steps are shown at this multiple of the env's own rate
MAX_FRAMES = 60  # largest number of frames for one checkpoint
HELD_FRAMES = 8  # repetitions of the last frame, so that the reader sees how an episode ends
PALETTE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoints", default="50,200,1000", help="thousands of steps")
    parser.add_argument("--seed", type=int, default=1, help="of the episode that every checkpoint plays")
    parser.add_argument("--out", type=Path, default=Path("docs/images/lunarlander.gif"))
    arguments = parser.parse_args()
    steps, returns = read_curve(arguments.run)
    pictures = []
    for thousands in arguments.checkpoints.split(","):
        step = nearest_checkpoint(arguments.run, 1000 * int(thousands))
        frames, total = play(arguments.run, step, arguments.seed)
        curve = draw_curve(steps, returns, step)
        pictures += [put_together(frame, curve, step, total) for frame in frames]
    save(pictures, arguments.out)
    print(f"{arguments.out}: {len(pictures)} frames, {arguments.out.stat().st_size:,} bytes")


def read_curve(run: Path) -> tuple[np.ndarray, np.ndarray]:
    rows = [row for row in read_metrics(run) if RETURN in row]
    return np.array([row[STEP] for row in rows]), np.array([row[RETURN] for row in rows])


def nearest_checkpoint(run: Path, step: int) -> int:
    found = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    return min(found, key=lambda each: abs(each - step))


def play(run: Path, step: int, seed: int) -> tuple[list[Image.Image], float]:
    """Play one greedy episode with the checkpoint of `step`; return frames and the episode's return."""
    opened = remuda.Run(run, checkpoint=step)
    _, spec, _ = opened.setup()
    policy, state, total, is_over, frames = opened.policy(), None, 0.0, False, []
    with closing(spec.build(render_mode="rgb_array")) as env:
        obs, _ = env.reset(seed=seed)
        while not is_over:
            frames.append(Image.fromarray(env.render()).resize(SIZE, Image.Resampling.LANCZOS))
            action, state = policy.act(obs, state)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            is_over = terminated or truncated
        frames.append(Image.fromarray(env.render()).resize(SIZE, Image.Resampling.LANCZOS))
        stride = max(1, round(env.metadata.get("render_fps", 30) * PLAYED_FASTER / FRAMES_PER_SECOND))
    return [*frames[:-1:stride][:MAX_FRAMES], *[frames[-1]] * HELD_FRAMES], total


def draw_curve(steps: np.ndarray, returns: np.ndarray, now: int) -> Image.Image:
    """Draw the curve up to `now` in full color and the rest of it pale."""
    figure = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps / 1e3, returns, color=COLORS[0], alpha=0.3, lw=1.2)
    axes.plot(steps[steps <= now] / 1e3, returns[steps <= now], color=COLORS[0], lw=1.6)
    axes.plot(now / 1e3, np.interp(now, steps, returns), "o", color=COLORS[1], ms=7)
    axes.set_xlabel("thousand environment steps", fontsize=9)
    axes.set_ylabel(NAMES[RETURN], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    data = io.BytesIO()
    figure.savefig(data, dpi=100, format="png")
    return Image.open(data).convert("RGB").resize(SIZE)


def put_together(frame: Image.Image, curve: Image.Image, step: int, total: float) -> Image.Image:
    picture = Image.new("RGB", (2 * SIZE[0], SIZE[1]), "white")
    picture.paste(frame, (0, 0))
    picture.paste(curve, (SIZE[0], 0))
    label = f"after {step:,} steps: return {total:.0f}"
    ImageDraw.Draw(picture).text((8, 6), label, fill="white", font=ImageFont.load_default(size=15))
    return picture


def save(pictures: list[Image.Image], out: Path) -> None:
    """Write a GIF in which all frames share one palette, so that pixels that do not change cost nothing."""
    distinct = pictures[:: max(1, len(pictures) // 12)]
    sheet = Image.new("RGB", (distinct[0].width, distinct[0].height * len(distinct)))
    for row, picture in enumerate(distinct):
        sheet.paste(picture, (0, row * picture.height))
    palette = sheet.quantize(PALETTE, method=Image.Quantize.MAXCOVERAGE)  # keeps rare colors
    frames = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    data = io.BytesIO()
    frames[0].save(
        data,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=1000 // FRAMES_PER_SECOND,
        loop=0,
        optimize=True,
    )
    if data.tell() > MAX_BYTES:
        raise SystemExit(f"the picture would take {data.tell():,} bytes: show fewer checkpoints or frames.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data.getvalue())


if __name__ == "__main__":
    main()
