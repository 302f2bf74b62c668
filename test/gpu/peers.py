#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan beside what people use today, in one run.

Usage: peers.py LIBGPULOAN [--gpuloan PATH] [--svg FILE] [--sizes BYTES,...] [--methods NAME,...] [--quick]

A tensor is handed to a worker, filled there and acknowledged, a fresh tensor each time. Methods:

  queue      torch.multiprocessing Queue (CUDA tensors by reduction)        core       cuda.core IPC buffers over a Queue
  pipe       the same reduction over a Pipe                                 shm        tensor.cpu(), share_memory_(), cuda()
  loans      gpuloan's C interface: a new loan each time, both sides block  module     gpuloan.py: a job, and the result it asks for
  turns      gpuloan's C interface: turns on one loan that stays open

The methods loans and turns are called from Python too, through ctypes, which adds to each of their calls. --gpuloan adds what a program in
C++ takes for the same: `gpuloan bench`, its cases loans (both loops turned by their callers) and turns.

Each figure comes from a process of its own with a time limit, so that one that hangs or crashes is a word in the table. Columns: the
median of each size; peak device memory for one tensor of n bytes; what the parent sees when the worker is killed while it writes, and
whether the memory comes back. Values are checked at the end of each measurement. --svg draws the table. The last line is
'N passed, N failed': a figure of gpuloan's that is missing, or a peak above n + 2 MiB, is a failure; the others' failures are results."""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "lib/python")]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KIB, 2 * MIB, 64 * MIB, GIB, 6 * GIB)
OTHERS, OURS = ("queue", "pipe", "core", "shm"), ("module", "loans", "turns")
TITLES = {"queue": "torch.multiprocessing, Queue", "pipe": "torch reduction over a Pipe", "core": "cuda.core IPC buffers, Queue",
          "shm": "cpu(), share_memory_(), cuda()", "module": "gpuloan.py, job and result", "loans": "gpuloan, a new loan each time",
          "turns": "gpuloan, turns on one loan", "bench-loans": "gpuloan in C++, a new loan each time",
          "bench-turns": "gpuloan in C++, turns on one loan"}
BENCHED = {"bench-loans": ("--case", "loans", "--loop", "caller"), "bench-turns": ("--case", "turns")}
BARS = (("loans", 12), ("turns", 35), ("bench-loans", 12), ("bench-turns", 35))  # times faster than pipe and core, 64 KiB and 2 MiB


def size_text(size):
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def time_text(us):
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1000:.1f} ms" if us >= 10000 else f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


# ---- Running the measurements -----------------------------------------------------------------------------------------------------

def measure(arguments, method, size, what, limit):
    """The measurement's answer, or {"failed": why}."""
    command = [sys.executable, str(HERE / "peers_side.py"), arguments.library, method, str(size), what]
    if arguments.quick:
        command.append("--quick")
    environment = dict(os.environ, GPULOAN_LIBRARY=arguments.library)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": f"nothing within {limit} s"}
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its worker, if that is left
    except ProcessLookupError:
        pass
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    words = [line for line in err.splitlines() if line.strip()]
    end = f"died of {signal.Signals(-process.returncode).name}" if process.returncode < 0 else f"exit code {process.returncode}"
    return {"failed": f"{end}: {words[-1].strip()[:150] if words else 'no word'}"}


def row(arguments, method, sizes):
    """{"latency": {size: answer}, "peak": answer, "kill": answer}"""
    out = {"latency": {}}
    for size in sizes:
        answer = out["latency"][size] = measure(arguments, method, size, "latency", 90)
        print(f"  {TITLES[method]:34} {size_text(size):>8}: {answer.get('failed') or time_text(answer['us'])}", flush=True)
    out["peak"] = measure(arguments, method, arguments.peak, "peak", 60)
    print(f"  {TITLES[method]:34} {size_text(arguments.peak):>8}: peak {out['peak'].get('failed') or peak_text(out['peak'], arguments.peak)}", flush=True)
    if method != "turns":  # the same as loans
        out["kill"] = measure(arguments, method, arguments.kill, "kill", 60)
        print(f"  {TITLES[method]:34} {size_text(arguments.kill):>8}: killed: {kill_text(out['kill'])}", flush=True)
    return out


