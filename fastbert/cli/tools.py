"""The commands check, export, plot-attention and info."""

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fastbert
from fastbert import backends
from fastbert.cli.common import (
    DTYPES,
    TEXT_FILE,
    add_device,
    add_json,
    add_text_file,
    check_column,
    device_of,
    lines,
    no_files,
    while_it_is_read,
    write_json,
)
from fastbert.config import BertConfig
from fastbert.prepared import PRECISIONS, home


def add(commands) -> None:
    _add_check(commands)

    export = commands.add_parser("export", help="write a model as ONNX or by torch.export, checked against itself")
    export.add_argument(
        "--model", required=True, help="a directory or a name on the hub; what it is, its config.json says"
    )
    export.add_argument("--format", choices=("onnx", "torch-export"), default="onnx")
    export.add_argument("--output", type=Path, required=True, metavar="PATH", help="PATH.onnx or PATH.pt2")
    export.add_argument("--dtype", choices=DTYPES, default="float32")
    export.set_defaults(run=_export)

    plot = commands.add_parser("plot-attention", help="draw what each token of a text reads")
    plot.add_argument("text", help="in quotes")
    plot.add_argument("--model", required=True, help="a directory, or a name on the hub")
    plot.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    plot.add_argument("--layer", type=int, help="from 0 (default: all)")
    plot.add_argument("--head", type=int, help="from 0 (default: all)")
    plot.set_defaults(run=_plot_attention)

    info = commands.add_parser("info", help="what a bug report needs; with --model, what a model is made of")
    info.add_argument("--model", metavar="NAME_OR_DIR", help='a directory, or a name as "bert-base-uncased (110M)"')
    add_json(info)
    info.set_defaults(run=_info)


def _add_check(commands) -> None:
    from fastbert.cli.check import BACKENDS

    check = commands.add_parser("check", help="compare your model on your text with float64 and with transformers")
    check.add_argument("--model", help="a directory or a name on the hub (default: all-MiniLM-L6-v2, if installed)")
    add_text_file(check, help=f"{TEXT_FILE} (default: Python's documentation)")
    check.add_argument("--json", type=Path, metavar="OUT", help="write the report there as well")
    add_device(check)
    check.add_argument("--dtypes", nargs="+", choices=[*DTYPES, "float64"], help="(default: all)")
    check.add_argument("--backends", nargs="+", choices=BACKENDS, help="(default: all)")
    check.add_argument("--max-length", type=int, default=64, help="tokens of a text (default: 64)")
    check.add_argument("--batch", type=int, help="texts to check on (default: 4, with --prepare 16)")
    check.add_argument("--prepare", choices=list(PRECISIONS), help="say instead what preparing the model costs")
    check.add_argument("--skip", nargs="+", metavar="NAME", help="submodules that are not prepared")
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    """Returns 1 if the accuracy rule is broken, else 0."""
    from rich.console import Console

    from fastbert.cli import check, check_prepared
    from fastbert.cli.demo import minilm

    _only_one_check(args)
    check_column(args)
    count = args.batch or (16 if args.prepare else 4)
    texts = check.spread(lines(args.text, args.column), count) if args.text else check.default_texts(count)
    model = args.model or minilm()
    with Console(stderr=True).status("reading") as status:
        common = {"max_length": args.max_length, "tell": status.update}
        if args.prepare:
            report = check_prepared.run(model, texts, args.prepare, skip=args.skip or (), device=args.device, **common)
        else:
            only = {"dtypes": args.dtypes or list(check.DTYPES), "names": args.backends or check.BACKENDS}
            report = check.run(model, texts, device=device_of(args, None), **only, **common)
    with while_it_is_read():
        (check_prepared if args.prepare else check).show(report)
    if args.json:
        report.write(args.json, versions=_versions(), machine=dict(_machine()))
    return 0 if report.ok else 1


def _only_one_check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if args.batch is not None and args.batch < 1:
        raise ValueError(f"--batch is {args.batch}; expected at least 1")
    if args.prepare is None and args.skip:
        raise ValueError("--skip is given without --prepare")
    for name in ("dtypes", "backends") if args.prepare else ():
        if getattr(args, name):
            raise ValueError(f"--{name} is given beside --prepare; expected one of them")
    if args.prepare and args.device and torch.device(args.device).type != (place := home(args.prepare).type):
        raise ValueError(f"--device is {args.device} beside --prepare {args.prepare}; expected {place}")


def _export(args: argparse.Namespace) -> None:
    from rich.console import Console

    from fastbert.auto import trained_model
    from fastbert.inference.export import export

    model = trained_model(args.model, dtype=args.dtype)
    with Console(stderr=True).status("exporting"):
        done = export(model, args.output, args.format)
    for row in done.rows:
        print(row)
    print(f"{done.path}: {', '.join(done.inputs)} -> {', '.join(done.outputs)}, {args.dtype}")


def _plot_attention(args: argparse.Namespace) -> None:
    from fastbert import AutoModel, hub
    from fastbert.data import get_tokenizer
    from fastbert.data.tokenizer import check_tokenizer
    from fastbert.inference import plot_attention

    no_files([args.text], "its text instead of")
    directory = hub.directory_of(args.model)
    model = AutoModel.from_pretrained(directory, add_pooling_layer=False, dtype=torch.float32)
    tokenizer = get_tokenizer(directory)
    check_tokenizer(tokenizer, model.config)
    print(plot_attention(model, tokenizer, args.text, args.output, layer=args.layer, head=args.head))


# ---- info


def _info(args: argparse.Namespace) -> None:
    about = _about_model(args.model) if args.model else {"versions": _versions(), **dict(_machine())}
    if args.json:
        write_json(about)
        return
    for name, value in about.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        print(f"{name + ':':30}{value:,}" if name == "parameters" else f"{name + ':':30}{value}")
    if not args.model:
        print()
        fastbert.explain()


def _about_model(name: str) -> dict[str, Any]:
    """Class, number of parameters (shared ones once) and configuration of a model."""
    from fastbert.auto import model_class_of

    config = _config(name)
    model_class = model_class_of(config)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    return {"model": name, "class": model_class.__name__, "parameters": parameters, **config.to_dict()}


def _config(name: str) -> BertConfig:
    """The configuration of a directory, of a published size, or of a model on the hub."""
    if Path(name).is_dir():
        return BertConfig.from_pretrained(name)
    try:
        return BertConfig.preset(name)
    except ValueError as unknown:
        try:
            return BertConfig.from_pretrained(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}; {unknown}") from None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "fastbert": fastbert.__version__, "torch": str(torch.__version__)}
    return versions | {name: _version(name) for name in ("triton", "transformers", "tokenizers", "safetensors")}


def _machine() -> list[tuple[str, str]]:
    processor, driver = backends.cpuinfo("model name") or platform.processor(), backends.driver_version()
    found = [
        ("system", f"{platform.system()} {platform.machine()}, {processor}, {os.cpu_count()} cores"),
        ("torch", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"),
        ("GPU", _gpu()),
        ("driver", f"serves CUDA {backends.cuda_name(driver)}" if driver else "none"),
    ]
    found += [(name, str(value)) for name, value in backends.build_info().items()]
    if backends.EXTENSION_PROBLEM:
        found.append(("kernels", backends.EXTENSION_PROBLEM))
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none that PyTorch sees"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"{', '.join(names)}, {capability}"
