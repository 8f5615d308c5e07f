"""The table at the end of a campaign, from whatever its folder holds."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.campaign.runner import GRAPH_TOKENS

Line = tuple[str, str, str]  # what, found, wanted
MIN_BANDWIDTH_SHARE = 0.7  # of the copy rate: what decode attention is to reach
PROFILES, STEPS = "calibration*/*.yaml", "calibration*/steps.csv.gz"
VALIDATION_HEAD, HELD_OUT = "Live on ", "held out, "  # of lines that other commands print
MANY_TOKENS = 65536  # of context, from which on it is to


def write_report(folder: Path) -> str:
    """Write `summary.txt` and return its text; a part that left nothing is left out."""
    lines: list[Line] = []
    sections = (
        _parts,
        _missing,
        _checks,
        _ceilings,
        _steps,
        _mixed_graphs,
        _attention,
        _prefill,
        _calibration,
    )
    for section in sections:
        lines += _section_lines(section, folder)
    widths = [max((len(line[k]) for line in lines), default=0) for k in range(2)]
    text = "\n".join(
        f"{what:<{widths[0]}}  {found:<{widths[1]}}  {wanted}".rstrip()
        for what, found, wanted in lines
    )
    for name in sorted(folder.glob("validate-*.log")):
        said = name.read_text().splitlines()
        heads = [number for number, line in enumerate(said) if line.startswith(VALIDATION_HEAD)]
        text += f"\n\n{name.stem}\n" + "\n".join(said[heads[-1] if heads else -1 :])
    (folder / "summary.txt").write_text(text + "\n")
    return text


def _section_lines(section: Callable[[Path], Iterator[Line]], folder: Path) -> list[Line]:
    """Make a section; a damaged file must not cost the others."""
    lines: list[Line] = []
    try:
        lines.extend(section(folder))  # those before an error count
    except FileNotFoundError:
        pass  # its part left nothing, as the lines of the parts tell
    except (OSError, ValueError, KeyError, IndexError) as error:
        lines.append((section.__name__.strip("_"), f"{type(error).__name__}: {error}"[:60], ""))
    return lines


def _parts(folder: Path) -> Iterator[Line]:
    record = json.loads((folder / "campaign.json").read_text())
    for part in record["parts"]:
        yield part["name"], f"{part['status']} {part['seconds']:.0f} s", part["note"]


def _missing(folder: Path) -> Iterator[Line]:
    """Tell what a whole campaign would have left and this one has not."""
    record = json.loads((folder / "campaign.json").read_text())
    done = {part["name"] for part in record["parts"] if part["status"] == "ok"}
    if lacking := [name for name in record.get("planned", ()) if name not in done]:
        yield "MISSING", ", ".join(lacking), "all parts"
    if not any(folder.glob(PROFILES)):
        rows = "measured steps to refit" if any(folder.glob(STEPS)) else "nor measured steps"
        yield "MISSING", f"no profile of its own, {rows}", "a profile"


def _checks(folder: Path) -> Iterator[Line]:
    lines = (folder / "checks.log").read_text().splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]
    rows = [row for row in said if "check" in row]
    planned = sum(row.get("planned", 0) for row in said)
    wrong = [row for row in rows if not row["ok"]]
    passed = len(rows) - len(wrong)
    yield "checks passed", f"{passed} of {max(planned, len(rows))}", "all"
    if len(rows) < planned:
        yield "MISSING", f"{planned - len(rows)} checks that did not run", ""
    for row in wrong:
        yield row["check"], f"error {row['error']:.2g}", f"at most {row['limit']:.2g}"


def _read(folder: Path) -> list[dict[str, str]]:
    with (folder / "kernels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _copy_rate(folder: Path) -> float:
    return next((float(row["gb_s"]) for row in _read(folder) if row["kernel"] == "copy"), 0.0)


def _ceilings(folder: Path) -> Iterator[Line]:
    for row in _read(folder):
        if row["kernel"] == "copy":
            yield "copy", f"{float(row['gb_s']):.3g} GB/s", ""
        if row["kernel"] == "matmul":
            yield "matmul", f"{float(row['tflop_s']):.3g} TFLOP/s", ""
        if row["note"]:
            yield row["kernel"], row["note"][:60], ""


def _steps(folder: Path) -> Iterator[Line]:
    for row in _read(folder):
        if row["kernel"] == "step":
            kernels = row.get("kernels_us") or row["us"]
            times = [f"{float(row[key]) / 1e3:.2f}" for key in ("us", "host_us", "wall_us")]
            wanted = "5.6 ms" if (row["rows"], row["context"]) == ("1", "1024") else ""
            what = f"step {row['variant']} {row['rows']} tokens, context {row['context']}"
            found = f"{times[0]} ms, host {times[1]}, wall {times[2]}"
            yield what, f"{found}, kernels alone {float(kernels) / 1e3:.2f}", wanted


def _mixed_graphs(folder: Path) -> Iterator[Line]:
    """Tell up to how many tokens steps with prompts win as CUDA graphs."""
    most = (folder / GRAPH_TOKENS).read_text().strip()
    yield "graphs of steps with prompts", f"win to {most} tokens", ""


def _attention(folder: Path) -> Iterator[Line]:
    """Yield decode attention, as a share of what a copy moves."""
    copy = _copy_rate(folder)
    for row in _read(folder):
        if row["kernel"].startswith("decode") and row["us"]:
            share = float(row["gb_s"]) / copy if copy else 0.0
            wanted = f"{MIN_BANDWIDTH_SHARE:.0%}" if int(row["tokens"]) >= MANY_TOKENS else ""
            found = f"{float(row['us']):.1f} us, {share:.0%} of copy"
            yield f"{row['kernel']} {row['rows']} x {row['context']}", found, wanted


def _prefill(folder: Path) -> Iterator[Line]:
    for row in _read(folder):
        if row["kernel"] == "prefill" and row["us"]:
            what = f"prefill {row['rows']} after {row['context']}, {row['variant']}"
            yield what, f"{float(row['us']):.0f} us, {float(row['tflop_s']):.3g} TFLOP/s", ""


def _calibration(folder: Path) -> Iterator[Line]:
    """Yield the errors of the profile on steps that its fit had not seen."""
    logs = [folder / f"{name}.log" for name in ("calibration", "refit")]
    for log in (log for log in logs if log.exists()):
        lines = log.read_text(errors="replace").splitlines()
        said = dict(line.split(": ", 1) for line in lines if line.startswith(HELD_OUT))
        yield from ((what, errors, "") for what, errors in said.items())