def bench_row(arguments, method, sizes):
    """As row(), of the times alone."""
    command = [arguments.gpuloan, "bench", "--json", *BENCHED[method], *(word for size in sizes for word in ("--size", str(size)))]
    if arguments.quick:
        command.append("--quick")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = {each["bytes"]: {"us": each["gpuloan_us"][1]} for each in json.loads(done.stdout)["comparisons"]}
        why = done.stderr.strip()
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        found, why = {}, str(error)
    out = {"latency": {size: found.get(size, {"failed": why or "no figure"}) for size in sizes}}
    for size, answer in out["latency"].items():
        print(f"  {TITLES[method]:34} {size_text(size):>8}: {answer.get('failed') or time_text(answer['us'])}", flush=True)
    return out


def peak_text(answer, size):
    return answer.get("failed") or f"{answer['bytes'] / size:.2f} n"


def kill_text(answer):
    if "failed" in answer:
        return answer["failed"]
    told = "not told" if answer["told_ms"] is None else f"told after {answer['told_ms']:.0f} ms: {answer['how']}"
    return f"{told}; {'memory back' if answer['missing'] <= 2 * MIB else size_text(answer['missing'] // MIB * MIB) + ' not back'}"


def short(answer):
    return time_text(answer["us"]) if "us" in answer else "dies" if "SIG" in answer["failed"] else "fails"


def table(rows, sizes, arguments):
    lines = ["| | " + " | ".join(map(size_text, sizes)) + f" | peak for n = {size_text(arguments.peak)} | worker killed mid-write |",
             "| --- |" + " ---: |" * (len(sizes) + 1) + " --- |"]
    for method, found in rows.items():
        cells = [short(found["latency"][size]) for size in sizes] + [peak_text(found["peak"], arguments.peak) if "peak" in found else ""]
        lines.append(f"| {TITLES[method]} | " + " | ".join(cells) + f" | {kill_text(found['kill']) if 'kill' in found else ''} |")
    return lines + [f"{TITLES[method]}, {size_text(size)}: {answer['failed']}" for method, found in rows.items()
                    for size, answer in found["latency"].items() if "failed" in answer]


def bars(rows, sizes):
    for ours, bar in BARS:
        for other in ("pipe", "core"):
            for size in sizes:
                us = [rows.get(method, {}).get("latency", {}).get(size, {}).get("us") for method in (ours, other)]
                if size <= 2 * MIB and None not in us:
                    yield (f"G7 {TITLES[ours]}, {size_text(size)}: {us[1] / us[0]:.1f} times as fast as {TITLES[other]} "
                           f"(bar {bar}: {'met' if us[1] / us[0] >= bar else 'not met'})")


def judge(rows, sizes, arguments):
    """How many of gpuloan's own figures are there and as they have to be, and how many are not."""
    passed = failed = 0
    for method in (each for each in rows if each not in OTHERS):
        found = rows[method]
        checks = ["us" in found["latency"][size] for size in sizes]
        if "peak" in found:
            checks.append(found["peak"].get("bytes", 1 << 60) <= arguments.peak + 2 * MIB)
        if "kill" in found:
            checks.append("failed" not in found["kill"] and found["kill"]["told_ms"] is not None and found["kill"]["missing"] <= 2 * MIB)
        passed, failed = passed + sum(checks), failed + len(checks) - sum(checks)
    return passed, failed


# ---- The picture ------------------------------------------------------------------------------------------------------------------

COLOURS = {"queue": "#9a6b00", "pipe": "#c98b00", "core": "#a33b3b", "shm": "#777777", "module": "#3b7bbf", "loans": "#1f5f9f",
           "turns": "#0b3d6e", "bench-loans": "#2f8f5f", "bench-turns": "#0f5f3a"}
STYLE = "font-family='sans-serif' fill='#222'"


