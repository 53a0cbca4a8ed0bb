"""`pit perf mfu`: a speed related to the peak of its devices."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import LocalPath, rows_format_option

COLUMNS = ("convention", "mfu", "tflops_per_device", "flops_per_token", "device", "dtype", "peak_tflops", "peak_source")


@click.command()
@click.argument("model", metavar="[MODEL.toml]", required=False, type=LocalPath())
@click.option("--tokens-per-s", type=float, help="Of the main tower, over all devices.")
@click.option("--devices", type=int, default=1, show_default=True, help="Number of devices.")
@click.option("--device", default="", help='As its driver names it: "NVIDIA H100 80GB HBM3".')
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the products' inputs. The table has peaks of bf16.",
)
@click.option("--peak", type=float, help="TFLOP/s of one device, in place of the table's.")
@click.option("--calibrate", is_flag=True, help="Measure products on this machine's device instead.")
@rows_format_option
def mfu(
    model: Path | None,
    tokens_per_s: float | None,
    devices: int,
    device: str,
    dtype: str,
    peak: float | None,
    calibrate: bool,
    form: str,
) -> None:
    """Relate a speed to the peak of its devices, in three conventions: weights alone (6 N), causal, and full attention.

    Packed sequences, sliding windows, mixtures of experts, several towers and frozen ones are counted by what they
    compute. For a device that is not in the table the utilization is empty: give --peak, such as --calibrate's.

    \b
    pit perf mfu llama-8b.toml --tokens-per-s 10471 --device H200
    """
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.perf.flops import mfu as utilization
    from pitools.perf.flops.model import load_model

    if calibrate:
        with Output(form) as out:
            for row in utilization.calibrate(dtype):
                out(row)
        return
    if model is None or tokens_per_s is None:
        hint = "pit perf mfu MODEL.toml --tokens-per-s 10471 --device H200"
        raise UsageError("expected MODEL.toml and --tokens-per-s, or --calibrate", hint=hint)
    rows = utilization.utilization(load_model(model), tokens_per_s, devices, device, dtype, peak)
    with Output(form, COLUMNS) as out:
        for mfu_row in rows:
            out(mfu_row)
    if rows[0].mfu is None:
        name = device or "no --device"
        click.echo(f'pit: no peak is known for "{name}" with {dtype}: give --peak TFLOPS', err=True)