def tick(power):
    unit, name = next((unit, name) for unit, name in ((6, "s"), (3, "ms"), (0, "us"), (-3, "ns")) if power >= unit)
    return f"{10 ** (power - unit)} {name}"


def picture(rows, sizes):
    """Time by size, both in powers; what has no figure at a size ends with a cross."""
    import math
    width, height, left, right, top, bottom = 940, 520, 70, 300, 60, 50
    times = [answer["us"] for found in rows.values() for answer in found["latency"].values() if "us" in answer] or [1]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times) * 1.01))
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(size):
        return left + (width - left - right) * ((math.log2(size) - first) / (last - first) if last > first else 0.5)

    def y(us):
        return height - bottom - (height - top - bottom) * (math.log10(us) - low) / (high - low)

    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>",
           "<title>Handing a tensor to a worker that fills it</title>", f"<rect width='{width}' height='{height}' fill='white'/>",
           f"<text x='{left}' y='28' font-size='17' {STYLE}>A tensor handed to a worker, filled there and acknowledged: time by size</text>"]
    for power in range(low, high + 1):
        out.append(f"<line x1='{left}' x2='{width - right}' y1='{y(10 ** power):.1f}' y2='{y(10 ** power):.1f}' stroke='#ddd'/>"
                   f"<text x='{left - 8}' y='{y(10 ** power) + 4:.1f}' font-size='12' text-anchor='end' {STYLE}>{tick(power)}</text>")
    for size in sizes:
        out.append(f"<text x='{x(size):.1f}' y='{height - bottom + 20}' font-size='12' text-anchor='middle' {STYLE}>{size_text(size)}</text>")
    labels = []
    for method, found in rows.items():
        points = [(x(size), y(answer["us"])) for size, answer in found["latency"].items() if "us" in answer]
        if not points:
            continue
        colour = COLOURS[method]
        out.append(f"<polyline fill='none' stroke='{colour}' stroke-width='{3 if method in OURS else 1.6}' points='"
                   + " ".join(f"{px:.1f},{py:.1f}" for px, py in points) + "'/>")
        out += [f"<circle cx='{px:.1f}' cy='{py:.1f}' r='3' fill='{colour}'/>" for px, py in points]
        px, py = points[-1]
        title = TITLES[method]
        if len(points) < len(sizes):
            done = max(size for size, answer in found["latency"].items() if "us" in answer)
            out.append(f"<text x='{px + 6:.1f}' y='{py + 6:.1f}' font-size='18' fill='{colour}' font-family='sans-serif'>&#215;</text>")
            title += f" (to {size_text(done)})"
        labels.append([py, px, title, colour])
    labels.sort()
    for above, below in zip(labels, labels[1:]):
        below[0] = max(below[0], above[0] + 16)  # no two on one another
    for py, _, title, colour in labels:
        out.append(f"<text x='{width - right + 14}' y='{py + 4:.1f}' font-size='13' font-family='sans-serif' fill='{colour}'>{title}</text>")
    return "\n".join(out + ["</svg>", ""])


def main(arguments):
    sizes = [int(each) for each in arguments.sizes.split(",")] if arguments.sizes else list(SIZES)
    arguments.peak, arguments.kill = min(GIB, sizes[-1]), min(GIB, sizes[-1])
    rows = {method: row(arguments, method, sizes) for method in arguments.methods.split(",")}
    if arguments.gpuloan:
        rows |= {method: bench_row(arguments, method, sizes) for method in BENCHED}
    print("\n".join(["", *table(rows, sizes, arguments), "", *bars(rows, sizes)]))
    if arguments.svg:
        pathlib.Path(arguments.svg).write_text(picture(rows, sizes))
    passed, failed = judge(rows, sizes, arguments)
    print(f"{passed} passed, {failed} failed")
    return 0 if failed == 0 and passed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("library")
    parser.add_argument("--gpuloan")
    parser.add_argument("--svg")
    parser.add_argument("--sizes")
    parser.add_argument("--methods", default=",".join(OTHERS + OURS))
    parser.add_argument("--quick", action="store_true")
    sys.exit(main(parser.parse_args()))
